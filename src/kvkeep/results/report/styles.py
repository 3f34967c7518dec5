"""How policies look in charts and legends: by colour, shape and dash, so that nothing hangs on colour alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvkeep.results.rows import FULL

# SVG paths within -1..1; the charts and the legend draw the same ones.
SHAPES = (
    "M-.85,0A.85,.85,0,1,1,.85,0A.85,.85,0,1,1,-.85,0Z",  # circle
    "M-.8,-.8H.8V.8H-.8Z",  # square
    "M0,-1L1,.75H-1Z",  # triangle
    "M0,-1.1L1,0L0,1.1L-1,0Z",  # diamond
    "M0,1L1,-.75H-1Z",  # triangle, pointing down
    "M-.4,-1H.4V-.4H1V.4H.4V1H-.4V.4H-1V-.4H-.4Z",  # cross
    "M-1,0L.75,-1V1Z",  # triangle, pointing left
)
DASHES = ((), (6, 2), (2, 2), (7, 2, 2, 2))
COLOURS = 8  # --s0 to --s7 in page.css; with seven shapes, 56 policies differ in one or the other
FULL_SHAPE = "M-1,-.3H1V.3H-1Z"


@dataclass(frozen=True)
class Style:
    """How one policy is drawn.

    Attributes:
        index: names the policy in classes and data attributes, where its own name has no business.
        colour: a CSS value.
        shape: an SVG path within -1..1.
        dash: lengths of strokes and gaps, in px.
    """

    index: int
    colour: str
    shape: str
    dash: tuple[int, ...]


def styles_of(policies: Iterable[str]) -> dict[str, Style]:
    """A style for each policy, in their order; the full cache is drawn in the colour of text."""
    return {
        policy: Style(index, "var(--ink)", FULL_SHAPE, (3, 3))
        if policy == FULL
        else Style(index, f"var(--s{index % COLOURS})", SHAPES[index % len(SHAPES)], DASHES[index % len(DASHES)])
        for index, policy in enumerate(policies)
    }

"""A shaded text for the terminal, and as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from string import Template

from rich.console import Console
from rich.style import Style
from rich.text import Text

from kvkeep.hf.shading import Stretch

# From nothing to all cells. Each level sets its own letters and ground, so that dark and light terminals both work.
_LEVELS = (
    Style(dim=True),
    Style(color="#0b3c49", bgcolor="#d7eef0"),
    Style(color="#0b3c49", bgcolor="#9fd3d8"),
    Style(color="#ffffff", bgcolor="#2f8f9d"),
    Style(color="#ffffff", bgcolor="#0b5563"),
)
_NAMES = ("none", "up to 1/4", "up to 1/2", "up to 3/4", "more")


def level(share: float) -> int:
    """Which of the five shades a share gets: none at all, then quarters."""
    return 0 if share <= 0 else min(4, 1 + int((share - 1e-9) * 4))


def print_shaded(console: Console, stretches: Sequence[Stretch], facts: Mapping[str, str]) -> None:
    """Print facts, the text, and what the shades mean.

    Args:
        console: without colours, dots stand for tokens that fewer cells kept than the average token.
        stretches: of the text.
        facts: label and value.
    """
    for label, value in facts.items():
        console.print(Text.assemble((f"{label:9}", "dim"), value))
    console.print()
    coloured = console.color_system is not None and not console.no_color
    letters = sum(len(stretch.text) for stretch in stretches)
    mean = sum(stretch.share * len(stretch.text) for stretch in stretches) / max(1, letters)
    text = Text()
    for stretch in stretches:
        if coloured:
            text.append(stretch.text, _LEVELS[level(stretch.share)])
        else:
            text.append(stretch.text if stretch.share > 0 and stretch.share >= mean else _dotted(stretch.text))
    console.print(text)
    console.print()
    if coloured:
        legend = Text("kept by, of the cells shown: ")
        for name, style in zip(_NAMES, _LEVELS, strict=True):
            legend.append(f" {name} ", style).append(" ")
        console.print(legend)
    else:
        console.print(f"dots: tokens that fewer than {mean:.0%} of the cells kept, the average")


def _dotted(text: str) -> str:
    return "".join(letter if letter.isspace() else "·" for letter in text)


def page(stretches: Sequence[Stretch], facts: Mapping[str, str]) -> str:
    """One HTML file without anything from outside; every text in it is escaped.

    Args:
        stretches: of the text.
        facts: label and value.
    """
    rows = "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in facts.items())
    body = "".join(_span(stretch) for stretch in stretches)
    return _PAGE.substitute(facts=rows, text=body)


def _span(stretch: Stretch) -> str:
    text = escape(stretch.text)
    if stretch.share <= 0:
        return f"<s>{text}</s>"
    return f'<b style="--k:{stretch.share:.3f}" title="kept by {stretch.share:.0%} of the cells">{text}</b>'


_PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>kvkeep: what the cache kept</title>
<style>
:root { color-scheme: light dark; --ink: #16262b; --ground: #fbfaf7; --soft: #5a666b; --faint: #7d878b;
  --line: #dcdfdd; --shade: 15 122 140; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eeee; --ground: #12191c; --soft: #9aa8ad; --faint: #74838a; --line: #2b363a;
    --shade: 36 140 156; } }
body { margin: 0 auto; max-width: 46rem; padding: 2.5rem 1.25rem 4rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.25rem; margin: 0 0 1rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; font-size: .875rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
.legend { display: flex; align-items: center; gap: .5rem; margin: 1.5rem 0; padding: .75rem 0; font-size: .8125rem;
  border-block: 1px solid var(--line); color: var(--soft); }
.ramp { flex: 1; max-width: 14rem; height: .75rem;
  background: linear-gradient(90deg, transparent, rgb(var(--shade) / .75)); outline: 1px solid var(--line); }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: 1.0625rem/1.75 Georgia, "Times New Roman", serif; }
b { font-weight: inherit; background: rgb(var(--shade) / calc(.06 + var(--k) * .69)); padding: .1em 0;
  box-decoration-break: clone; -webkit-box-decoration-break: clone; }
s { text-decoration: none; color: var(--faint); }
</style>
</head>
<body>
<h1>What the cache kept</h1>
<dl>$facts</dl>
<div class="legend"><span>kept by no cell</span><span class="ramp"></span><span>by all cells shown</span></div>
<main class="text">$text</main>
</body>
</html>
""")

"""Drawn tokens follow the distribution, and the same seed draws the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from kvkeep.errors import UnsupportedError
from kvkeep.hf.sampling import Sampling, seed_number

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0, -2.0, 0.5, -4.0])


def expected(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> torch.Tensor:
    """The distribution, written down by hand."""
    p = (LOGITS.double() / temperature).softmax(-1)
    order = p.argsort(descending=True)
    keep = torch.ones(len(p), dtype=torch.bool)
    if top_k:
        keep[order[top_k:]] = False
    p = torch.where(keep, p, 0) / p[keep].sum()
    before = p[order].cumsum(0) - p[order]
    keep[order[before >= top_p]] = False
    p = torch.where(keep, p, 0) / p[keep].sum()
    p = torch.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9},
    ],
)
def test_tokens_come_as_often_as_they_are_likely(options: dict[str, float]) -> None:
    """With these fixed seeds, the test passes; a right sampler fails it for one seed in a thousand."""
    choose = Sampling(**options).chooser("frequencies")  # type: ignore[arg-type]
    drawn = torch.cat([choose(LOGITS[None]) for _ in range(4000)])
    counts = torch.bincount(drawn, minlength=len(LOGITS)).double()
    wanted = expected(**options)  # type: ignore[arg-type]
    assert not counts[wanted == 0].any()
    assert chisquare(counts[wanted > 0], 4000 * wanted[wanted > 0]).pvalue > 1e-3


def test_steps_are_independent_of_one_another() -> None:
    choose = Sampling().chooser("pairs")
    flat = torch.zeros(1, 4)
    drawn = torch.cat([choose(flat) for _ in range(4000)])
    pairs = torch.bincount(4 * drawn[:-1] + drawn[1:], minlength=16)
    assert chisquare(pairs).pvalue > 1e-3


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 5), steps=st.integers(1, 6), seed=st.integers(0, 99))
def test_a_draw_hangs_on_seed_and_step_alone(rows: int, steps: int, seed: int) -> None:
    logits = torch.randn(steps, rows, 50, generator=torch.Generator().manual_seed(seed))
    sampling = Sampling(temperature=0.8, top_p=0.9)
    together, again = sampling.chooser("a", seed), sampling.chooser("a", seed)
    alone = [sampling.chooser("a", seed) for _ in range(rows)]
    for step in logits:
        drawn = together(step)
        assert torch.equal(drawn, again(step))
        assert torch.equal(drawn, torch.cat([choose(step[[row]]) for row, choose in enumerate(alone)]))


def test_policies_that_predict_the_same_say_the_same() -> None:
    choose = Sampling().chooser(0)
    for _ in range(50):
        near = torch.cat([LOGITS[None], LOGITS[None] + 1e-6 * torch.randn(1, len(LOGITS))])
        assert choose(near).unique().numel() == 1


def test_other_seeds_draw_otherwise() -> None:
    flat = torch.zeros(1, 1000)
    drawn = {int(Sampling().chooser(*seed)(flat)) for seed in [("a", 1), ("a", 2), ("a1",), ("b", 1), (1, "a")]}
    assert len(drawn) == 5
    assert 0 <= seed_number("a", 1) < 2**53


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 2.0},
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(options))):
        Sampling(**options)  # type: ignore[arg-type]

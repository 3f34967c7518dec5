"""Our policies against what kvpress 0.5.5 decided on a tiny model (tests/fixtures/kvpress/README.md).

Where the two mean the same, the same entries stay and the model says the same afterwards. Where kvkeep differs on
purpose (docs/from-kvpress.md), the test works out from kvpress's own scores what the difference has to be, and finds
just that.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from kvkeep.budget import ratio_to_entries
from kvkeep.hf.cache import KeepCache
from kvkeep.observation import Observation
from kvkeep.policies import parse_policy
from kvkeep.testing import gathered, ordinary_rotary

from ..kvpress_fixtures import MODEL_FOLDER, Case, case_names, load

LENGTH, LAYERS, HEADS = 237, 3, 2

# The policy that means what a press means, and how much of the text's end has to be protected by the caller: kvpress
# keeps its whole window however small the budget is, where kvkeep's own protection takes at most half of it.
POLICIES = {
    "snapkv": ("snapkv[window=32,kernel=5]", 32),
    "chunkkv_snapkv": ("chunkkv[window=32,kernel=5]", 32),
    "chunkkv_knorm": ("knorm+chunks[length=20]", 0),
    "pyramidkv": ("pyramidkv[window=16,kernel=5,beta=20]", 0),
    "pyramidkv_beta5": ("pyramidkv[window=8,kernel=5,beta=5]", 0),
    "expected_attention": ("expected-attention", 0),
    "expected_attention_n64": ("expected-attention[future=64,value_norm=false]", 0),
    "knorm": ("knorm", 0),
    "keydiff": ("keydiff", 0),
    "tova": ("tova", 0),
    "streaming_llm": ("streaming-llm", 0),
    "adakv_snapkv": ("adasnapkv[window=32,kernel=5,safeguard=0.2]", 32),
    "adakv_knorm": ("knorm+ada[safeguard=0.5]", 0),
    "criticalkv_snapkv": ("criticalkv[window=32,kernel=5]", 32),
    "criticaladakv_snapkv": ("adacriticalkv[window=32,kernel=5]", 32),
    "lagkv_across": ("lagkv[sinks=6,lag=13,across=true]", 0),
    "cur": ("cur", 0),
}
SAME = [name for name in case_names() if not name.startswith(("chunkkv", "pyramidkv"))]


def observations(case: Case, entries: int | None = None, protect_last: int = 0) -> list[Observation]:
    """What our policies see of the prompt, layer by layer."""
    fixtures = load()
    positions = torch.arange(LENGTH).expand(1, HEADS, -1)
    return [
        Observation(
            queries=layer.queries,
            query_positions=torch.arange(LENGTH)[None],
            keys=layer.keys,
            values=layer.values,
            positions=positions,
            valid=torch.ones_like(positions, dtype=torch.bool),
            scaling=fixtures.scale,
            length=LENGTH,
            budget=entries or ratio_to_entries(LENGTH, case.compression_ratio),
            layer=index,
            ordinal=index,
            layers=LAYERS,
            protected=positions >= LENGTH - protect_last if protect_last else None,
            protected_positions=protect_last,
            rotary=ordinary_rotary(16),
            output_weight=output_weight(index),
        )
        for index, layer in enumerate(fixtures.layers)
    ]


@cache
def output_weight(layer: int) -> Tensor:
    """`[H, hidden, D]` of the model's output projection."""
    weight = load_file(MODEL_FOLDER / "model.safetensors")[f"model.layers.{layer}.self_attn.o_proj.weight"]
    return weight.view(weight.shape[0], 4, 16).transpose(0, 1)


def kept(name: str, seen: list[Observation]) -> list[list[list[int]]]:
    """Positions that stay, by layer and KV head."""
    policy = parse_policy(name)
    judged = [policy.judge(gathered(o, policy.needs())) for o in seen]
    return [
        [head.nonzero()[:, 0].tolist() for head in mask[0]]
        for judgement in judged
        for mask in policy.choose([judgement])
    ]


def theirs(case: Case) -> list[list[list[int]]]:
    return [[head.tolist() for head in layer] for layer in case.kept]


def best(scores: Tensor, count: int) -> set[int]:
    return set(scores.topk(count).indices.tolist())


# --- what stays -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAME)
def test_the_same_entries_stay(name):
    case = load().cases[name]
    policy, window = POLICIES[case.press]
    assert kept(policy, observations(case, protect_last=window)) == theirs(case)


@pytest.mark.parametrize("name", [n for n in SAME if n.endswith("@0.5")])
def test_half_of_the_budget_holds_the_window_without_help(name):
    case = load().cases[name]
    assert kept(POLICIES[case.press][0], observations(case)) == theirs(case)


@pytest.mark.parametrize("name", case_names())
def test_scores_are_the_same_where_none_is_forced(name):
    case = load().cases[name]
    policy, window = POLICIES[case.press]
    if case.press == "streaming_llm":
        return  # 0 and 1 there, positions here
    parsed = parse_policy(policy)
    sinks, own = parsed.scorer.protects(observations(case)[0])
    free = slice(sinks, LENGTH - own)
    for index, o in enumerate(observations(case, protect_last=window)):
        scores = parsed.judge(gathered(o, parsed.needs())).scores[0, :, free]
        torch.testing.assert_close(scores, case.scores[index][:, free], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["snapkv@0.75", "adakv_snapkv@0.75"])
def test_a_window_above_half_of_the_budget_shrinks(name):
    """A budget of 59 keeps the last 29 for sure, not 32; the rest goes to the best scores, whose neighbours now include
    the three entries that are no longer forced."""
    case = load().cases[name]
    policy, _ = POLICIES[case.press]
    ours = kept(policy, observations(case))
    total = [sum(map(len, layer)) for layer in ours]
    assert total == [sum(map(len, layer)) for layer in theirs(case)] == [118] * LAYERS
    for index, o in enumerate(observations(case)):
        attention = o.window_attention(32)[0].masked_fill(torch.arange(LENGTH) >= LENGTH - 29, 0)
        pooled = torch.nn.functional.avg_pool1d(attention, 5, stride=1, padding=2)[:, : LENGTH - 29]
        for head in range(HEADS):
            assert set(range(LENGTH - 29, LENGTH)) <= set(ours[index][head])
            n = len(ours[index][head]) - 29
            assert set(ours[index][head]) == best(pooled[head], n) | set(range(LENGTH - 29, LENGTH))
            assert n == 30 or case.press == "adakv_snapkv"
            # Among entries far from the window, the two agree on the order.
            far = [p for p in ours[index][head] if p < LENGTH - 34]
            assert set(far) == best(case.scores[index][head, : LENGTH - 34], len(far))


@pytest.mark.parametrize("name", case_names("chunkkv_knorm"))
def test_chunks_never_exceed_the_budget(name):
    """kvpress rounds the number of chunks and exceeds the budget by 2 and by 1 entries; ours takes a chunk less."""
    case = load().cases[name]
    policy, _ = POLICIES[case.press]
    budget = ratio_to_entries(LENGTH, case.compression_ratio)
    count = len(case.chunks[0])
    assert count * 20 > budget
    for layer, chunks in zip(kept(policy, observations(case)), case.chunks, strict=True):
        fewer = sorted(p for chunk in chunks[: count - 1] for p in range(chunk * 20, chunk * 20 + 20))
        assert layer == [fewer, fewer]
    # With room for as many as kvpress keeps, the same entries stay.
    assert kept(policy, observations(case, entries=count * 20)) == theirs(case)


@pytest.mark.parametrize("protect_last", [0, 32])
@pytest.mark.parametrize("name", case_names("chunkkv_snapkv"))
def test_the_window_is_no_part_of_the_chunks(name, protect_last):
    """In kvpress the window's forced scores win the last two chunks whole. Here the window stays by itself, what else
    lies in its chunks is judged by its own mean, and the best chunks follow while they fit."""
    case = load().cases[name]
    policy, _ = POLICIES[case.press]
    budget = ratio_to_entries(LENGTH, case.compression_ratio)
    window = max(protect_last, min(32, budget // 2))
    start = LENGTH - window
    for index, o in enumerate(observations(case)):
        attention = o.window_attention(32)[0].masked_fill(torch.arange(LENGTH) >= start, 0)
        scores = torch.nn.functional.avg_pool1d(attention, 5, stride=1, padding=2)
        if window == 32:
            torch.testing.assert_close(scores[:, :start], case.scores[index][:, :start], rtol=1e-5, atol=1e-8)
        members = {c: [p for p in range(c * 20, c * 20 + 20) if p < start] for c in range(12)}
        means = {c: float(scores[:, m].sum(0).mean()) for c, m in members.items() if m}
        order = sorted(means, key=means.__getitem__, reverse=True)
        # Chunks without the window have the same order in kvpress.
        of_theirs = [c for c in case.chunk_scores[index].argsort(descending=True).tolist() if c < 10]
        assert [c for c in order if c < 10] == of_theirs or window < 32
        expected, room = set(range(start, LENGTH)), budget - window
        for chunk in order:
            if len(members[chunk]) > room:
                break
            expected.update(members[chunk])
            room -= len(members[chunk])
        ours = kept(policy, observations(case, protect_last=protect_last))[index]
        assert ours == [sorted(expected)] * HEADS
        assert len(expected) <= budget


@pytest.mark.parametrize("name", case_names("pyramidkv", "pyramidkv_beta5"))
def test_a_pyramid_spends_the_models_budget(name):
    """kvpress takes the window from the last layer's share and lets the total drift, or falls back to equal layers;
    ours has the paper's shares beyond the window, and the exact total. The entries are the first of the same ranking.
    """
    case = load().cases[name]
    policy, _ = POLICIES[case.press]
    window, beta = case.options["window_size"], case.options["beta"]
    budget = ratio_to_entries(LENGTH, case.compression_ratio)
    ours = kept(policy, observations(case))
    counts = [len(layer[0]) for layer in ours]
    assert sum(counts) == LAYERS * budget
    assert counts[1] == budget
    assert counts[2] == window + round((budget - window) / beta)
    for index, (layer, layer_of_theirs) in enumerate(zip(ours, theirs(case), strict=True)):
        for head in range(HEADS):
            expected = best(case.scores[index][head], counts[index])  # the forced window first
            assert set(layer[head]) == expected
            assert counts[index] != len(layer_of_theirs[head]) or layer[head] == layer_of_theirs[head]


def test_kvpress_pyramids_do_not_keep_their_total():
    drifting = [row for row in load().pyramid_counts if row.layers > 1]
    totals = {sum(row.kept) - row.layers * ratio_to_entries(row.length, row.compression_ratio) for row in drifting}
    assert totals != {0}


def test_budgets_differ_only_where_a_float_falls_short():
    lost = []
    for row in load().kept_counts:
        ours = ratio_to_entries(row.length, row.compression_ratio)
        if ours != row.kept:
            assert ours == row.kept + 1
            assert abs(row.length * (1 - row.compression_ratio) - ours) < 1e-9
            lost.append((row.length, row.compression_ratio))
    assert (100, 0.9) in lost
    assert (1000, 0.8) in lost
    assert len(lost) < len(load().kept_counts) / 4


# --- what the model says afterwards -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", name="model")
def _model():
    return LlamaForCausalLM.from_pretrained(MODEL_FOLDER, attn_implementation="sdpa").eval().requires_grad_(False)


def forward(model, ids, cache):
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(input_ids=ids, **{name: cache}).logits[0]


def answer(model, cache) -> tuple[Tensor, Tensor, list[int]]:
    """The prompt's last logits, those of the question and of three greedy tokens, and these tokens."""
    fixtures = load()
    last = forward(model, fixtures.input_ids[None], cache)[-1]
    rows, tokens = [forward(model, fixtures.question_ids[None], cache)], []
    for _ in range(3):
        tokens.append(int(rows[-1][-1].argmax()))
        rows.append(forward(model, torch.tensor([[tokens[-1]]]), cache))
    return last, torch.cat(rows), tokens


@pytest.mark.parametrize("name", ["full", *SAME])
def test_the_model_says_the_same(model, name):
    case = load().cases[name]
    policy, window = POLICIES.get(case.press, ("full", 0))
    protect = [(-window, None)] if window else []
    cache = KeepCache(model, policy, compression_ratio=case.compression_ratio, protect=protect)
    last, logits, tokens = answer(model, cache)
    torch.testing.assert_close(last, load().prompt_logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(logits, case.logits, atol=1e-4, rtol=0)
    assert tokens == list(case.greedy)
    for layer in range(LAYERS):
        for head in range(HEADS):
            positions = cache.kept_positions(layer, head=head)
            assert positions[positions < LENGTH].tolist() == case.kept[layer][head].tolist()


@pytest.mark.parametrize("name", case_names("chunkkv_knorm"))
def test_the_model_says_the_same_after_as_many_chunks(model, name):
    case = load().cases[name]
    cache = KeepCache(model, POLICIES[case.press][0], entries=len(case.kept[0][0]))
    _, logits, tokens = answer(model, cache)
    torch.testing.assert_close(logits, case.logits, atol=1e-4, rtol=0)
    assert tokens == list(case.greedy)


# --- the page about it ------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "from-kvpress.md"


def test_the_pages_policies_exist():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 10
    for row in rows:
        if "PerLayer" not in row:
            parse_policy(re.findall("`([^`]*)`", row.split("|")[2])[0])


def test_the_pages_code_runs():
    code = "\n".join(re.findall("```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL))
    names: dict[str, object] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    assert isinstance(names["cache"], KeepCache)

"""KVzip: what the second pass has seen is the score; sinks stay by structure."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from kvkeep import KeepCache, RepeatPrompt
from kvkeep.budget import ratio_to_entries
from kvkeep.errors import PolicyError
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.observation import Needs, SecondPass
from kvkeep.policies import Ada, KVzip, Policy, Threshold, TopK, Uniform, parse_policy, policy_string
from kvkeep.testing import check_policy, gathered, random_observation

from ..kvpress_fixtures import FOLDER, MODEL_FOLDER, load
from ..peer_problems.common import held, spy
from .test_scorers import cells


@pytest.mark.parametrize(
    "name",
    ["kvzip", "kvzip-plus", "kvzip+ada", "kvzip+threshold[floor=32]", "kvzip-plus+chunks", "kvzip[chunk=7,sinks=0]"],
)
def test_it_keeps_the_contract(name):
    assert check_policy(name) == []


def test_names():
    assert parse_policy("kvzip") == Policy(KVzip(), Uniform(), TopK())
    assert parse_policy("kvzip-plus") == Policy(KVzip(normalised=True), Uniform(), TopK())
    assert parse_policy("kvzip+threshold[floor=32]") == Policy(KVzip(), Threshold(32), TopK())
    assert parse_policy("kvzip[chunk=512]+ada") == Policy(KVzip(chunk=512), Ada(), TopK())
    for policy in (Policy(KVzip(512), Ada(), TopK()), Policy(KVzip(normalised=True), Threshold(), TopK())):
        assert parse_policy(policy_string(policy)) == policy


def test_what_it_needs_is_the_whole_text_and_its_repetition():
    needs = KVzip(chunk=512, sinks=2).needs()
    assert needs == Needs(second_passes=frozenset({SecondPass(512, 2)}))
    assert needs.whole_text
    both = needs | KVzip().needs() | Needs(queries=3)
    assert both == Needs(queries=3, second_passes=frozenset({SecondPass(512, 2), SecondPass()}))
    assert (both | needs) == both


@pytest.mark.parametrize("ragged", [False, True])
def test_the_score_is_what_the_second_pass_has_seen(ragged):
    o = random_observation(length=50, budget=20, ragged=ragged, batch=2)
    seen = o.second_passes[SecondPass()]
    judgement = parse_policy("kvzip").judge(gathered(o, KVzip().needs()))
    assert torch.equal(judgement.scores[o.valid], seen[o.valid])
    assert torch.equal(judgement.protected, o.valid & (o.positions < 4))


def test_a_pass_that_was_not_declared_is_refused():
    o = gathered(random_observation(length=20), KVzip().needs())
    with pytest.raises(PolicyError, match="a policy whose `needs` declares its second pass"):
        KVzip(chunk=5).score(o)
    with pytest.raises(PolicyError, match="in layer 3"):
        KVzip().score(replace(o, second_passes={}, layer=3))


@pytest.mark.parametrize("options", [{"chunk": 0}, {"sinks": -1}], ids=str)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        KVzip(**options)


@pytest.mark.parametrize("shape", [{"length": 43}, {"length": 60, "ragged": True, "batch": 2}], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_attention_peaks_are_the_largest_rows(shape, weighted):
    """Against loops over heads, queries and entries."""
    o = random_observation(**shape, seed=3)
    weights = torch.rand(o.queries.shape[0], o.queries.shape[2]) if weighted else None
    peaks = o.attention_peaks(weights)
    assert peaks.shape == (o.queries.shape[0], o.keys.shape[1], 2, o.keys.shape[2])
    for row, heads in enumerate(cells(o)):
        for head, cell in enumerate(heads):
            for member, rows in enumerate(cell.attention(1000)):
                factors = [1.0] * len(rows) if weights is None else weights[row].tolist()
                expected = [max(f * r[n] for f, r in zip(factors, rows, strict=True)) for n in range(len(rows[0]))]
                found = peaks[row, head, member][o.valid[row, head]].double()
                torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=2e-5, atol=1e-7)


# --- kvpress ----------------------------------------------------------------------------------------------------------


def test_scores_and_kept_entries_are_those_of_kvpress():
    """With the request that its stand-in for a tokenizer made (fixtures/kvpress/make_kvzip.py), in three chunks."""
    theirs = load_file(FOLDER / "kvzip.safetensors")
    prompt = RepeatPrompt(*(tuple(theirs[f"request/{name}"].tolist()) for name in ("first", "further", "footer")))
    model = LlamaForCausalLM.from_pretrained(MODEL_FOLDER, attn_implementation="sdpa").eval().requires_grad_(False)
    chunk = int(theirs["chunk"])
    scorers = {"kvzip": KVzip(chunk), "kvzip_plus": KVzip(chunk, normalised=True)}
    policy, seen = spy(second_passes=frozenset(scorer.second_pass for scorer in scorers.values()))
    ids = load().input_ids[None]
    model(ids, **{CACHE_ARGUMENT: KeepCache(model, policy, entries=1, repeat_prompt=prompt)})
    budget = ratio_to_entries(ids.shape[1], 0.5)
    for name, scorer in scorers.items():
        scores = theirs[f"scores/{name}"]  # [layers, H_kv, L]
        ours = torch.stack([o.second_passes[scorer.second_pass][0] for o in seen])
        # The sinks are seen in every chunk; kvpress, which keeps them anyway, looks at the first one.
        torch.testing.assert_close(ours[..., 4:], scores[..., 4:], rtol=1e-4, atol=1e-7)
        scores[..., :4] = torch.inf
        kept = torch.zeros(scores.numel(), dtype=torch.bool)
        kept[scores.flatten().topk(6 * budget).indices] = True
        cache = KeepCache(
            model, Policy(scorer, Threshold(floor=0), TopK()), compression_ratio=0.5, repeat_prompt=prompt
        )
        model(ids, **{CACHE_ARGUMENT: cache})
        expected = [[head.nonzero()[:, 0].tolist() for head in layer] for layer in kept.view(scores.shape)]
        assert [held(cache, layer) for layer in range(3)] == expected

"""check_policy finds nothing wrong with our policies, and names the fault of policies that break the contract."""

from __future__ import annotations

import inspect
import random
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from kvkeep.errors import PolicyError, UnsupportedError
from kvkeep.hf.cache import KeepCache
from kvkeep.observation import Needs, SecondPass
from kvkeep.policies import Policy, Scorer, TopK, Uniform, available_policies
from kvkeep.policies.allocators import Allocator, top_mask
from kvkeep.policies.protocols import Selector
from kvkeep.testing import check_policy, fake_model, gathered, ordinary_rotary, random_observation

COMPOSED = [
    "snapkv[window=64]+ada+chunks[length=20]",
    "snapkv+pyramid",
    "snapkv[kernel=1,pool=max]+threshold",
    "frc+topk",
    "chunkkv[fill=true]",
    "chunkkv[shared=false,length=7]",
    "knorm+threshold[floor=8]",
    "knorm+threshold[floor=0]+chunks[length=3]",
    "knorm+pyramid[beta=2]",
    "snapkv+threshold[floor=32,cap=1.5]",
    "snapkv+flat",
    "knorm+flat[safeguard=0]+chunks[length=3]",
    "keydiff+threshold+critical[first=0.25]",
    "lagkv[lag=8,sinks=2]",
    "lagkv[lag=5,across=true]+ada",
    "cur[window=0,combine=mean]+flat",
    "simlayer[sinks=1,recent=3,queries=4]",
    "random[seed=3]+ada",
    "keydiff+ada[safeguard=0]+chunks[length=8]",
    "expected-attention[covariance=false,epsilon=0.01]+ada",
    "kvzip+threshold[floor=32]",
]


@pytest.mark.parametrize("name", [*available_policies(), *COMPOSED])
def test_our_policies_keep_the_contract(name):
    assert check_policy(name) == []


# --- broken policies --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken(Scorer):
    """A sound scorer, which its children spoil."""

    name: ClassVar[str] = "broken"

    def score(self, observation):
        return observation.key_norms()


class NotDeterministic(Broken):
    def score(self, observation):
        return torch.from_numpy(np.random.default_rng().random(observation.positions.shape)).float()


class GlobalGenerator(Broken):
    def score(self, observation):
        torch.manual_seed(0)  # deterministic, but everybody else's numbers change
        return torch.rand(observation.positions.shape)


class PythonsGenerator(Broken):
    def score(self, observation):
        return observation.key_norms() + 0 * random.random()


class Mutating(Broken):
    def score(self, observation):
        return observation.keys.float().mul_(2).norm(dim=-1)


class NotFinite(Broken):
    def score(self, observation):
        return observation.key_norms().log() * 0 / (observation.positions - observation.positions)


class HalfOverflow(Broken):
    def score(self, observation):  # the norm of a long key, squared in float16
        return observation.keys.square().sum(-1).float()


class HalfScores(Broken):
    def score(self, observation):
        return observation.key_norms().half()


class OneScoreForAllHeads(Broken):
    def score(self, observation):
        return observation.key_norms()[:, 0]


class ReadsMissing(Broken):
    def score(self, observation):  # the mean runs over slots that hold nothing
        norms = observation.key_norms()
        return -(norms - norms.mean(-1, keepdim=True)).abs()


class CountsMissing(Broken):
    def score(self, observation):  # how far from the end depends on how many slots other cells need
        return torch.arange(observation.keys.shape[2], 0, -1).sub(40).abs().float().expand(observation.valid.shape)


class OtherRows(Broken):
    def score(self, observation):
        norms = observation.key_norms().masked_fill(~observation.valid, 0)
        return -(norms - norms.max()).abs() * (norms.sum((1, 2), keepdim=True) == norms.sum((1, 2)).max()).float()


class UndeclaredQueries(Broken):
    def needs(self):
        return Needs(queries=4)

    def score(self, observation):
        return observation.window_attention(16)


class NoDeclaredQueries(Broken):
    def score(self, observation):
        return observation.window_attention(16)


class UndeclaredRotary(Broken):
    def score(self, observation):
        return observation.key_norms() if observation.rotary is None else -observation.key_norms()


class NeedsGrad(Broken):
    def score(self, observation):
        return observation.key_norms() * (-1.0 if observation.keys.requires_grad else 1.0)


class TooMany(Allocator):
    name: ClassVar[str] = "too-many"

    def allocate(self, judgements):
        return [torch.clamp(j.available, max=j.budget + 1) for j in judgements]


class TooFew(Allocator):
    name: ClassVar[str] = "too-few"

    def allocate(self, judgements):
        return [torch.clamp(j.available, max=min(j.budget, 30)) for j in judgements]


class Nothing(Allocator):
    name: ClassVar[str] = "nothing"

    def allocate(self, judgements):
        return [j.pinned for j in judgements]


class KeepsMissing(Selector):
    name: ClassVar[str] = "keeps-missing"

    def select(self, judgement, counts):
        return top_mask(judgement.scores.nan_to_num().masked_fill(judgement.protected, torch.inf), counts)


class DropsProtected(Selector):
    name: ClassVar[str] = "drops-protected"

    def select(self, judgement, counts):
        return top_mask(judgement.scores.masked_fill(~judgement.valid, -torch.inf), counts)


class MasksOfNumbers(Selector):
    name: ClassVar[str] = "numbers"

    def select(self, judgement, counts):
        return TopK().select(judgement, counts).long()


class NarrowMasks(Selector):
    name: ClassVar[str] = "narrow"

    def select(self, judgement, counts):
        return TopK().select(judgement, counts)[..., :-1]


class Raises(Selector):
    name: ClassVar[str] = "raises"

    def select(self, judgement, counts):
        raise ZeroDivisionError("a policy divides by zero")


def with_scorer(scorer):
    return Policy(scorer(), Uniform(), TopK())


class Deaf(Policy):
    """Does not look at what the caller protects."""

    def judge(self, observation):
        return super().judge(replace(observation, protected=None))


@dataclass
class Thawed:
    """Not frozen, and remembers what it saw."""

    seen: list = field(default_factory=list)
    inner: Policy = field(default_factory=lambda: with_scorer(Broken))
    scope: ClassVar[str] = "layer"

    def needs(self):
        return self.inner.needs()

    def judge(self, observation):
        self.seen.append(observation.layer)
        judgement = self.inner.judge(observation)
        return replace(judgement, scores=judgement.scores.roll(len(self.seen), dims=-1))

    def choose(self, judgements):
        return self.inner.choose(judgements)


BROKEN = [
    (with_scorer(NotDeterministic), "not deterministic"),
    (with_scorer(GlobalGenerator), "uses a global random generator"),
    (with_scorer(PythonsGenerator), "uses a global random generator"),
    (with_scorer(Mutating), "changes its input: Observation.keys"),
    (with_scorer(NotFinite), "NaN or infinite"),
    (with_scorer(HalfOverflow), "near its largest number"),
    (with_scorer(HalfScores), "torch.float16"),
    (with_scorer(OneScoreForAllHeads), "float32 scores of shape (1, 2, 67)"),
    (with_scorer(ReadsMissing), "reads missing slots"),
    (with_scorer(CountsMissing), "reads missing slots: other entries stay if there are more missing slots"),
    (with_scorer(OtherRows), "rows see one another"),
    (with_scorer(UndeclaredQueries), "uses what it did not declare"),
    (with_scorer(NoDeclaredQueries), "`needs` declares the queries"),
    (with_scorer(UndeclaredRotary), "uses what it did not declare"),
    (with_scorer(NeedsGrad), "depends on the autograd mode"),
    (Policy(Broken(), TooMany(), TopK()), "over budget: keeps 84 entries of a row where the budget allows 80"),
    (Policy(Broken(), TooFew(), TopK()), "drops entries without need"),
    (Policy(Broken(), Nothing(), TopK()), "keeps nothing"),
    (Policy(Broken(), Uniform(), KeepsMissing()), "keeps missing entries"),
    (Policy(Broken(), Uniform(), DropsProtected()), "drops protected entries"),
    (Policy(Broken(), Uniform(), MasksOfNumbers()), "wrong masks"),
    (Policy(Broken(), Uniform(), NarrowMasks()), "wrong masks"),
    (Policy(Broken(), Uniform(), Raises()), "raises ZeroDivisionError: a policy divides by zero"),
    (Deaf(Broken(), Uniform(), TopK()), "accepts too much protection"),
    (Thawed(), "not a frozen dataclass"),
    (Thawed(), "not deterministic"),
]


@pytest.mark.parametrize(("policy", "fault"), BROKEN, ids=lambda x: x.replace(" ", "-")[:30] if type(x) is str else "")
def test_the_fault_is_named(policy, fault):
    with pytest.raises(PolicyError) as caught:
        check_policy(policy)
    assert fault in str(caught.value)


def test_faults_can_be_returned():
    found = check_policy(Policy(Broken(), Uniform(), NarrowMasks()), raise_on_failure=False)
    assert (
        "wrong masks: expected bool masks of shape (1, 2, 67), received torch.bool of (1, 2, 66) (a first prompt)"
        in found
    )


def test_a_sound_foreign_policy_passes():
    assert check_policy(with_scorer(Broken)) == []


def test_parts_without_a_name_pass():
    @dataclass(frozen=True)
    class MyScorer(Scorer):
        def score(self, observation):
            return observation.key_norms()

    assert check_policy(with_scorer(MyScorer)) == []


def test_what_is_no_policy_is_refused():
    with pytest.raises(PolicyError, match="snapkv"):
        check_policy("snapk")
    with pytest.raises(PolicyError, match="a policy or its name"):
        check_policy(Broken())


# --- observations -----------------------------------------------------------------------------------------------------


def test_an_observation_of_a_first_prompt():
    observation = random_observation(batch=2, heads=6, kv_heads=2, length=50, head_size=10, queries=7, budget=9)
    assert observation.queries.shape == (2, 6, 7, 10)
    assert observation.keys.shape == observation.values.shape == (2, 2, 50, 10)
    assert observation.positions[1, 1].tolist() == list(range(50))
    assert observation.query_positions[1].tolist() == list(range(43, 50))
    assert observation.valid.all()
    assert observation.output_weight.shape == (6, 60, 10)
    assert observation.group == 3
    assert observation.budget == 9


def test_a_ragged_observation():
    observation = random_observation(batch=3, length=80, ragged=True, protect=[(0, 4), (70, 90)])
    assert observation.held.unique().numel() > 1
    for positions, valid in zip(observation.positions.flatten(0, 1), observation.valid.flatten(0, 1), strict=True):
        held = positions[valid].tolist()
        assert held == sorted(set(held))
        assert held[-20:] == list(range(60, 80))
    assert observation.protected_positions == 14
    assert observation.query_positions[0].tolist() == list(range(60, 80))


def test_an_observation_depends_on_its_seed_alone():
    state = torch.get_rng_state()
    first, again, other = (random_observation(seed=seed, ragged=True) for seed in (1, 1, 2))
    assert torch.equal(first.keys, again.keys)
    assert first.keys.shape != other.keys.shape or not torch.equal(first.keys, other.keys)
    assert torch.equal(state, torch.get_rng_state())


def test_an_adapter_gives_what_was_declared():
    full = random_observation(length=30)
    bare = gathered(full, Needs())
    assert bare.queries.shape[2] == 0
    assert bare.rotary is None
    assert bare.output_weight is None
    some = gathered(full, Needs(queries=5, rotary=True, output_weight=True))
    assert torch.equal(some.queries, full.queries[:, :, -5:])
    assert some.query_positions[0].tolist() == [25, 26, 27, 28, 29]
    assert some.rotary is full.rotary
    assert some.output_weight is full.output_weight
    assert gathered(full, Needs(queries=None)).queries.shape[2] == 30
    assert not bare.second_passes
    asked = SecondPass(chunk=5)
    [(given, attention)] = gathered(full, Needs(second_passes=frozenset({asked}))).second_passes.items()
    assert given == asked
    assert attention.shape == full.valid.shape


def test_ordinary_rotary_is_llamas():
    model, _ = fake_model("llama", head_size=8, heads=2)
    positions = torch.arange(5)[None]
    cos, sin = model.model.rotary_emb(torch.zeros(1), positions)
    ours = ordinary_rotary(8).cos_sin(positions)
    torch.testing.assert_close((cos, sin), ours)


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "gemma3"])
def test_a_fake_model_runs(architecture):
    state = torch.get_rng_state()
    model, tokenizer = fake_model(architecture, layers=2)
    twin, _ = fake_model(architecture, layers=2)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    ids = tokenizer("a text of thirty-four bytes, or so", return_tensors="pt").input_ids
    generated = model.generate(ids, max_new_tokens=3, do_sample=False, attention_mask=torch.ones_like(ids))
    assert generated.shape[1] <= ids.shape[1] + 3
    logits = model(ids).logits[0, -1]
    assert logits.std() > 0.1  # not a model that finds all tokens alike

    cache = KeepCache(model, "snapkv[window=4]", entries=10)
    given = {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}
    model.generate(ids, max_new_tokens=3, do_sample=False, attention_mask=torch.ones_like(ids), **given)
    assert cache.kept_positions(cache.keep_layers[0].index).numel() < ids.shape[1]
    assert len(cache.keep_layers) == (1 if architecture == "gemma3" else 2)


def test_a_fake_model_in_half_precision():
    model, tokenizer = fake_model("llama", dtype=torch.bfloat16, layers=1, heads=2, kv_heads=1, head_size=8, seed=3)
    assert model.dtype == torch.bfloat16
    assert model(tokenizer("abc", return_tensors="pt").input_ids).logits.shape == (1, 3, len(tokenizer))


def test_an_unknown_architecture():
    with pytest.raises(UnsupportedError, match="did you mean 'llama'"):
        fake_model("lama")


@pytest.mark.parametrize("text", ["plain", "  two spaces\n\ttab ", "Grüße, 世界 🌍", ""])
def test_the_tokenizer_gives_every_text_back(text):
    _, tokenizer = fake_model()
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_tokenizer_knows_chats():
    _, tokenizer = fake_model()
    messages = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<s>user\nHello</s>\n<s>assistant\n"
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nHello\nassistant\n"
    batch = tokenizer(["one", "three"], padding=True, return_tensors="pt")
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]

"""Programs as policies: what they keep, what they may not do, and how they are named."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvkeep
from kvkeep.errors import BudgetError, PolicyError
from kvkeep.evolve.context import contexts_of
from kvkeep.evolve.guard import PolicyRefused, check_source
from kvkeep.evolve.policy import ProgramPolicy, policy_of
from kvkeep.evolve.program import SEEDS, Program, ProgramError, seed_program
from kvkeep.policies import FRC, Ada, Policy, TopK, Uniform, parse_policy, policy_string, registry
from kvkeep.testing import check_policy, fake_model, gathered, random_observation

PAGE = Path(__file__).parents[2] / "docs" / "evolve.md"

FIRST = """\
def score_tokens(context):
    return context.recency


def select_tokens_to_keep(scores, context):
    return np.arange(context.K)
"""


def policy(block: str = FIRST, name: str = "mine") -> ProgramPolicy:
    return ProgramPolicy(Program(f"import numpy as np\n# EVOLVE-BLOCK-START\n{block}# EVOLVE-BLOCK-END\n", name))


def kept(policy, observation) -> torch.Tensor:
    [mask] = policy.choose([policy.judge(gathered(observation, policy.needs()))])
    return mask


def positions(policy, observation, row: int = 0, head: int = 0) -> list[int]:
    return observation.positions[row, head][kept(policy, observation)[row, head]].tolist()


# --- the seeds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEEDS)
def test_seeds_keep_the_contract_of_policies(name):
    assert check_policy(ProgramPolicy(seed_program(name))) == []


@pytest.mark.parametrize("name", SEEDS)
def test_seeds_pass_the_guard(name):
    check_source(seed_program(name).source)


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 300),
    share=st.floats(0.01, 1),
    kv_heads=st.sampled_from([1, 2, 3]),
    batch=st.integers(1, 2),
    protect=st.lists(st.tuples(st.integers(0, 290), st.integers(1, 10)), max_size=2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_the_seed_frc_keeps_the_entries_of_frc(length, share, kv_heads, batch, protect, dtype, seed):
    observation = random_observation(
        length=length,
        budget=max(1, int(share * length)),
        heads=2 * kv_heads,
        kv_heads=kv_heads,
        batch=batch,
        dtype=dtype,
        seed=seed,
    )
    spans = [(start, start + size) for start, size in protect]
    protected = torch.zeros_like(observation.valid)
    for start, end in spans:
        protected |= (observation.positions >= start) & (observation.positions < end)
    if int(protected.sum(-1).max()) <= observation.budget:
        observation = observation.with_protected(protected)
    ours, theirs = parse_policy("program:frc"), parse_policy("frc")
    assert torch.equal(kept(ours, observation), kept(theirs, observation))
    later = cut(observation, kept(ours, observation))  # a later turn
    later = replace(later, budget=max(1, later.budget // 2))
    assert torch.equal(kept(ours, later), kept(theirs, later))


def cut(observation, mask):
    """What is left of an observation, if all cells of all rows keep as many entries; else of its first row."""
    if int(mask.sum(-1).max()) != int(mask.sum(-1).min()):
        names = ("queries", "query_positions", "keys", "values", "positions", "valid")
        observation = replace(observation, protected=None, **{name: getattr(observation, name)[:1] for name in names})
        mask = mask[:1]
    index = mask.int().argsort(dim=-1, descending=True, stable=True)[..., : int(mask.sum(-1).max())]
    wide = index[..., None].expand(-1, -1, -1, observation.keys.shape[-1])
    first = int(observation.positions.gather(2, index)[..., 0].max())  # every query sees at least one entry
    return replace(
        observation,
        queries=observation.queries[:, :, first:],
        query_positions=observation.query_positions[:, first:],
        keys=observation.keys.gather(2, wide),
        values=observation.values.gather(2, wide),
        positions=observation.positions.gather(2, index),
        valid=torch.ones_like(index, dtype=torch.bool),
        protected=None,
    )


def test_the_seed_frc_scores_as_frc_does():
    observation = random_observation(length=200, budget=40)
    ours = parse_policy("program:frc").judge(observation).scores
    theirs = Policy(FRC(), Uniform(), TopK()).judge(observation).scores
    torch.testing.assert_close(ours, theirs)


def test_the_seed_random_looks_random():
    observation = random_observation(length=4000, head_size=2, queries=64)
    [context] = contexts_of(observation)
    functions = seed_program("random").functions()
    scores = np.sort(functions.score_tokens(context))
    assert np.abs(scores - np.linspace(0, 1, 4000)).max() < 0.03  # uniform: the usual distance is 0.014
    assert abs(np.corrcoef(functions.score_tokens(context), context.position)[0, 1]) < 0.05
    other = functions.score_tokens(contexts_of(replace(observation, layer=1))[0])
    assert abs(np.corrcoef(functions.score_tokens(context), other)[0, 1]) < 0.05


def test_the_seed_snapkv_like_keeps_the_end():
    observation = random_observation(length=200, budget=50)
    assert set(range(175, 200)) <= set(positions(parse_policy("program:snapkv-like"), observation))


def test_the_seed_expected_attention_like_keeps_the_start():
    observation = random_observation(length=200, budget=50)
    assert set(range(4)) <= set(positions(parse_policy("program:expected-attention-like"), observation))


# --- budgets ----------------------------------------------------------------------------------------------------------


def test_a_program_keeps_what_it_selects():
    observation = random_observation(length=30, budget=7, batch=2)
    for row in range(2):
        for head in range(2):
            assert positions(policy(), observation, row, head) == list(range(7))


def test_where_everything_may_stay_the_program_is_not_asked():
    broken = policy(FIRST.replace("np.arange(context.K)", "np.arange(0)"))
    for ragged in (False, True):
        observation = random_observation(length=30, budget=30, ragged=ragged)
        assert torch.equal(kept(broken, observation), observation.valid)
    with pytest.raises(PolicyRefused, match="29 of 30 positions"):
        kept(broken, random_observation(length=30, budget=29))


def test_protected_positions_stay_beside_what_is_selected():
    observation = random_observation(length=30, budget=7, protect=[(1, 3), (28, 30)])
    assert positions(policy(), observation) == [0, 1, 2, 3, 4, 28, 29]
    only = random_observation(length=30, budget=4, protect=[(1, 3), (28, 30)])
    assert positions(policy(), only) == [1, 2, 28, 29]
    with pytest.raises(BudgetError, match="protect"):
        kept(policy(), random_observation(length=30, budget=3, protect=[(1, 3), (28, 30)]))


def test_protected_positions_are_scored_with_the_text_and_not_selected():
    """Two of thirty are protected: the program scores thirty, and selects among the others."""
    block = FIRST.replace("context.recency", "np.full(context.L, 1.0 * context.L)")
    block = block.replace("np.arange(context.K)", "np.flatnonzero(scores == context.L + 2)[: context.K]")
    observation = random_observation(length=30, budget=7, protect=[(3, 5)])
    assert positions(policy(block), observation) == list(range(7))


def test_heads_that_hold_different_entries_keep_what_they_hold_of_the_choice():
    observation = random_observation(length=40, budget=12, ragged=True, batch=2)
    mask = kept(policy(), observation)
    for row in range(2):
        union = observation.positions[row][observation.valid[row]].unique()
        for head in range(2):
            held = observation.positions[row, head][observation.valid[row, head]]
            chosen = observation.positions[row, head][mask[row, head]]
            assert chosen.tolist() == held[torch.isin(held, union[:12])].tolist()


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(2, 120),
    share=st.floats(0.01, 0.99),
    ragged=st.booleans(),
    seed=st.integers(0, 100),
    name=st.sampled_from(SEEDS),
)
def test_no_cell_keeps_more_than_the_budget(length, share, ragged, seed, name):
    observation = random_observation(
        length=length, budget=max(1, int(share * length)), ragged=ragged, seed=seed, protect=[(0, 1)]
    )
    program = parse_policy(f"program:{name}")
    counts = kept(program, observation).sum(-1)
    assert int(counts.max()) <= observation.budget
    if not ragged and name != "frc":
        assert (counts == observation.budget).all()


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (FIRST.replace("np.arange(context.K)", "np.arange(context.L)"), "count"),
        (FIRST.replace("np.arange(context.K)", "np.arange(context.K - 1)"), "count"),
        ("CHUNK = 5\n" + FIRST.replace("np.arange(context.K)", "np.arange(context.K - 5)"), "count"),
        (FIRST.replace("np.arange(context.K)", "np.arange(context.K) // 2"), "duplicate"),
        (FIRST.replace("np.arange(context.K)", "np.arange(context.K) - 1"), "range"),
        (FIRST.replace("np.arange(context.K)", "1.0 * np.arange(context.K)"), "dtype"),
        (FIRST.replace("context.recency", "context.recency / 0"), "nonfinite"),
        (FIRST.replace("context.recency", "np.log(context.recency)"), "nonfinite"),
        (FIRST.replace("context.recency", "context.recency[1:]"), "shape"),
        (FIRST.replace("context.recency", "context.recency[10**9]"), "crash"),
        (FIRST.replace("context.recency", "np.mean(context.recency[:0], axis=0) + context.recency"), "nonfinite"),
        ("SIZE = 1 / 0\n" + FIRST, "crash"),
    ],
)
def test_answers_that_break_a_rule_are_refused(block, reason):
    with pytest.raises(PolicyRefused) as caught:
        kept(policy(block), random_observation(length=30, budget=12))
    assert caught.value.reason == reason


def test_fewer_than_k_positions_may_stay_of_chunks():
    block = "CHUNK = 5\n" + FIRST.replace("np.arange(context.K)", "np.arange(context.K - 4)")
    assert positions(policy(block), random_observation(length=30, budget=12)) == list(range(8))


def test_scores_beyond_float32_are_scores():
    block = FIRST.replace("return context.recency", "return context.position.astype(np.float64) * 1e300")
    judgement = policy(block).judge(random_observation(length=30, budget=12))
    assert bool(torch.isfinite(judgement.scores).all())


def test_a_context_cannot_be_written():
    block = FIRST.replace("return", "context.recency[0] = 7\n    return")
    with pytest.raises(PolicyRefused, match="read-only"):
        kept(policy(block), random_observation(length=30, budget=12))


def test_texts_that_programs_may_not_have_are_refused_before_they_run():
    with pytest.raises(PolicyRefused) as caught:
        policy(FIRST.replace("np.arange(context.K)", "np.load('scores.npy')"))
    assert caught.value.layer == "syntax"


# --- names ------------------------------------------------------------------------------------------------------------


def write(path: Path, block: str = FIRST) -> Path:
    path.write_text(policy(block).program.source, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["mine.py", "a+b@c.py", "with space.py", "x+ada.py"])
def test_a_path_names_a_program(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / name)
    parsed = parse_policy(f" Program:{name} ")
    assert parsed == ProgramPolicy(policy().program.with_block(FIRST, Path(name).stem))
    text = policy_string(parsed)
    assert text == f"program:{name}@{policy().program.digest[:12]}"
    assert parse_policy(text) == parsed
    assert policy_string(parse_policy(text)) == text


def test_a_text_with_a_digest_names_one_program_only(tmp_path):
    path = write(tmp_path / "mine.py")
    before = parse_policy(f"program:{path}")
    text = policy_string(before)
    write(path, "# a remark\n" + FIRST)
    assert policy_string(parse_policy(text)) == text
    write(path, FIRST.replace("context.K", "+context.K"))
    with pytest.raises(ProgramError, match="was changed"):
        parse_policy(text)
    assert policy_string(before).startswith("custom:kvkeep.evolve.policy.ProgramPolicy(program=Program(name='mine', di")
    path.unlink()
    with pytest.raises(ProgramError, match="No such file"):
        parse_policy(text)


def test_seeds_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "frc")
    assert parse_policy("program:frc") == ProgramPolicy(seed_program("frc"))
    assert parse_policy("program:./frc") != parse_policy("program:frc")
    assert policy_string(parse_policy("program:frc")) == f"program:frc@{seed_program('frc').short_digest}"


def test_a_program_without_a_place_is_described():
    text = policy_string(policy())
    assert text.startswith("custom:")
    assert policy().program.digest in text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("program:", "directory"),
        ("program:absent.py", "expected-attention-like"),
        ("program:frc@00000000", "00000000"),
        ("program:frc+ada", "not made of exchangeable parts"),
        ("program:frc+ada[safeguard=0]+topk", "not made of exchangeable parts"),
        ("programme:frc", "pieces joined"),
    ],
)
def test_texts_that_name_no_program(text, complaint):
    with pytest.raises(PolicyError, match=complaint):
        parse_policy(text)


@dataclass(frozen=True)
class FromFile(kvkeep.Scorer):
    """A scorer that is made of a file."""

    path: str

    @property
    def text(self) -> str:
        return f"from-file:{self.path}"

    def score(self, observation):
        return observation.key_norms()


def from_file(path: str) -> Policy:
    return Policy(FromFile(path), Uniform(), TopK())


def test_a_scorer_with_a_prefix_has_exchangeable_parts(monkeypatch):
    monkeypatch.setattr(registry, "_prefixes", dict(registry._prefixes))
    monkeypatch.setattr("kvkeep.evolve.policy.from_file", from_file, raising=False)
    registry.register_prefix("from-file", "kvkeep.evolve.policy:from_file", placeholder="PATH", summary="of a file")
    for text in ("from-file:a/b.bin", "from-file:a+b.bin+ada[safeguard=0.5]", "from-file:x+chunks[length=5]"):
        parsed = parse_policy(text)
        assert isinstance(parsed, Policy)
        assert policy_string(parsed) == text
    assert parse_policy("from-file:a+b.bin+ada").allocator == Ada()
    for taken in ("from-file", "snapkv", "ada", "Upper"):
        with pytest.raises(PolicyError, match="name"):
            registry.register_prefix(taken, "a:b", placeholder="PATH", summary="")
    with pytest.raises(PolicyError, match="from-file"):
        kvkeep.register("from-file", from_file("x"), summary="")


# --- with a model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("architecture", "options"), [("llama", {}), ("llama", {"chunk_tokens": 48}), ("gemma3", {})])
def test_a_session_with_a_program_keeps_the_budget_over_turns(architecture, options):
    model, tokenizer = fake_model(architecture)
    session = kvkeep.Session(model, tokenizer, "program:v1-generic", entries=40, **options)
    for turn in range(3):
        session.ingest(f"The ferry leaves at {turn}. " * 6)
        assert all(count == 40 for layer in session.cache.ledger.entries_per_cell for row in layer for count in row)
    assert session.ask("When?", max_new_tokens=3).text is not None


def test_a_saved_cache_finds_its_program_again(tmp_path):
    model, tokenizer = fake_model()
    inputs = tokenizer("The ferry to Port Ellery leaves at nine. " * 3, return_tensors="pt")
    cache = kvkeep.KeepCache(model, "program:frc", compression_ratio=0.5)
    with torch.no_grad():
        model(**inputs, use_cache=True, **{kvkeep.hf.support.CACHE_ARGUMENT: cache})
    cache.save(tmp_path / "cache.safetensors")
    assert kvkeep.KeepCache.load(tmp_path / "cache.safetensors", model).keep_layers[0].policy == policy_of("frc")


def test_the_program_of_the_page_is_one():
    [program] = [
        block
        for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        if "EVOLVE-BLOCK-START" in block
    ]
    assert check_policy(ProgramPolicy(Program(program, "page"))) == []

"""The audit: one selection stored in every way and weighed to the byte; the same entries give the same answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvkeep import Budget, KeepCache
from kvkeep.errors import CacheStateError, ResultsError, TaskError
from kvkeep.hf.decoding import decode_batch
from kvkeep.hf.dense import kept_masks, masked_decode, masked_logits, uniform_cache
from kvkeep.hf.prompting import Prompting
from kvkeep.hf.shared_prompt import SharedPrompt
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.hf.weighing import measure_bytes
from kvkeep.lab.audit import Auditor, AuditSettings, audit, summarise
from kvkeep.lab.audit_storage import STORAGES, DocumentRows, Stored, masked_memory, ragged_memory, uniform_memory
from kvkeep.policies import Policy, Scorer, TopK, Uniform, parse_policy
from kvkeep.results import Row, read_rows
from kvkeep.tasks.continuation import Continuation
from kvkeep.testing import fake_model

from ..bench.toy import Toy

IDS = torch.randint(3, 128, (60,), generator=torch.Generator().manual_seed(0)).tolist()
RAGGED = ("snapkv[window=6]+ada", "knorm+threshold[floor=4]", "snapkv[window=6]+ada+chunks[length=5,shared=false]")
KV_HEADS, SIZE, DOUBLE = 2, 16, 8
VECTORS = 2 * SIZE * DOUBLE  # a key and a value
RATIO, ENTRIES = 0.75, 15


def tiny(architecture: str = "llama") -> Any:
    return fake_model(architecture, dtype=torch.float64, layers=4)[0]


def cuts(model: Any, policy: str) -> dict[str, KeepCache]:
    shared = SharedPrompt(model, IDS, [policy])
    parsed = parse_policy(policy)
    return {
        storage: shared.cut(
            Stored(parsed, storage, ENTRIES), Budget(compression_ratio=0 if storage == "not-enforced" else RATIO)
        )
        for storage in STORAGES
        if storage != "masked"
    }


def counts(cache: KeepCache) -> Tensor:
    """`[layers, H_kv]`."""
    return torch.tensor(cache.ledger.entries_per_cell)[:, 0]


@pytest.mark.parametrize("policy", RAGGED)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_selection_is_widened_or_capped_and_nothing_else(architecture: str, policy: str) -> None:
    model = tiny(architecture)
    stored = cuts(model, policy)
    alone = SharedPrompt(model, IDS, [policy]).cut(policy, Budget(compression_ratio=RATIO))
    ragged = counts(stored["ragged"])
    assert torch.equal(ragged, counts(alone))
    assert int(ragged.max()) > ENTRIES  # or there would be nothing to see
    widest = ragged.amax(1, keepdim=True).expand_as(ragged)
    assert torch.equal(counts(stored["not-enforced"]), widest)
    assert torch.equal(counts(stored["capped"]), ragged.clamp(max=ENTRIES))
    masks = {storage: kept_masks(cache, len(IDS)) for storage, cache in stored.items()}
    for layer, kept in masks["ragged"].items():
        assert bool((masks["not-enforced"][layer] | ~kept).all())
        assert bool((kept | ~masks["capped"][layer]).all())


def test_entries_are_added_and_taken_by_rank() -> None:
    model = tiny()
    stored = cuts(model, "knorm+threshold[floor=0]")
    full = SharedPrompt(model, IDS, ["knorm"]).cut("full", Budget(compression_ratio=0))
    for layer in full.keep_layers:
        for head in range(KV_HEADS):
            best = layer.store.cell(0, head)[0].norm(dim=-1).argsort()
            for cache in stored.values():
                held = cache.kept_positions(layer.index, 0, head).tolist()
                assert held == sorted(best[: len(held)].tolist())


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_uniform_tensors_weigh_their_widest_cell(architecture: str) -> None:
    model = tiny(architecture)
    for storage, cache in cuts(model, RAGGED[0]).items():
        memory, widest = uniform_memory(cache, "layer"), counts(cache).amax(1)
        assert memory.held_bytes == int(widest.sum()) * KV_HEADS * VECTORS
        assert memory.payload_bytes == int(counts(cache).sum()) * VECTORS
        assert memory.slack_bytes == memory.held_bytes - memory.payload_bytes
        assert memory.fraction == memory.held_bytes / cache.ledger.full_bytes
        assert memory.window_bytes == cache.ledger.window_bytes
        assert (memory.slack_bytes == 0) == (storage == "not-enforced")
        dense = uniform_cache(cache)
        for layer in cache.keep_layers:
            for head in range(KV_HEADS):
                keys, values, _ = layer.store.cell(0, head)
                assert torch.equal(dense.layers[layer.index].keys[0, head, : len(keys)], keys)
                assert torch.equal(dense.layers[layer.index].values[0, head, : len(keys)], values)
    with torch.no_grad():
        model(torch.tensor([[5]]), **{CACHE_ARGUMENT: cache})
    with pytest.raises(CacheStateError, match="right after its cut"):
        uniform_cache(cache)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", RAGGED)
@pytest.mark.parametrize("storage", ["ragged", "capped"])
def test_the_peak_is_what_the_text_alone_reaches(architecture: str, policy: str, storage: str) -> None:
    model, parsed = tiny(architecture), parse_policy(policy)
    shared = cuts(model, policy)[storage]
    alone = KeepCache(model, Stored(parsed, storage, ENTRIES), compression_ratio=RATIO)
    with torch.no_grad():
        model(torch.tensor([IDS]), **{CACHE_ARGUMENT: alone})
    assert ragged_memory(shared, parsed.scope).peak_bytes == alone.ledger.peak_bytes
    assert ragged_memory(shared, parsed.scope).held_bytes == alone.ledger.held_bytes


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3", "olmo2", "gemma3"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_hidden_entries_are_as_good_as_deleted(architecture: str, implementation: str) -> None:
    model = fake_model(architecture, dtype=torch.float64, layers=4, attn_implementation=implementation)[0]
    stored = cuts(model, RAGGED[0])
    full = SharedPrompt(model, IDS, ["knorm"]).cut("full", Budget(compression_ratio=0))
    kept = kept_masks(stored["ragged"], len(IDS))
    ids = [7, 8, 9, 10]
    with torch.no_grad():
        evicted = model(torch.tensor([ids]), **{CACHE_ARGUMENT: stored["ragged"].fork()}).logits[0]
        nothing = model(torch.tensor([ids]), **{CACHE_ARGUMENT: full.fork()}).logits[0]
    masked = masked_logits(model, uniform_cache(full), kept, ids, 4)
    # transformers' own eager attention takes its softmax in float32.
    torch.testing.assert_close(masked, evicted, rtol=0, atol=1e-10 if implementation == "sdpa" else 1e-4)
    assert float((masked - nothing).abs().max()) > 1e-3
    answer = masked_decode(model, uniform_cache(full), kept, ids, max_new_tokens=6)
    assert answer == decode_batch(model, stored["ragged"].fork(), [ids], max_new_tokens=6)[0]
    first = masked_decode(model, uniform_cache(full), kept, ids, max_new_tokens=6, stop_tokens=answer[:1])
    assert first == answer[:1]
    dense = uniform_cache(full)
    memory = masked_memory(full, dense, kept)
    assert memory.held_bytes == full.ledger.full_bytes + len(kept) * KV_HEADS * len(IDS)
    assert memory.metadata_bytes == measure_bytes(kept).total


@dataclass(frozen=True)
class Watching(Scorer):
    """Remembers which queries it was shown."""

    window: int = 6

    def needs(self) -> Any:
        return parse_policy(f"snapkv[window={self.window}]").needs()

    def score(self, observation: Any) -> Tensor:
        shown.append((observation.query_positions[0].tolist(), observation.question))
        return observation.window_attention(self.window)


shown: list[tuple[list[int], Any]] = []


def test_the_questions_rows_have_no_say_in_a_ranking_by_the_document() -> None:
    model = tiny()
    policy = Policy(Watching(), Uniform(), TopK())
    document = DocumentRows(policy, 10)
    shared = SharedPrompt(model, IDS, [policy, document, DocumentRows(parse_policy("h2o"), 10)], question=(50, 58))
    shown.clear()
    visible = shared.cut(policy, Budget(entries=ENTRIES))
    assert shown == [(list(range(54, 60)), (50, 58))] * 4
    shown.clear()
    restricted = shared.cut(document, Budget(entries=ENTRIES))
    assert shown == [(list(range(44, 50)), None)] * 4
    assert counts(visible).tolist() == counts(restricted).tolist()
    assert kept_masks(visible, 60)[3].tolist() != kept_masks(restricted, 60)[3].tolist()
    # What the document alone would have kept, but for entries of the question, which nobody looked at.
    before = SharedPrompt(model, IDS[:50], [policy]).cut(policy, Budget(entries=ENTRIES))
    for layer, mask in kept_masks(before, 50).items():
        assert torch.equal(mask, kept_masks(restricted, 60)[layer][:, :50])
    everything = shared.cut(DocumentRows(parse_policy("h2o"), 10), Budget(entries=ENTRIES))
    assert counts(everything).tolist() == [[ENTRIES] * KV_HEADS] * 4
    none = DocumentRows(parse_policy("knorm"), 10)
    assert none.needs().queries == 0
    assert counts(shared.cut(none, Budget(entries=ENTRIES))).tolist() == counts(everything).tolist()


POLICIES = ("snapkv[window=8]+ada", "knorm+threshold[floor=4]")


@pytest.fixture(scope="module")
def haystack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "mine.txt"
    path.write_text(" ".join(f"word{n} and thing{n * 7 % 13}." for n in range(300)))
    return path


@dataclass
class Bench:
    """An audit of a tiny model, ready to run."""

    settings: AuditSettings
    tasks: list[Any]
    auditor: Auditor

    def run(self, folder: Path, on_rows: Callable[[int, int, str], None] = lambda *_: None) -> list[Row]:
        return read_rows(audit(self.settings, self.tasks, folder, self.auditor, on_rows))


@pytest.fixture(scope="module")
def bench(haystack: Path) -> Bench:
    model, tokenizer = fake_model(dtype=torch.float64, layers=3)
    tasks = [Continuation(haystack=haystack, tokens=20), Toy()]
    settings = AuditSettings("tiny", POLICIES, (0.5, 0.75), tuple(t.name for t in tasks), length=200, samples=2)
    auditor = Auditor(
        model, tokenizer, settings, Prompting(tokenizer), identity=("tiny", "0" * 64), versions={"kvkeep": "0"}
    )
    return Bench(settings, tasks, auditor)


@pytest.fixture(scope="module")
def rows(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    return bench.run(tmp_path_factory.mktemp("audit"))


def test_every_way_and_protocol_has_its_row(bench: Bench, rows: list[Row]) -> None:
    texts, questions, selections = 2, 2, len(POLICIES) * 2
    expected = (texts + 3 * questions) * (1 + 4 * selections) + selections  # the full cache; prompts of their own
    assert len(rows) == len({row.key for row in rows}) == expected
    for row in rows:
        assert row.task.startswith(str(row.options["storage"]))
        assert row.protocol == ("query-agnostic" if row.options["ranking"] == "hidden" else "query-aware")
        if row.policy == "full":
            assert (row.fidelity.kl, row.fidelity.top1) == (0, 1)
        elif row.options["storage"] == "own-prefill":
            assert row.options["weighed_bytes"] == row.memory.held_bytes
        else:
            assert row.fidelity.kl is not None
            assert row.fidelity.kl > 0 or row.options["storage"] == "not-enforced"  # which may keep everything
            assert (row.score is None) == (row.metric == "continuation")


def test_masked_and_deleted_say_the_same_and_weigh_differently(rows: list[Row]) -> None:
    place = {
        (r.options["storage"], r.options["ranking"], r.cluster, r.policy, r.budget["compression_ratio"]): r
        for r in rows
    }
    masked = [key for key in place if key[0] == "masked"]
    assert len(masked) == 8 * 4
    for key in masked:
        hidden, deleted = place[key], place["ragged", *key[1:]]
        assert hidden.prediction == deleted.prediction
        assert hidden.fidelity.kl == pytest.approx(deleted.fidelity.kl, abs=1e-6)
        assert hidden.memory.held_bytes > 1.9 * deleted.memory.held_bytes
        assert hidden.memory.fraction > 1


def test_ways_are_ordered_by_what_they_hold(rows: list[Row]) -> None:
    found = summarise(rows)
    held = {(s.protocol, s.policy, s.ratio, s.storage): s for s in found.stored}
    for protocol in ("hidden", "visible", "document"):
        for policy in POLICIES:
            for ratio in (0.5, 0.75):
                wide, capped, ragged, masked = (held[protocol, policy, ratio, storage] for storage in STORAGES)
                assert capped.times_nominal <= 1
                assert 1 < ragged.times_nominal < 1.1  # its positions
                assert ragged.held_bytes < wide.held_bytes < masked.held_bytes
                assert wide.nominal_bytes == ragged.nominal_bytes
                assert (wide.kl_text is None) == (protocol != "hidden")
    assert held["hidden", "full", 0.0, "ragged"].kl_text == 0
    assert found.masking is not None
    assert (found.masking.compared, found.masking.questions, found.masking.same_answers) == (32, 24, 24)
    assert found.masking.largest_kl_difference < 1e-6
    assert [(w.policy, w.ratio) for w in found.weights] == [(p, r) for p in POLICIES for r in (0.5, 0.75)]
    for weight in found.weights:
        parts = weight.payload_bytes + weight.slack_bytes + weight.metadata_bytes + weight.state_bytes
        assert parts == weight.held_bytes == weight.weighed_bytes
        assert weight.payload_bytes == weight.nominal_bytes < weight.full_bytes
    json.dumps(found.to_dict(), allow_nan=False)


def test_means_are_over_texts_and_answers_apart(rows: list[Row]) -> None:
    [one] = [
        s
        for s in summarise(rows).stored
        if (s.protocol, s.policy, s.ratio, s.storage) == ("hidden", POLICIES[0], 0.5, "capped")
    ]
    mine = [
        r
        for r in rows
        if (r.policy, r.budget["compression_ratio"], r.options["storage"], r.options["ranking"])
        == (POLICIES[0], 0.5, "capped", "hidden")
    ]
    text, asked = [r for r in mine if r.score is None], [r for r in mine if r.score is not None]
    assert (len(text), len(asked), one.texts) == (2, 2, 4)
    assert one.kl_text == pytest.approx(sum(r.fidelity.kl or 0 for r in text) / 2)
    assert one.kl_answer == pytest.approx(sum(r.fidelity.kl or 0 for r in asked) / 2)
    assert one.score == pytest.approx(sum(r.score or 0 for r in asked) / 2)
    assert one.held_bytes == sum(r.memory.held_bytes for r in mine) / 4
    assert summarise([]).masking is None


SIDES = {
    "enforcement": (("ragged", "hidden"), ("not-enforced", "hidden")),
    "cap": (("capped", "document"), ("not-enforced", "document")),
    "visibility": (("ragged", "visible"), ("ragged", "hidden")),
    "ranking": (("ragged", "visible"), ("ragged", "document")),
}


@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize("metric", ["score", "reference_logprob"])
def test_differences_are_of_the_same_questions(rows: list[Row], name: str, metric: str) -> None:
    def values(storage: str, protocol: str) -> dict[str, float]:
        return {
            r.cluster: r.score if metric == "score" else r.fidelity.reference_logprob  # type: ignore[misc]
            for r in rows
            if (r.policy, r.budget["compression_ratio"]) == (POLICIES[0], 0.75)
            and (r.options["storage"], r.options["ranking"]) == (storage, protocol)
            and r.score is not None
        }

    first, second = (values(*side) for side in SIDES[name])
    assert set(first) == set(second)
    wanted = [first[cluster] - second[cluster] for cluster in first]
    [one] = [
        c
        for c in summarise(rows).contrasts
        if (c.name, c.policy, c.ratio, c.protocol, c.metric) == (name, POLICIES[0], 0.75, SIDES[name][0][1], metric)
    ]
    assert one.mean == pytest.approx(sum(wanted) / len(wanted))
    assert one.contexts == len(wanted) == 2
    if wanted[0] == pytest.approx(wanted[1]):
        assert (one.low, one.note) == (None, "no interval: all equal")
    else:
        assert one.low is not None
        assert one.high is not None
        assert min(wanted) - 1e-12 <= one.low <= one.mean <= one.high <= max(wanted) + 1e-12
        assert "too narrow" in one.note


def test_every_policy_has_its_differences_and_the_full_cache_none(rows: list[Row]) -> None:
    found = summarise(rows).contrasts
    assert len(found) == len({(c.name, c.policy, c.ratio, c.protocol, c.metric) for c in found})
    assert len(found) == len(POLICIES) * 2 * (3 + 3 + 1 + 1) * 2  # ratios; differences; two metrics
    text = [row for row in rows if row.score is None]
    assert summarise(text).contrasts == ()
    tasks = [replace(row, task=row.task + "-2", cluster=row.cluster + "-2") for row in rows]
    both = summarise([*rows, *tasks]).contrasts
    assert [c.contexts for c in both] == [2 * c.contexts for c in found]
    assert [c.mean for c in both] == pytest.approx([c.mean for c in found])


def test_an_audit_that_was_killed_goes_on(bench: Bench, rows: list[Row], tmp_path: Path) -> None:
    def kill(done: int, total: int, task: str) -> None:
        if done == 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run(tmp_path, kill)
    assert len(read_rows(tmp_path)) == 40
    resumed = bench.run(tmp_path)

    def without_times(row: Row) -> dict[str, Any]:
        return {name: value for name, value in row.to_dict().items() if name != "times"}

    assert [row.key for row in resumed] == [row.key for row in rows]
    for before, after in zip(rows, resumed, strict=True):
        assert without_times(before) == without_times(after)
    told: list[tuple[int, int, str]] = []
    bench.run(tmp_path, lambda *what: told.append(what))
    assert told == [(len(rows), len(rows), "")]


@pytest.mark.parametrize(
    "changes",
    [{"policies": ()}, {"policies": ("snapkv", "full")}, {"ratios": ()}, {"ratios": (0.0,)}, {"samples": 0}],
)
def test_what_cannot_be_audited_is_refused(changes: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"model": "m", "policies": ("snapkv",), "ratios": (0.5,), "tasks": ("niah",)}
    with pytest.raises(ResultsError):
        AuditSettings(**(usual | changes))


def test_a_length_below_the_template_is_refused(bench: Bench, tmp_path: Path) -> None:
    short = AuditSettings("tiny", POLICIES, (0.5,), ("toy/colours",), length=3)
    with pytest.raises(TaskError, match="chat template"):
        audit(short, [Toy()], tmp_path, bench.auditor)


def test_policies_that_make_the_model_repeat_the_text(haystack: Path, tmp_path: Path) -> None:
    model, tokenizer = fake_model(dtype=torch.float64, layers=3)
    tasks = [Continuation(haystack=haystack, tokens=20), Toy()]
    policies = ("kvzip[chunk=64]", "contour[chunk=64,floor=4]")
    settings = AuditSettings("tiny", policies, (0.5,), tuple(t.name for t in tasks), length=200, samples=1)
    prompts = Prompting(tokenizer)
    auditor = Auditor(model, tokenizer, settings, prompts, identity=("tiny", "0" * 64), versions={"kvkeep": "0"})
    rows = Bench(settings, tasks, auditor).run(tmp_path)
    assert len(rows) == 4 * (1 + 4 * 2) + 2
    [sample] = [replace(s, length=200) for s in tasks[0].samples(tokenizer, length=200 - prompts.overhead, count=1)]
    context = prompts.context(sample.context)
    follows = prompts.continuation(context.end, sample.turns[0])
    for policy in policies:
        alone = KeepCache(model, policy, compression_ratio=0.5, repeat_prompt=prompts.repeat_prompt())
        with torch.no_grad():
            model(torch.tensor([context.ids]), **{CACHE_ARGUMENT: alone})
            peak = alone.ledger.peak_bytes
            logits = model(torch.tensor([follows[:-1]]), **{CACHE_ARGUMENT: alone}).logits[0]
        nll = torch.nn.functional.cross_entropy(logits, torch.tensor(follows[1:]))
        mine = {row.options["storage"]: row for row in rows if (row.policy, row.metric) == (policy, "continuation")}
        assert mine["ragged"].fidelity.nll == pytest.approx(float(nll), abs=1e-6)  # the same request to repeat
        assert mine["masked"].fidelity.nll == pytest.approx(float(nll), abs=1e-6)
        assert mine["own-prefill"].memory.peak_bytes == peak
        assert mine["ragged"].memory.peak_bytes == pytest.approx(peak, rel=0.02)
        assert mine["own-prefill"].memory.peak_bytes > mine["own-prefill"].memory.full_bytes

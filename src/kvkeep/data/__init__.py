"""Texts that come with kvkeep: a document with questions for a first try, and a page of prose that checks models.

demo = load_demo()
demo.text                        # about 1,900 tokens of prose
demo.questions[0].question       # 'What is the name of the ferry?'
demo.questions[0].is_right("It is called the Marigold Star.")    # True
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.resources import files

__all__ = ["Demo", "DemoQuestion", "check_text", "load_demo"]


@dataclass(frozen=True)
class DemoQuestion:
    """A question about the demo's text.

    Attributes:
        question: the question alone; nothing in it repeats the answer.
        answers: what a right answer holds at least one of.
        reference: a whole right answer, for scoring its tokens one by one.
        depth: where in the text the answer stands, as a fraction of the characters.
    """

    question: str
    answers: tuple[str, ...]
    reference: str
    depth: float

    def is_right(self, answer: str) -> bool:
        """Whether an answer holds one of the accepted ones, as whole words, in any case."""
        return any(re.search(rf"(?<!\w){re.escape(right)}(?!\w)", answer, re.IGNORECASE) for right in self.answers)


@dataclass(frozen=True)
class Demo:
    """A document with invented facts spread over it, which no model can know, and a question about each.

    With the full cache, SmolLM2-135M answers all of them (greedily, text first, then a blank line and the question, in
    its chat template); without the document, none.

    Attributes:
        title: of the text.
        source: who wrote it.
        licence: of the text.
        text: paragraphs, separated by blank lines.
        questions: in the order of their facts; none is about the last 15 % of the text, so that a policy that keeps
            only the end finds nothing.
    """

    title: str
    source: str
    licence: str
    text: str
    questions: tuple[DemoQuestion, ...]


def load_demo() -> Demo:
    """The demo document, written for kvkeep."""
    content = json.loads(_read("demo.json"))
    questions = tuple(DemoQuestion(**entry | {"answers": tuple(entry["answers"])}) for entry in content["questions"])
    return Demo(content["title"], content["source"], content["licence"], content["text"], questions)


def check_text() -> str:
    """A page of Conan Doyle's The Lost World (1912), in the public domain: about 790 tokens in one paragraph."""
    return _read("check_paragraph.txt").strip()


def _read(name: str) -> str:
    return (files("kvkeep.data") / name).read_text(encoding="utf-8")

"""How long RULER's thirteen tasks take to generate: 100 rows each at 4,096 tokens, SmolLM2's tokenizer, one core.

The time is that of the processor, which other programs on the machine do not lengthen; wall time is printed beside it.
The two question tasks get questions on documents that are cut from the haystack, since only the time counts here and
the sets that come with kvkeep have fewer than 100 questions.

    python benchmarks/ruler_rows.py
    python benchmarks/ruler_rows.py --rows 10 --length 16384 --haystack novels/
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAYON_NUM_THREADS", "1")

from transformers import AutoTokenizer

from kvkeep.hf.models import fetch_model
from kvkeep.tasks.registry import available_tasks, expand, task
from kvkeep.tasks.text import Haystack, haystack

MUST_REACH = {"seconds": 60.0}  # at most


@dataclass(frozen=True)
class Question:
    question: str
    references: tuple[str, ...]
    gold: tuple[str, ...]
    others: tuple[str, ...]
    provider: str


def questions(text: Haystack, count: int) -> tuple[Question, ...]:
    """One question on each article of ten documents of a hundred words."""
    made = []
    for number in range(count):
        words, _ = text.window(number * 1000, 1000)
        documents = tuple(" ".join(words[at : at + 100]) for at in range(0, 1000, 100))
        made.append(Question(f"What is document {number}?", (words[50],), documents[:1], documents[1:], text.name))
    return tuple(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=100, help="of each task")
    parser.add_argument("--length", type=int, default=4096, help="in tokens")
    parser.add_argument("--haystack", help="a file or a folder of .txt files; else what is installed")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(fetch_model("smollm2-135m"))
    text = haystack(options.haystack)
    print(f"{options.rows} rows of {options.length} tokens each; haystack: {text.name}")
    rows, seconds = 0, 0.0
    for name in expand(["ruler"]):
        known = available_tasks()[name].options()
        given = {"haystack": text, "questions": questions(text, options.rows)}
        made = task(name, **{key: value for key, value in given.items() if key in known})
        wall, busy = time.perf_counter(), time.process_time()
        rows += sum(1 for _ in made.samples(tokenizer, length=options.length, count=options.rows))
        wall, busy = time.perf_counter() - wall, time.process_time() - busy
        seconds += busy
        print(f"  {name:<22} {busy:6.2f} s of the processor, {wall:6.2f} s of wall time", flush=True)
    passed = seconds < MUST_REACH["seconds"]
    result = {"rows": rows, "seconds": round(seconds, 2), "must_reach": MUST_REACH, "passed": passed}
    print(json.dumps({"name": "ruler_rows"} | result))
    raise SystemExit(not passed)


if __name__ == "__main__":
    main()

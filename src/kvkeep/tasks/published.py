"""The published long-context sets that are read as they are: their tasks, and which metric scores each.

Names of tasks are those in the column `task` of the sets as kvpress publishes them on the hub, or the set's own. The
metric is the one that kvpress assigns (evaluation/benchmarks/*/calculate_metrics.py) where it is one of ours; what
differs is said beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvkeep.errors import TaskError, near_names


@dataclass(frozen=True)
class Family:
    """A published set.

    Attributes:
        name: such as `"longbench"`.
        repos: on the hub, kvpress's first.
        metrics: the metric of each task.
        task: what the rows are where they have no column `task`; empty where they must have one.
        options: columns that go into a sample's options, if they are there.
        answers: how the column of answers is read: "references" as any of several, "classes" with the column
            `all_classes` behind it, "option" with the text of the right option, taken from the question, behind the
            letter.
    """

    name: str
    repos: tuple[str, ...]
    metrics: Mapping[str, str]
    task: str = ""
    options: tuple[str, ...] = ()
    answers: Mapping[str, str] = field(default_factory=dict)


_RULER = (
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"),
)

# The order decides for names that two sets share: gov_report, musique, qasper and qmsum are LongBench's.
FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(
            "ruler",
            ("simonjegou/ruler",),
            dict.fromkeys(_RULER, "match_all") | {"qa_1": "match_any", "qa_2": "match_any"},
        ),
        Family(
            "longbench",
            ("Xnhyacinth/LongBench", "THUDM/LongBench", "zai-org/LongBench"),
            # Left out: multifieldqa_zh, dureader and vcsum, which are scored on words of a Chinese segmenter.
            {
                "narrativeqa": "f1",
                "qasper": "f1",
                "multifieldqa_en": "f1",
                "hotpotqa": "f1",
                "2wikimqa": "f1",
                "musique": "f1",
                "gov_report": "rouge_l_summary",
                "qmsum": "rouge_l_summary",
                "multi_news": "rouge_l_summary",
                "trec": "classification",
                "triviaqa": "f1_first_line",
                "samsum": "rouge_l_summary_first_line",
                "lsht": "classification",
                "passage_count": "count",
                "passage_retrieval_en": "retrieval",
                "passage_retrieval_zh": "retrieval",
                "lcc": "code_similarity",
                "repobench-p": "code_similarity",
            },
            options=("length",),
            answers={"trec": "classes", "lsht": "classes"},
        ),
        Family(
            "longbench-v2",
            ("simonjegou/LongBench-v2", "Xnhyacinth/LongBench-v2"),
            # kvpress wants the sentence alone, which gives the same or less.
            {"0shot": "choice_sentence", "cot": "choice_sentence"},
            task="0shot",
            options=("difficulty", "length"),
        ),
        Family(
            "infinitebench",
            ("MaxJeblick/InfiniteBench", "xinrongzhang2022/InfiniteBench"),
            {
                "passkey": "number",
                "number_string": "number",
                "kv_retrieval": "word",
                "kv_retrieval_prefix": "word",
                "kv_retrieval_both": "word",
                "longdialogue_qa_eng": "match_any",
                "longbook_qa_eng": "f1",
                "longbook_qa_chn": "f1_characters",
                "longbook_choice_eng": "choice",
                "longbook_sum_eng": "rouge_l",  # kvpress refuses it; the set's own is ROUGE-Lsum
                "code_run": "last_number",
                "code_debug": "code_debug",
                "math_find": "first_number",
                "math_calc": "number_prefix",
            },
            answers={"longbook_choice_eng": "option", "code_debug": "option"},
        ),
        Family(
            "loogle",
            ("simonjegou/loogle",),
            # kvpress reports BLEU, METEOR, BERTScore and the recall of ROUGE as well, and the cloze over all masks.
            {
                "shortdep_qa": "rouge_l_summary",
                "longdep_qa": "rouge_l_summary",
                "longdep_summarization": "rouge_l_summary",
                "shortdep_cloze": "cloze",
            },
        ),
        Family(
            "zero_scrolls",
            ("simonjegou/zero_scrolls",),
            # The answers of its test split are not public, and kvpress does not score it: these are for a split that
            # has answers. The set's own metric for summaries is the geometric mean of ROUGE-1, 2 and L. The last two
            # have metrics that no other set uses, and match the answer here.
            {
                "gov_report": "rouge_l",
                "summ_screen_fd": "rouge_l",
                "qmsum": "rouge_l",
                "squality": "rouge_l",
                "qasper": "f1",
                "narrative_qa": "f1",
                "musique": "f1",
                "quality": "choice",
                "space_digest": "exact_match",
                "book_sum_sort": "exact_match",
            },
        ),
        Family("aime25", ("alessiodevoto/aime25",), {"aime25": "boxed"}, task="aime25"),
        Family("math500", ("alessiodevoto/math500",), {"math500": "boxed"}, task="math500"),
    )
}


def family_named(name: str) -> Family:
    """The set of that name.

    Raises:
        TaskError: it is not known.
    """
    if name not in FAMILIES:
        raise TaskError(expected="the name of a published set", received=repr(name), remedy=near_names(name, FAMILIES))
    return FAMILIES[name]


def family_of_repo(repo: str) -> Family | None:
    """The set that a data set of the hub is."""
    return next((family for family in FAMILIES.values() if repo in family.repos), None)


def family_of_task(task: str) -> Family | None:
    """The set that a task belongs to: the first in the order of the table."""
    return next((family for family in FAMILIES.values() if bare(task) in family.metrics), None)


def bare(task: str) -> str:
    """A task's name without the ending of LongBench-E."""
    return task.removesuffix("-e").removesuffix("_e")


def metric_of(family: Family, task: str) -> str:
    """The metric of a task of a set.

    Raises:
        TaskError: the set has no such task.
    """
    if bare(task) not in family.metrics:
        raise TaskError(
            expected=f"a task of the set {family.name!r}",
            received=repr(task),
            remedy=f"name the metric yourself, with metric=...; {near_names(task, family.metrics)}",
        )
    return family.metrics[bare(task)]

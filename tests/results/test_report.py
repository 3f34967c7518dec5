from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import polars as pl
import pytest
from results.fake import CLAIMS, HOSTILE, SETTINGS, row, write_run

from kvkeep.errors import ResultsError
from kvkeep.results import FULL, Memory, ResultLog, Row
from kvkeep.results.metrics import METRICS
from kvkeep.results.report import write_report
from kvkeep.results.report.charts import clean, curve
from kvkeep.results.report.heat import head_maps
from kvkeep.results.report.numbers import interval_text, n_text, number_text
from kvkeep.results.report.predictions import choose, script_json
from kvkeep.results.report.rendering import style_sheet, text_of
from kvkeep.results.report.styles import styles_of
from kvkeep.results.report.tables import blocks
from kvkeep.results.statistics import Measurement, mean_interval
from kvkeep.results.summary import points

SMALL = {"policies": ["snapkv", "knorm"], "budgets": [0.5, 0.9], "lengths": [1024], "contexts": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("report") / "run", **SMALL)
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def html(run: Path) -> str:
    return (run / "index.html").read_text(encoding="utf-8")


class Reader(HTMLParser):
    """What a browser would make of the page: its elements, and the text of its scripts."""

    VOID = frozenset({"meta", "link", "input", "br", "rect", "path", "line", "use"})

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader


def test_three_files(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    assert {"index.html", "table.md", "results.parquet"} <= names
    assert not [name for name in names if name.endswith(".new")]
    assert pl.read_parquet(run / "results.parquet").height > 0


def test_the_page_fetches_nothing(html: str) -> None:
    for tag, attributes in read(html).elements:
        assert tag not in {"iframe", "object", "embed", "img", "base", "foreignobject"}
        assert "src" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("href", "xlink:href"):
            link = attributes.get(name)
            assert link is None or link.startswith(("#", "data:,")) or link in {"results.parquet", "table.md"}
    assert "http" not in text_of("kvkeep.results.report", "page.js") + style_sheet().replace("http-equiv", "")
    assert "url(" not in html


def test_what_a_model_said_stays_text(html: str) -> None:
    reader = read(html)
    assert not reader.open
    assert len(reader.scripts) == 2
    answers = json.loads(reader.scripts[0])
    said = {answer["prediction"] for answer in answers}
    assert {text.replace("\ud800", "\N{REPLACEMENT CHARACTER}") for text in HOSTILE} <= said
    assert "\u2028" not in html
    assert "\u2029" not in html
    assert "<script>alert" not in html
    assert "<img" not in html


def test_the_script_is_the_one_that_the_policy_allows(html: str) -> None:
    allowed = re.search(r"script-src 'sha256-([^']+)'", html)
    assert allowed
    script = read(html).scripts[1]
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() == allowed[1]


def test_a_hostile_name_stays_text_everywhere(tmp_path: Path) -> None:
    name = '"><script>alert(1)</script>\x07|`'
    hostile = [
        row(
            policy=name,
            task=f"{name}/x",
            sample=f"{name}{i}",
            cluster=f"{name}{i}",
            model=name,
            score=i / 3,
            provider=name,
            versions={name: name},
            options={"depth": 50, name: name},
            entries_per_cell=[[1, 2]],
            memory=row().memory,
            question=name,
        )
        for i in range(3)
    ]
    with ResultLog(tmp_path, {name: name}) as log:
        for each in hostile:
            log.append(each)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    reader = read(page)
    assert not reader.open
    assert len(reader.scripts) == 2
    assert "<script>alert" not in page
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "<script" not in table
    cells = [len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines() if line.startswith("|")]
    assert len({*cells[:3]}) == 1


def test_the_same_rows_give_the_same_page(run: Path, html: str) -> None:
    assert write_report(run).read_text(encoding="utf-8") == html


def test_a_mean_never_stands_alone(html: str) -> None:
    for cell in re.findall(r"<td[^>]*><b>.*?</td>", html, re.S):
        text = re.sub(r"<[^>]*>", " ", cell)
        assert re.search(r"\[.*\]|no interval", text), text
    table = html[html.index('<section id="tasks">') : html.index("</section>", html.index('<section id="tasks">'))]
    for cell in re.findall(r"<td[^>]*><b>.*?</td>", table, re.S):
        assert re.search(r"\bn \d+", cell)


def test_every_section_but_the_claims_is_called_exploratory(html: str) -> None:
    for heading in re.findall(r"<h2>(.*?)</h2>", html):
        title = heading.split(" <")[0]
        assert ("exploratory" in heading) == (title not in {"Claims", "Answers", "The run"}), heading


def test_claims_are_judged_as_declared(run: Path, tmp_path: Path) -> None:
    table = (run / "table.md").read_text(encoding="utf-8")
    assert "not judged: no rows of kvzip+threshold" in table
    assert "(exploratory" not in table
    later = write_run(tmp_path / "later", claims=False, **(SMALL | {"needles": False, "fidelity": False}))
    assert "No claims were declared" in write_report(later).read_text(encoding="utf-8")
    (later / "claims.toml").write_text(CLAIMS)  # written when the results were known
    page = write_report(later).read_text(encoding="utf-8")
    assert page.count("was not declared before the run began") >= 2
    assert "exploratory: not declared before the run" in (later / "table.md").read_text(encoding="utf-8")


def test_all_tasks_come_first_and_the_best_policies_before_others() -> None:
    def scored(policy: str, task: str, score: float) -> Row:
        return row(policy=policy, task=task, sample=f"{task}/0", cluster=f"{task}/0", score=score)

    rows = [scored("poor", task, 0.1) for task in ("a/x", "a/y")]
    rows += [scored("good", "a/x", 0.6), scored("good", "a/y", 0.8), scored("partial", "a/x", 1.0)]
    together, first, second = blocks(rows, [METRICS["score"]])
    assert [block.task for block in (together, first, second)] == ["", "a/x", "a/y"]
    assert list(together.rows) == ["good", "poor"]  # a mean over other tasks is another number
    assert [cell.mean for cell in together.rows["good"] if cell] == ["0.70"]
    assert list(first.rows) == ["partial", "good", "poor"]
    rows.append(row(policy="good", task="b/z", sample="b/z/0", cluster="b/z/0", score=None))
    assert [block.task for block in blocks(rows, [METRICS["score"]])] == ["", "a/x", "a/y"]
    alone = blocks([each for each in rows if each.task == "a/x"], [METRICS["score"]])
    assert [block.task for block in alone] == ["a/x"]


def test_one_that_lacks_a_budget_comes_behind_those_that_have_all() -> None:
    scores = {("easy", 0.5): 0.6, ("good", 0.5): 0.7, ("good", 0.9): 0.3, ("poor", 0.5): 0.2, ("poor", 0.9): 0.1}
    rows = [row(policy=name, budget={"compression_ratio": r}, score=score) for (name, r), score in scores.items()]
    (table,) = blocks(rows, [METRICS["score"]])
    assert list(table.rows) == ["good", "poor", "easy"]


def test_what_lacks_tasks_is_not_drawn_but_named(tmp_path: Path) -> None:
    with ResultLog(tmp_path, {}) as log:
        for policy, task in (("whole", "a/x"), ("whole", "a/y"), ("torn", "a/x")):
            for i in range(3):
                sample = f"{task}{i}"
                log.append(row(policy=policy, task=task, sample=sample, cluster=sample, score=i / 2))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "torn at 75 % removed: lacks 1 of 2 tasks" in page
    drawn = page[page.index('<section id="scores">') : page.index("<details", page.index('<section id="scores">'))]
    assert "whole, 75 % removed" in drawn
    assert "torn, 75 % removed" not in drawn
    assert "1 tasks missing: not comparable" in page


NOTHING = Memory(held_bytes=0, full_bytes=0, fraction=0, peak_bytes=0, payload_bytes=0)


@pytest.mark.parametrize(
    "only", [row(), row(score=None), row(policy=FULL, budget={"compression_ratio": 0}), row(memory=NOTHING, score=-3)]
)
def test_a_run_of_one_row(tmp_path: Path, only: Row) -> None:
    with ResultLog(tmp_path, {}) as log:
        log.append(only)
    assert not read(write_report(tmp_path).read_text(encoding="utf-8")).open


def test_runs_that_have_no_report(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="no such file"):
        write_report(tmp_path)
    with ResultLog(tmp_path, {}) as log:
        with pytest.raises(ResultsError, match="received none"):
            write_report(tmp_path)
        log.append(row())
        log.append(row(model="another", turn=1))
    with pytest.raises(ResultsError, match="one model"):
        write_report(tmp_path)


def test_a_torn_last_row_is_no_obstacle(run: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes((run / "run.json").read_bytes())
    content = (run / "rows.jsonl").read_bytes()
    (tmp_path / "rows.jsonl").write_bytes(content[: len(content) // 2])
    write_report(tmp_path)


def test_a_chart_keeps_known_elements_only() -> None:
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9" onload="x()"><script>x()</script>'
        '<a href="https://example.invalid"><path d="M0 0"/></a><g class="mark-line role-mark line3_marks">'
        '<path d="M0.123456,1.0L2,3" stroke="red" style="fill:url(#x)"/></g><foreignObject/></svg>'
    )
    assert clean(svg, 'a "title" <b>') == (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9" role="img" '
        'aria-label="a &quot;title&quot; &lt;b&gt;" class="curve"><g class="line" data-p="3">'
        '<path d="M0.1,1.0L2,3" /></g></svg>'
    )


def test_marks_say_what_they_are() -> None:
    made = [row(sample=str(i), cluster=str(i), score=i / 9, policy="a<b") for i in range(10)]
    svg = curve(points(made, METRICS["score"]), METRICS["score"], styles_of(["a<b"]), "title")
    assert "a&lt;b, 75 % removed: 0.50 [0.3" in svg
    assert "n 10; held 1 kB, 25.0% of the full cache" in svg
    assert svg.count('data-p="0"') == 3  # line, interval, mark


def test_policies_differ_in_more_than_colour() -> None:
    looks = [(s.colour, s.shape) for s in styles_of(map(str, range(56))).values()]
    assert len({*looks}) == 56
    first = list(styles_of(map(str, range(8))).values())
    assert len({s.colour for s in first}) == 8
    assert len({(s.shape, s.dash) for s in first}) == 8  # told apart in black and white


def contrast(one: str, other: str) -> float:
    """WCAG 2.2, relative luminance."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def schemes() -> Iterator[dict[str, str]]:
    light, dark = re.findall(r":root \{(.*?)\n\s*\}", style_sheet(), re.S)
    for text in (light, dark):
        yield dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", text))


def test_contrast_in_light_and_dark() -> None:
    names = [{*scheme} for scheme in schemes()]
    assert names[0] == names[1]
    for scheme in schemes():
        for ground in ("page", "card"):
            for ink in ("ink", "soft", "accent", "win", "loss", "warn"):
                assert contrast(scheme[ink], scheme[ground]) >= 4.5, (ink, ground)
        for i in range(8):
            assert contrast(scheme[f"s{i}"], scheme["card"]) >= 4.5, i
        for i in range(9):  # text in heat maps
            assert contrast(scheme[f"q{i}"], scheme["q-low" if i < 5 else "q-high"]) >= 4.5, i
        steps = [contrast(scheme[f"q{i}"], scheme["q0"]) for i in range(9)]
        assert steps == sorted(steps)


def test_numbers_as_they_are_printed() -> None:
    score, held = METRICS["score"], METRICS["held_bytes"]
    assert number_text(-0.001, score) == "0.00"
    assert number_text(-1.5, score) == "\N{MINUS SIGN}1.50"
    assert number_text(1234.5, METRICS["prefill_s"]) == "1,234.50"
    assert number_text(2_500_000, held) == "2.5 MB"
    estimate = mean_interval(Measurement("t", i // 2, i, float(i % 3 == 0)) for i in range(6))
    assert n_text(estimate) == "n 3 (6 questions), few"
    assert interval_text(estimate, score).startswith("[")


def test_json_cannot_leave_its_script() -> None:
    text = script_json({"a": "</script><!--\u2028\u2029&"})
    assert not {*"<>&\u2028\u2029"} & {*text}
    assert json.loads(text) == {"a": "</script><!--\u2028\u2029&"}


def test_predictions_are_shared_out_until_the_page_is_full() -> None:
    made = [row(policy=p, sample=f"{p}{i}", prediction="x" * 5000) for p in "ab" for i in range(50)]
    chosen = choose(made, {"a": 0, "b": 1}, {"ruler/vt": 0}, limit=8000)
    assert [answer["p"] for answer in chosen] == [0, 1] * (len(chosen) // 2) + [0] * (len(chosen) % 2)
    assert len(json.dumps(chosen)) <= 8500
    assert max(len(answer["prediction"]) for answer in chosen) < 610


def test_maps_of_heads_share_a_scale_at_a_budget() -> None:
    memory = row().memory.__class__(**(vars(row().memory) | {"logical_length": 100}))
    made = [
        row(policy="a", entries_per_cell=[[10, 20], [30, 40]], memory=memory),
        row(policy="b", entries_per_cell=[[80, 80], [80, 80]], memory=memory),
    ]
    (first, second), scales = head_maps(made)
    assert scales == {("compression_ratio", 0.75): 0.8}
    assert (first.least, first.mean, first.most) == pytest.approx((0.1, 0.25, 0.4))
    assert [kind for kind, _ in first.paths] == [1, 2, 3, 4]
    assert second.paths == [(8, "M0 0h2v1h-2zM0 1h2v1h-2z")]


def test_settings_are_shown(html: str) -> None:
    assert "SmolLM2-135M-Instruct" in html
    assert str(SETTINGS["note"]) not in html

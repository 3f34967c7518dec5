"""The report in a real browser: it draws, filters, searches, and asks the network for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from results.chromium import EXECUTABLE, Page
from results.fake import write_run

from kvkeep.results.report import write_report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium on the path"),
]

POLICIES = ["snapkv", "knorm", "kvzip+threshold[floor=32]"]
TAB, SPACE = ("Tab", 9), (" ", 32, " ")

# What a reader sees: rows of the table of tasks, charts, answers.
VISIBLE = "[...document.querySelectorAll('{}')].filter((e) => e.getClientRects().length).length"
ROWS, FIGURES, ANSWERS = (VISIBLE.format(s) for s in ("#tasks tr[data-p]", "#scores figure", ".answer"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser") / "run"
    return write_report(write_run(folder, policies=POLICIES, budgets=[0.5, 0.9], contexts=3))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with Page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page, report: Path) -> Iterator[Page]:
    browser.open(report)
    yield browser
    assert browser.complaints == []
    assert {*browser.requests} <= {report.resolve().as_uri(), "data:,"}


def choose(page: Page, selector: str, value: str) -> None:
    page.run(
        f"{{ const s = document.querySelector('{selector}'); s.value = '{value}';"
        " s.dispatchEvent(new Event('change', {bubbles: true})); }"
    )


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_charts_are_drawn_and_nothing_sticks_out(page: Page, report: Path, width: int, height: int, dark: bool) -> None:
    page.open(report, width, height, dark=dark)
    empty = page.run(
        """[...document.querySelectorAll("svg.curve")].filter((svg) => svg.getClientRects().length)
        .filter((svg) => [...svg.querySelectorAll(".mark path, .line path, .line line")].length < 4
          || [...svg.querySelectorAll(".mark path")].some((p) => {
            const box = p.getBoundingClientRect(), style = getComputedStyle(p);
            return !box.width || !box.height || ["none", "rgb(0, 0, 0)"].includes(style.fill);
          })).length"""
    )
    assert page.run(FIGURES) > 1
    assert empty == 0
    assert page.run("document.documentElement.scrollWidth") == width
    grounds = page.run("getComputedStyle(document.body).backgroundColor")
    assert grounds == ("rgb(18, 21, 26)" if dark else "rgb(246, 247, 249)")
    assert page.run("[...document.querySelectorAll('path[class^=q]')].every((p) => p.getBoundingClientRect)")


def test_a_policy_is_switched_off_with_the_keyboard(page: Page) -> None:
    before, marks = page.run(ROWS), page.run(VISIBLE.format("#scores .mark path"))
    page.run("document.querySelector('input[name=protocol]:checked').focus()")
    for _ in range(2):  # the list of tasks, then the first policy
        page.press(*TAB)
    assert page.run("document.activeElement.name") == "policy"
    page.press(*SPACE)
    assert page.run(ROWS) < before
    assert page.run(VISIBLE.format("#scores .mark path")) < marks
    assert page.run("document.querySelector('.filters output').textContent").startswith("3 of 4 policies")
    page.press(*SPACE)
    assert (page.run(ROWS), page.run(VISIBLE.format("#scores .mark path"))) == (before, marks)


def test_a_protocol_and_a_task_are_chosen(page: Page) -> None:
    rows, figures = page.run(ROWS), page.run(FIGURES)
    page.run("document.querySelector('input[name=protocol][value=\"\"]').click()")
    assert (page.run(ROWS), page.run(FIGURES)) == (2 * rows, 2 * figures)
    options = "[...document.querySelectorAll('option[data-f]')]"
    value = f"{options}.find((o) => o.textContent === '{{}}').value"
    choose(page, "select[name=task]", page.run(value.format("fidelity/prose")))  # which has no score
    assert (page.run(ROWS), page.run("document.querySelector('.empty').getClientRects().length")) == (0, 1)
    choose(page, "select[name=task]", page.run(value.format("ruler/vt")))
    assert 0 < page.run(ROWS) < rows
    assert page.run(FIGURES) == 2  # its family, under both protocols
    page.run("document.querySelector('button[data-all=\"\"]').click()")
    assert page.run(ROWS) == page.run(ANSWERS) == 0


def test_another_number_and_another_budget(page: Page) -> None:
    choose(page, "select[data-picks=tasks]", "kl")
    text = page.run("[...document.querySelectorAll('#tasks tbody:not(.off)')].map((each) => each.textContent).join('')")
    assert "fidelity/prose" in text
    maps = page.run(VISIBLE.format("#heads figure"))
    choose(page, "select[data-picks=heads]", "0")
    assert page.run(VISIBLE.format("#heads figure")) == maps == len(POLICIES)
    assert "50 % removed" in page.run("document.querySelector('#heads figure:not(.off)').textContent")


def test_answers_are_searched_and_stay_text(page: Page) -> None:
    assert page.run(ANSWERS) == 20
    page.run("document.getElementById('more').click()")
    assert page.run(ANSWERS) == 40
    page.run("document.getElementById('search').focus()")
    page.call("Input.insertText", text="</SCRIPT> alert(2) snapkv")
    found = page.run("[...document.querySelectorAll('.answer dd:last-child')].map((e) => e.textContent)")
    assert {*found} == {"</script><script>alert(2)</script>"}
    assert page.run("document.querySelectorAll('.answer script, .answer img').length") == 0


def test_a_mark_says_what_it_is(page: Page) -> None:
    page.run("document.getElementById('scores').scrollIntoView()")
    box = page.run(
        "(({x, y, width, height}) => [x + width / 2, y + height / 2])"
        "(document.querySelector('#scores figure:not(.off) .mark path').getBoundingClientRect())"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    tip = page.run("document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent")
    assert "of the full cache" in tip


def test_headers_stay_in_sight(page: Page) -> None:
    top = (
        "(() => { const box = document.querySelector('#tasks .scroll'), top = (e) => e.getBoundingClientRect().top;"
        " box.scrollTop = 300; return Math.abs(top(box.querySelector('thead th')) - top(box)); })()"
    )
    assert page.run(top) < 3

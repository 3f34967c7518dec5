"""The page of a search: everything that was found is on it, nothing that a program says can do anything there."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vl_convert")

from kvkeep.errors import ResultsError
from kvkeep.evolve.campaign import BEST, Campaign, contestants_of, controls_of, measured_of
from kvkeep.evolve.history import SearchLog, read_history
from kvkeep.evolve.loop import SearchSettings, replay, search_facts
from kvkeep.evolve.mutators.grammar import Grammar
from kvkeep.evolve.mutators.protocol import Proposal
from kvkeep.evolve.program import Program, seed_program
from kvkeep.evolve.promotion import FULL, RANDOM, Measured
from kvkeep.evolve.ranks import first_stage_and_frc
from kvkeep.evolve.report import write_search_report
from kvkeep.evolve.report.parts import grids, lineage, reasons

from .test_controls import Judge

EVIL = "</pre><script>alert(1)</script>"


class Talking(Grammar):
    """Writes what it likes beside its programs."""

    def propose(self, parents: Any, random: Any) -> Proposal:
        proposal = super().propose(parents, random)
        assert proposal.program is not None
        block = f'"""{EVIL}"""\n{proposal.program.block}'
        return Proposal(proposal.program.with_block(block, EVIL), self.name, proposal.parents, EVIL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("search")
    cascade: Any = Judge()
    settings, seeds = SearchSettings(islands=2, generation=6), [seed_program("frc"), seed_program("v1-generic")]
    more = {"model": f"tiny {EVIL}", "samples": {"protocol": "query-aware", "length": 400}}
    with SearchLog(path, search_facts(settings, cascade.settings, Talking(), seeds, **more)) as log:
        campaign = Campaign(log, settings, cascade, Talking(), seeds)

        class Known(Judge):
            def evaluate(self, programs: Any, known: Any = None, **rest: Any) -> Any:
                return super(Judge, self).evaluate(programs, known, gated=rest.get("gated", True), on_stage=None)

        searching: Any = Known()
        Campaign(log, settings, searching, Talking(), seeds).search(40)
        campaign.control(("seed", "random-weights", "snapkv"), 4, Grammar())
        campaign.control(("seed", "random-weights", "snapkv"), 8, Grammar())
        random = np.random.default_rng(0)
        rows = [
            Measured(name, more["model"], protocol, "toy", False, 400, 0.5, f"{at}", float(random.normal())).to_dict()  # type: ignore[arg-type]
            for protocol in ("query-aware", "query-agnostic")
            for at in range(6)
            for name in (*contestants_of(log.history), FULL, RANDOM)
        ]
        log.append({"key": "promotion/mark/tiny/all", "rows": rows})
    return path


def test_the_page_has_all_parts_and_fetches_nothing(folder: Path) -> None:
    page = write_search_report(folder)
    text = page.read_text(encoding="utf-8")
    for anchor in ("best", "controls", "elsewhere", "lineage", "archive", "reasons", "ranks", "run"):
        assert f'id="{anchor}"' in text
    assert "<script" not in text.replace("&lt;script", "")
    assert "&lt;script&gt;alert(1)" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text
    assert text.count("<svg") >= 2
    assert "random-weights" in text
    assert "judged again after 1 of the generations, had at most 0.0 points" in text
    assert "query-agnostic" in text
    assert write_search_report(folder).read_text(encoding="utf-8") == text


def test_the_lineage_leads_back_to_a_seed(folder: Path) -> None:
    history = read_history(folder)
    steps = lineage(history, history.best)
    assert steps[0].candidate == history.best
    assert steps[-1].candidate.mutator == "seed"
    for child, parent in itertools.pairwise(steps):
        assert child.candidate.parents[0] == parent.candidate.digest
        lines = child.diff.splitlines()
        assert lines[0].endswith(f"candidate {parent.candidate.order}")
        added = [line[1:] for line in lines[2:] if line.startswith("+")]
        block = Program(child.candidate.source, "x").block.splitlines()
        assert set(added) <= set(block)
        assert added


def test_counts_grids_and_ranks_are_those_of_the_log(folder: Path) -> None:
    history = read_history(folder)
    stopped = sum(count for *_, count, _ in reasons(history))
    assert stopped == len(history.candidates) - history.counts()["evaluated"]
    archive = replay(history)
    best = history.best
    assert best is not None
    assert best.evaluation is not None
    for grid in grids(archive):
        cells = [cell for line in grid.cells for cell in line if cell is not None]
        assert max(kind for _, kind in cells) == 8
        assert f"{best.evaluation.fitness:.1f}" in [text for text, kind in cells if kind == 8]
        assert len(grid.cells) == len(grid.row_labels)
        assert len(grid.cells[0]) == len(grid.column_labels)
    ranks = first_stage_and_frc(history)
    assert ranks.n == sum(c.evaluation is not None and c.evaluation.stage1 is not None for c in history.candidates)
    assert ranks.value is not None
    assert -1 <= ranks.value <= 1


def test_contestants_are_the_best_its_seed_and_what_was_tuned(folder: Path) -> None:
    history = read_history(folder)
    found = contestants_of(history)
    assert isinstance(found[BEST], Program)
    assert found[BEST].digest == history.best.digest  # type: ignore[union-attr]
    assert "seed frc" in found or history.best is history.candidates[0]
    assert str(found["snapkv"]).startswith("snapkv")
    assert [control.name for control in controls_of(history)] == ["seed", "random-weights", "snapkv"]
    assert [len(control.evaluations) for control in controls_of(history)] == [1, 8, 8]
    assert sum(name.startswith("candidate ") for name in found) == 4
    digests = [given.digest for given in found.values() if isinstance(given, Program)]
    assert len(set(digests)) == len(digests)
    assert {row.contestant for row in measured_of(history)} == {*found, FULL, RANDOM}


def test_no_page_without_a_program(tmp_path: Path) -> None:
    with pytest.raises(ResultsError):
        write_search_report(tmp_path)
    cascade: Any = Judge()
    with SearchLog(tmp_path, search_facts(SearchSettings(), cascade.settings, Grammar(), [])):
        pass
    with pytest.raises(ResultsError, match="wait for its seeds"):
        write_search_report(tmp_path)
    assert json.loads((tmp_path / "run.json").read_text())["settings"]["mutator"] == "grammar"

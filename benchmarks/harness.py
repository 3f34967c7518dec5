"""What the scripts here share: both sides measured alternately in one run, claims from claims.toml, one report.

A script prints the raw milliseconds of both sides, then one line of JSON: `name, ratios, must_reach, passed`. It checks
that both sides compute the same before it measures, and refuses to report where they do not. `--quick` measures less,
against the same thresholds.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvkeep.results.keyed import KeyedLog

CLAIMS = Path(__file__).with_name("claims.toml")


@dataclass(frozen=True)
class Claim:
    """What a script must reach.

    Attributes:
        name: of the script.
        cell: what is measured, in words.
        runs: of each side.
        must_reach: ratios that must be at least so large.
        at_most: ratios that must be at most so large.
        exactly: ratios that must be just so large.
    """

    name: str
    cell: str
    runs: int
    must_reach: Mapping[str, float]
    at_most: Mapping[str, float]
    exactly: Mapping[str, float]

    @classmethod
    def read(cls, name: str) -> Claim:
        table = tomllib.loads(CLAIMS.read_text())[name]
        return cls(
            name=name,
            cell=table["cell"],
            runs=table["runs"],
            must_reach=table.get("must_reach", {}),
            at_most=table.get("at_most", {}),
            exactly=table.get("exactly", {}),
        )

    def holds(self, name: str, ratio: float) -> bool | None:
        """Whether a ratio is what was claimed; None where nothing was."""
        if name in self.must_reach:
            return ratio >= self.must_reach[name]
        if name in self.at_most:
            return ratio <= self.at_most[name]
        if name in self.exactly:
            return ratio == self.exactly[name]
        return None


def sittings_in(folder: Path, claim: Claim, threads: int) -> KeyedLog:
    """Turns of a measurement that is too long for one sitting; another claim, code or machine is another folder."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    git = ["git", "-C", str(CLAIMS.parent), "describe", "--always", "--dirty", "--abbrev=40"]
    code = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    machine = f"{platform.node()}, {platform.machine()}"
    return KeyedLog(folder, {"claim": claim.cell, "threads": threads, "machine": machine, "code": code, **versions})


class Milliseconds(float):
    """What a side returns that has measured itself, in another process for instance."""


def arguments(
    claim: Claim, parser: argparse.ArgumentParser | None = None, quick_runs: int | None = None
) -> argparse.Namespace:
    """The command line; adds `quick` and `runs`; `quick_runs`: how many those are where it is not a third."""
    parser = parser or argparse.ArgumentParser(description=claim.cell)
    parser.add_argument("--quick", action="store_true", help="a smaller version, in under a minute")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--runs", type=int, help="other than the claim's number, which then is not what was measured")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not options.runs:
        options.runs = (quick_runs or max(5, claim.runs // 3)) if options.quick else claim.runs
    print(f"{claim.name}: {claim.cell}")
    print(
        f"torch {torch.__version__}, {options.threads} threads, {platform.machine()}, "
        f"{options.runs} alternating runs of each side"
    )
    return options


def alternate(
    sides: Mapping[str, Callable[[], object]],
    runs: int,
    *,
    warm_up: int = 2,
    pause: float = 0,
    progress: str = "",
    sittings: KeyedLog | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of each run of each side, in turns of random order, so that a noisy minute hits all of them.

    Args:
        sides: what is measured, by name; a side that returns `Milliseconds` has measured itself.
        runs: of each side.
        warm_up: runs before, which do not count.
        pause: seconds before each run, so that the threads of a side in another process have stopped spinning.
        progress: what to call this on a terminal.
        sittings: turns of earlier sittings under the same `progress`, which count; turns of this one are added.
    """
    taken: dict[str, list[float]] = {name: [] for name in sides}
    order, shuffle = list(sides.items()), random.Random(0)
    former = {} if sittings is None else {record["key"]: record["ms"] for record in sittings.records}
    missing = [run for run in range(runs) if f"{progress} {run}" not in former]
    for run in (*range(-warm_up, 0), *missing) if missing else ():
        shuffle.shuffle(order)  # what a side finds in the processor's cache depends on the side before it
        turn = {}
        for name, side in order:
            if pause:
                time.sleep(pause)
            started = time.perf_counter()
            result = side()
            needed = 1000 * (time.perf_counter() - started)
            turn[name] = float(result) if isinstance(result, Milliseconds) else needed
        if run >= 0:
            former[f"{progress} {run}"] = turn
            if sittings is not None:
                sittings.append({"key": f"{progress} {run}", "ms": turn})
        if progress and sys.stderr.isatty():
            print(f"\r{progress}: {max(0, run + 1)}/{runs}", end="" if run + 1 < runs else "\n", file=sys.stderr)
    for run in range(runs):
        for name in sides:
            taken[name].append(former[f"{progress} {run}"][name])
    return taken


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def show(title: str, taken: Mapping[str, Sequence[float]]) -> None:
    """Print the milliseconds of all sides: median, least and most."""
    print(f"\n{title} (ms: median, min, max)")
    for name, values in taken.items():
        print(f"  {name:<44} {median(values):10.3f} {min(values):10.3f} {max(values):10.3f}")


def require_parity(what: str, difference: float, allowed: float) -> None:
    """Refuse to measure two sides that do not compute the same."""
    if not difference <= allowed:
        raise SystemExit(f"{what}: the sides differ by {difference:.3g}, more than {allowed:.3g}; nothing is reported")
    print(f"parity, {what}: {difference:.2g} (at most {allowed:.2g})")


def report(claim: Claim, ratios: Mapping[str, float], **more: Any) -> None:
    """Print the ratios against the claim, and the last line; exit with 1 where the claim does not hold."""
    print()
    unknown = [n for n in (*claim.must_reach, *claim.at_most, *claim.exactly) if n not in ratios]
    passed = not unknown
    for name, ratio in ratios.items():
        held = claim.holds(name, ratio)
        passed = passed and held is not False
        wanted = {
            **{n: f">= {v:g}" for n, v in claim.must_reach.items()},
            **{n: f"<= {v:g}" for n, v in claim.at_most.items()},
            **{n: f"== {v:g}" for n, v in claim.exactly.items()},
        }.get(name, "")
        print(f"  {name:<44} {ratio:10.3f} {wanted:>8}  {'' if held is None else 'reached' if held else 'NOT REACHED'}")
    for name in unknown:
        print(f"  {name:<44} not measured")
    line = {
        "name": claim.name,
        "ratios": {name: round(ratio, 4) for name, ratio in ratios.items()},
        "must_reach": dict(claim.must_reach),
        **({"at_most": dict(claim.at_most)} if claim.at_most else {}),
        **({"exactly": dict(claim.exactly)} if claim.exactly else {}),
        "passed": passed,
        **more,
    }
    print(json.dumps(line))
    raise SystemExit(0 if passed else 1)

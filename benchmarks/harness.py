"""Shared by all benchmarks: alternating measurements and a table of ratios.

A figure is the median over rounds. In each round every candidate runs once, so a slow phase of the
machine affects all equally. Results are printed as ratios to a reference measured in the same
rounds; absolute times are only for orientation.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Bench:
    """One benchmark's results, printed as they arrive; `report` writes JSON if requested."""

    title: str
    json_path: str | None = None
    lines: list[dict[str, object]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        where = f"{platform.machine()}, Python {platform.python_version()}"
        print(f"\n{self.title}  ({where})", flush=True)

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        reference: str = "",
        ratio: float | None = None,
        bar: str = "",
    ) -> None:
        """Add a line: a figure, its ratio to the reference, and the bar to reach."""
        self.lines.append(
            {
                "name": name,
                "value": value,
                "unit": unit,
                "reference": reference,
                "ratio": ratio,
                "bar": bar,
            }
        )
        compared = "" if ratio is None else f"{ratio:8.3f} x {reference}"
        to_reach = f"   bar {bar}" if bar else ""
        print(f"  {name:<58}{value:12.4g} {unit:<10}{compared}{to_reach}", flush=True)

    def note(self, text: str) -> None:
        """Note what was not measured, and why."""
        self.notes.append(text)
        print(f"  {text}", flush=True)

    def report(self) -> None:
        """Write the file that ``--json`` names."""
        if self.json_path:
            record = {
                "title": self.title,
                "machine": platform.processor() or platform.machine(),
                "python": platform.python_version(),
                "results": self.lines,
                "notes": self.notes,
            }
            Path(self.json_path).write_text(json.dumps(record, indent=1), encoding="utf-8")


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    made.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    made.add_argument("--rounds", type=int, default=5, help="rounds to take the median of")
    return made


def alternate(candidates: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Run the candidates in turn, `rounds` times; return median seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():  # warm the caches
        run()
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def attempt(bench: Bench, what: str, work: Callable[[], object]) -> bool:
    """Run a part of a benchmark; if it fails, show and note the error, and continue."""
    try:
        work()
    except Exception as error:
        traceback.print_exc()
        bench.note(f"{what} failed: {type(error).__name__}: {error}")
        return False
    return True


def paired_ratio(
    candidate: Callable[[], object], reference: Callable[[], object], rounds: int
) -> tuple[float, float, float]:
    """Return median of candidate/reference over rounds, and both median seconds.

    The ratio is taken within each round, which is least sensitive to drift.
    """
    ratios, ours, theirs = [], [], []
    candidate(), reference()
    for _ in range(rounds):
        start = time.perf_counter()
        reference()
        middle = time.perf_counter()
        candidate()
        end = time.perf_counter()
        theirs.append(middle - start)
        ours.append(end - middle)
        ratios.append(ours[-1] / theirs[-1])
    return statistics.median(ratios), statistics.median(ours), statistics.median(theirs)


def fail_quietly_without(module: str) -> None:
    """Exit with a message if a benchmark's reference is not installed."""
    try:
        __import__(module)
    except ImportError:
        sys.exit(f"this benchmark needs {module}")

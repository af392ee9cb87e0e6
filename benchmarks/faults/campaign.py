"""Many runs, several in parallel, and the report."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import cerebro
from benchmarks.faults.disturbed import Disturbed
from benchmarks.faults.oracle import Oracles
from benchmarks.faults.plan import ALL, PAUSES, SHIMMED, SMALL_DISK, WORKER_FAULTS, Plan, draw
from benchmarks.faults.running import Death, Report
from benchmarks.faults.shim import CannotCompile, compile_shim


@dataclass
class Means:
    """The faults that this machine supports, and why it lacks others."""

    kinds: frozenset[str]
    library: Path | None
    small_disks: bool
    notes: list[str] = field(default_factory=list)


def find_means(folder: Path, no_mounts: str | None) -> Means:
    """Compile the shim and probe the machine; `no_mounts` is why disks cannot be mounted."""
    kinds = set(ALL)
    notes = []
    library = None
    try:
        library = compile_shim(folder)
    except CannotCompile as error:
        kinds -= SHIMMED
        notes.append(f"no failing disks and no power loss: {error}")
    if no_mounts is not None:
        notes.append(f"the shim replaces a small disk: {no_mounts}")
        if library is None:
            kinds -= set(SMALL_DISK)
    if not hasattr(cerebro, "resume"):
        kinds &= WORKER_FAULTS.keys() | PAUSES.keys()
        kinds -= {"second owner"}
        notes.append("this Cerebro cannot resume: faults of workers only")
    return Means(frozenset(kinds), library, no_mounts is None, notes)


class Campaign:
    """Runs seeds in a temporary folder.

    Parameters ---------- no_mounts Why `disks.enter_namespace` failed, or None. keep_failed Keep
    the folders of failed runs.
    """

    def __init__(self, no_mounts: str | None, *, keep_failed: bool = False) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="cerebro-faults-"))
        self._keep_failed = keep_failed
        self._failed = False
        self.means = find_means(self._folder, no_mounts)
        self._oracles = Oracles(self._folder / "oracles")

    def run(self, seed: int) -> Report:
        """Run a seed."""
        return self.carry_out(draw(seed, self.means.kinds))

    def carry_out(self, plan: Plan, sabotage: str | None = None) -> Report:
        """Run a plan; the report has the problems."""
        folder = self._folder / f"run-{plan.seed}"
        try:
            disturbed = Disturbed(
                plan,
                self._oracles,
                folder,
                self.means.library,
                small_disks=self.means.small_disks,
                sabotage=sabotage,
            )
            report = disturbed.go()
        except Exception:
            report = Report(plan.seed)
            report.blame(f"broken: {traceback.format_exc()}")
        if report.problems and self._keep_failed:
            self._failed = True
            report.tell(f"its folder: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
        return report

    def run_all(
        self, seeds: Iterable[int], jobs: int, tell: Callable[[Report], None]
    ) -> list[Report]:
        """Run many seeds, `jobs` in parallel; `tell` receives each report."""
        reports = []
        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(self.run, seed) for seed in seeds]
            for future in as_completed(futures):
                reports.append(future.result())
                tell(reports[-1])
        return sorted(reports, key=lambda report: report.seed)

    def close(self) -> None:
        if not self._failed:
            shutil.rmtree(self._folder, ignore_errors=True)


# --- the report ----------------------------------------------------------------


def count(reports: Iterable[Report], word: str) -> int:
    return sum(p.startswith(word) for report in reports for p in report.problems)


def seconds_of(deaths: Iterable[Death], kind: str) -> list[float]:
    return [d.seconds for d in deaths if d.kind == kind and d.seconds is not None]


def summary(reports: list[Report], notes: list[str], seconds: float) -> str:
    """The figures of a campaign, as text."""
    struck: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for report in reports:
        struck.update(report.struck)
        missed.update(report.missed)
    deaths = [death for report in reports for death in report.deaths]
    lines = [
        f"runs                         {len(reports)} in {seconds:.0f} s, "
        f"{sum(r.legs for r in reports)} processes that search or resume",
        f"results compared             {sum(r.epochs for r in reports)} epochs of trials",
        f"faults injected              {sum(struck.values())} "
        f"({sum(missed.values())} more came too late)",
    ]
    lines += [f"  {kind:<34} {struck[kind]:5}" for kind in ALL if struck[kind]]
    lines += [
        f"results lost                 {count(reports, 'lost')}",
        f"wrong hashes or metrics      {count(reports, 'wrong')}",
        f"orphans                      {count(reports, 'orphans')}",
        f"hangs                        {count(reports, 'hang')}",
        f"errors not explained         {count(reports, 'unclean')}",
        f"stray files                  {count(reports, 'stray')}",
        f"runs not finished            {count(reports, 'unfinished')}",
        "units repeated per fault     "
        f"{max((d.repeated for d in deaths), default=0)} at most, after a worker's; "
        f"{max((n for r in reports for n in r.repeated_at_resume), default=0)} at most of a trial, "
        "after a coordinator's",
    ]
    for kind in WORKER_FAULTS:
        times = seconds_of(deaths, kind)
        if times:
            lines.append(
                f"until the unit ran again     {statistics.median(times):.3f} s (median), "
                f"{max(times):.3f} s (longest) of {len(times)}: {kind}"
            )
    exits = [value for report in reports for value in report.exits]
    if exits:
        lines.append(
            f"workers outlived their coordinator by {max(exits):.3f} s at most, of {len(exits)}"
        )
    lines += [f"note: {note}" for note in notes]
    bad = [report for report in reports if report.problems]
    for report in bad:
        lines.append(f"\nFAILED: python -m benchmarks.faults --only {report.seed}")
        lines += report.story
    verdict = "nothing lost" if not bad else f"{len(bad)} of {len(reports)} runs FAILED"
    return "\n".join([*lines, "", f"{len(reports)} runs: {verdict}"])


def default_jobs() -> int:
    """Runs in parallel: one more than the cores, because some wait for silent processes."""
    return len(os.sched_getaffinity(0)) + 1


def supported() -> str | None:
    """Why the campaign cannot run on this system, or None."""
    if not sys.platform.startswith("linux"):
        return "the fault campaign needs Linux: it reads /proc"
    if not hasattr(os, "pidfd_open"):
        return "the fault campaign needs pidfd_open (Linux 5.3)"
    return None

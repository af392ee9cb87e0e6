"""Simulate many runs with faults: ``python -m tests.sim --runs N --seed S``.

Each seed is one run. A seed that goes wrong is printed with the shortest list of faults that still
does; ``--only SEED`` repeats one.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, os.fspath(Path(__file__).parent))

import defects
import run
import vfs
from faults import Fault
from problems import Problem
from shrinking import shrink

AT_ONCE = 20  # seeds of a message to a process
LONGEST = 60  # seconds of real time that a run may take: it takes 15 to 33 ms


def main() -> int:
    options = parse(sys.argv[1:])
    if not vfs.register():
        print("this Python's SQLite takes no file system from a program: use another Python")
        return 2
    warnings.simplefilter("ignore")  # what a run warns of is not looked at
    seed = int(datetime.date.today().strftime("%Y%m%d")) if options.seed is None else options.seed
    first = seed * 1_000_000
    if options.only is not None:
        report(options.only, defect=options.defect)
        return 0
    began = time.monotonic()
    tally: Counter[str] = Counter()
    failed: list[int] = []
    batches = [
        (range(n, min(n + AT_ONCE, first + options.runs)), options.defect)
        for n in range(first, first + options.runs, AT_ONCE)
    ]
    fork = multiprocessing.get_context("fork")
    with fork.Pool(options.processes, keep_to_one_core, (fork.Value("i", 0),)) as pool:
        for found, wrong in pool.imap(simulate, batches):
            tally += found
            failed += wrong
            seconds = time.monotonic() - began
            if len(failed) >= options.most or seconds > 60 * options.minutes:
                break
    runs = tally.pop("runs")
    print(f"{runs:,} runs from seed {seed} in {seconds:.0f} s: {60 * runs / seconds:,.0f} a minute")
    for name, count in sorted(tally.items()):
        print(f"  {name:<28}{count:>10,}")
    print(f"{len(failed)} of them went wrong")
    for number in failed[: options.most]:
        report(number, defect=options.defect)
    return 1 if failed else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--runs", type=int, default=1000, help="how many runs (%(default)s)")
    parser.add_argument("--seed", type=int, help="of the first run; default: today's date")
    parser.add_argument("--minutes", type=float, default=1e9, help="the most to take")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="at once")
    parser.add_argument("--most", type=int, default=5, help="stop after so many wrong runs")
    parser.add_argument("--only", type=int, metavar="SEED", help="repeat one run, and shrink it")
    parser.add_argument("--defect", choices=sorted(defects.DEFECTS), help="plant this first")
    return parser.parse_args(arguments)


def keep_to_one_core(started: Any) -> None:
    """Keep this process to a core: its threads take turns, and would wake each other elsewhere."""
    with started.get_lock():
        number, started.value = started.value, started.value + 1
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Raise an error in a run that takes a minute: it waits for a lock that a paused thread holds.

    Raise it again each second: what the run does at its end may wait for the same lock.
    """

    def stop(number: int, frame: object) -> None:
        raise RuntimeError(f"a run takes over {LONGEST} s: a paused thread may hold a lock")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LONGEST, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def simulate(batch: tuple[Sequence[int], str | None]) -> tuple[Counter[str], list[int]]:
    """Run a batch of seeds; return what happened how often, and the seeds that went wrong."""
    seeds, defect = batch
    gc.disable()  # each run leaves circles of objects, which are collected together
    tally: Counter[str] = Counter()
    wrong = []
    for seed in seeds:
        tally["runs"] += 1
        problem = Problem.draw(seed)
        faults = run.draw_faults(problem, seed)
        try:
            with defects.plant(defect), time_limit():
                outcome = run.check(problem, seed, faults)
        except Exception:
            wrong.append(seed)
        else:
            tally["processes"] += outcome.processes
            tally["units"] += len(outcome.tables["units"])
            tally.update(f"fault: {fault.kind}" for fault in outcome.struck)
    gc.collect()
    if not gc.get_freeze_count():  # it takes long to look again and again at what stays
        gc.freeze()
    return tally, wrong


def report(seed: int, *, defect: str | None) -> None:
    """Repeat a run, and print why it goes wrong and the shortest list of faults that does so."""
    problem = Problem.draw(seed)
    faults = run.draw_faults(problem, seed)
    error = find_error(seed, faults, defect)
    print(f"\nseed {seed}: {problem}")
    if error is None:
        print("  as without faults; struck by")
    else:
        faults = shrink(faults, lambda fewer: find_error(seed, fewer, defect) is not None)
        error = find_error(seed, faults, defect)
        print("".join(f"  {line}\n" for line in describe(error)), end="")
        print("  the shortest list of faults:")
    print("".join(f"    {number}. {fault}\n" for number, fault in enumerate(faults, 1)), end="")


def find_error(seed: int, faults: Sequence[Fault], defect: str | None) -> BaseException | None:
    try:
        with defects.plant(defect), time_limit():
            run.check(Problem.draw(seed), seed, faults)
    except Exception as error:
        return error
    return None


def describe(error: BaseException | None) -> Iterator[str]:
    if isinstance(error, run.Wrong):
        yield str(error)
    elif error is not None:
        yield from "".join(traceback.format_exception(error, limit=-6)).splitlines()


if __name__ == "__main__":
    sys.exit(main())

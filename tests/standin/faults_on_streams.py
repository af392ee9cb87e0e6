"""Searches over the stand-in that meet faults; for tests/integration/test_streams_faults.py.

The units of several workers overlap in one process, as in `streams_on_standin`. The trial that is
to meet a fault waits until the others are where the test wants them: in the middle of a unit and
waiting for their turn, or for the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import streams_on_standin as standin
import torch
from streams_on_standin import BATCH, Mixer, checked, runtime

import cerebro
from cerebro.executors import local
from cerebro.machine import devices, turns
from cerebro.machine.devices import Device, Found
from cerebro.worker import gpu

ROWS, SHARDS, EPOCHS, WORKERS = 240, 3, 2, 3
GB = 10**9
LARGE = 600 * 10**6
"""Bytes: a device of the stand-in has 1 GB, so that two such blocks do not fit."""
ACTS = "FAULTS_ON_STREAMS"
"""What trials do, in JSON: by the trial's number, the act and what it needs."""
WAITING = -1e5
"""The clock of a unit that waits for its turn shows less; see `cerebro.executors.local`."""

runtime.cudaFree.argtypes = (ctypes.c_void_p,)


# --- where the other units are ---------------------------------------------------------


class Gate:
    """Holds units back while they wait for the device."""

    def __init__(self) -> None:
        self.trials: set[int] = set()  # whose waits do not end
        self.held: set[int] = set()


gate = Gate()
met: set[int] = set()  # trials that have come to the place where they meet


class Event(standin.Event):
    """An event that the device does not reach while the gate holds the trial back."""

    def synchronize(self) -> None:
        trial = getattr(standin.here, "trial", None)
        while trial in gate.trials:
            gate.held.add(trial)
            time.sleep(0.001)
        super().synchronize()


setattr(gpu, "record_event", Event)  # noqa: B010


def others() -> list[Any]:
    """Return the turns of the other units that have begun and not ended."""
    mine = turns._here.turn
    return [] if mine is None else [turn for turn in mine.turns._inside if turn is not mine]


def are_waiting(count: int) -> bool:
    """Return whether `count` other units are in the middle, and all wait for their turn."""
    clocks = [turn.waits.__self__.beat.task_seconds for turn in others()]
    return len(clocks) == count and all(seconds < WAITING for seconds in clocks)


def until(condition: Callable[[], bool], *, away: bool = True) -> None:
    """Wait for a condition; let other units run meanwhile if `away`."""
    while not condition():
        with turns.give_away() if away else contextlib.nullcontext():
            time.sleep(0.001)


# --- the model -----------------------------------------------------------------------


class Actor(Mixer):
    """Computes what a `Mixer` computes; its trial may do more at one of its batches."""

    def __init__(self, config: dict[str, Any], info: Any) -> None:
        super().__init__(config, info)
        its = json.loads(os.environ.get(ACTS, "{}")).get(str(info.trial), {})
        self._act = getattr(Actor, its["act"]) if its and self._on_device else None
        self._at = config["first"] + its.get("at", 0)
        self._its = its
        self._hog: ctypes.c_void_p | None = None

    def train_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        standin.here.trial = self._trial
        if self._act is not None and self._count == self._at:
            self._act(self)
        return super().train_batch(batch)

    def _once(self) -> bool:
        """Return whether this is the first time, over all processes."""
        flag = Path(self._its["flag"])
        if flag.exists():
            return False
        flag.touch()
        return True

    def _gather(self, count: int) -> None:
        """Hold the turn while `count` other units are in the middle and wait for theirs."""
        if turns.gives_away():
            until(lambda: len(others()) == count)
            until(lambda: are_waiting(count), away=False)

    def _meet(self) -> None:
        """Go on when as many trials have come here as are to meet."""
        met.add(self._trial)
        until(lambda: len(met) >= self._its["meet"])

    # --- what trials do

    def kill(self) -> None:
        """End the process, while others wait for their turn."""
        if "after" in self._its:
            self.hold()
        self._gather(self._its["others"])
        os.kill(os.getpid(), signal.SIGKILL)

    def hold(self) -> None:
        """Go on when a file exists; let other units run meanwhile."""
        until(Path(self._its["after"]).exists)

    def kill_beside(self) -> None:
        """End the process while another unit waits for the device, so that it may be to blame."""
        if turns.gives_away():
            other = self._its["other"]
            gate.trials.add(other)
            until(lambda: other in gate.held)
        os.kill(os.getpid(), signal.SIGKILL)

    def interrupt(self) -> None:
        """Interrupt the search, as Ctrl-C does, and keep the turn."""
        if self._once():
            self._gather(self._its["others"])
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(600)

    def work(self) -> None:
        """Keep the turn for some time, begun when all units of the process have begun."""
        self._meet()
        time.sleep(self._its["seconds"])

    def hang(self) -> None:
        """Keep the turn for ever, while others wait for theirs."""
        self._gather(self._its["others"])
        time.sleep(600)

    def hang_on_device(self) -> None:
        """Wait for the device for ever."""
        if turns.gives_away():
            gate.trials.add(self._trial)
        else:
            time.sleep(600)

    def fail(self) -> None:
        raise ValueError("this trial fails")

    def hog(self) -> None:
        """Take memory of the device until the unit ends, when all units have it begun."""
        self._meet()
        self._hog = ctypes.c_void_p()
        if runtime.cudaMalloc(ctypes.byref(self._hog), self._its["bytes"]) != 0:
            self._hog = None
            with Path(self._its["log"]).open("a") as log:
                log.write(f"{self._trial}\n")
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    def end_unit(self) -> None:
        if self._hog is not None and not self._its.get("keeps"):
            self._free()

    def _free(self) -> None:
        hog, self._hog = self._hog, None
        checked(runtime.cudaFree(hog))

    def __del__(self) -> None:
        if getattr(self, "_hog", None) is not None:
            self._free()


def build(config: dict[str, Any], info: Any) -> Actor:
    return Actor(config, info)


class Ended:
    """Touches a file when the search has been told that a trial has ended."""

    def __init__(self, trial: int, flag: Path) -> None:
        self._trial, self._flag = trial, flag

    def on_trial_end(self, trial: Any) -> None:
        if trial.number == self._trial:
            self._flag.touch()


# --- the searches --------------------------------------------------------------------

GPUS = tuple(Device(f"cuda:{i}", f"Stand-in {i}", GB, str(i)) for i in range(2))


def search(data: Any, run: Path, acts: dict[int, Any], **options: Any) -> dict[str, Any]:
    """Search, with the acts of trials by number; return what the run shows."""
    os.environ[ACTS] = json.dumps(acts)
    trials = options.pop("trials", 5)
    given = {"devices": "cuda:0", "workers": WORKERS, "live_models": 2, "max_retries": 0, **options}
    interrupted = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            cerebro.search(
                build, {"first": list(range(trials))}, data, epochs=EPOCHS, validation=0.2,
                searcher="grid", batch_size=BATCH, run=run, progress=False, **given,
            )  # fmt: skip
        except KeyboardInterrupt as error:
            interrupted = str(error)
    plan = cerebro.plan(
        {"first": list(range(trials))}, data, epochs=EPOCHS, validation=0.2, searcher="grid",
        **{name: given[name] for name in ("devices", "workers", "live_models")},
    )  # fmt: skip
    found = {**shown(run), "interrupted": interrupted}
    found["plan"] = {"units": plan.units, "workers": plan.workers, "held": plan.resident_bytes}
    if interrupted:
        pids = {int(pid) for pids in found["processes"] for pid in pids}
        found["left"] = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        cerebro.resume(run, progress=False)
        found["resumed"] = shown(run)
    log = run.with_suffix(".short")
    found["short"] = [int(line) for line in log.read_text().split()] if log.exists() else []
    return found


def shown(run: Path) -> dict[str, Any]:
    result = cerebro.open(run)
    lines = [[line.split() for line in trial.log.splitlines()] for trial in result.trials]
    return {
        "run": result.status,
        "status": [trial.status for trial in result.trials],
        "errors": [trial.error for trial in result.trials],
        "hashes": [[epoch["state_hash"] for epoch in t.history] for t in result.trials],
        "events": [[e["kind"], e["trial"], e["text"]] for e in result.events()],
        "units": [[u["trial"], u["worker"], u["attempt"]] for u in result.saved.units()],
        "foreign": [
            " ".join(words)
            for number, its in enumerate(lines)
            for words in its
            if words[:3] != ["trial", str(number), "batch"]
        ],
        "tracebacks": [sum(words[:1] == ["Timeout"] for words in its) for its in lines],
        "processes": [
            sorted({words[5] for words in its if words[4:5] == ["process"]}) for its in lines
        ],
    }


def main(folder: Path, ways: list[str]) -> None:
    setattr(devices, "lookup", lambda: Found(GPUS))  # noqa: B010
    setattr(local, "DUMP_SECONDS", 4.0)  # noqa: B010  # a busy machine may need longer to dump
    rng = np.random.default_rng(0)
    columns = {"x": rng.normal(size=(ROWS, 5)).astype(np.float32)}
    data = cerebro.shard(columns, folder / "data", shards=SHARDS, progress=False)
    os.environ |= {"STANDIN_DEFER": "1", "STANDIN_ODD": "3"}
    said = {}
    for way in ways:
        acts, options = WAYS[way](folder / way)
        said[way] = search(data, folder / way, acts, **options)
    print(json.dumps(said))


Way = Callable[[Path], tuple[dict[int, Any], dict[str, Any]]]
TWO = {"devices": ["cuda:0", "cuda:1"], "workers": 4}


def hogs(*sizes: int, keeps: bool = False) -> Way:
    """Return a way in which trials 0, 1 and up take memory of these sizes at the same time."""

    def of(run: Path) -> tuple[dict[int, Any], dict[str, Any]]:
        its = {"act": "hog", "at": 9, "meet": len(sizes), "keeps": keeps}
        log = str(run.with_suffix(".short"))
        return {i: {**its, "bytes": size, "log": log} for i, size in enumerate(sizes)}, {}

    return of


WAYS: dict[str, Way] = {
    "cpu": lambda _: ({}, {"devices": "cpu", "workers": 1}),
    "kills": lambda _: ({3: {"act": "kill", "at": 9, "others": 2}}, {}),
    "kills beside": lambda _: ({1: {"act": "kill_beside", "at": 9, "other": 0}}, {}),
    # One of three workers is idle: its trial has failed, and there is no other.
    "kills beside idle": lambda run: (
        {
            0: {"act": "hold", "at": 17, "after": str(run.with_suffix(".flag"))},
            1: {"act": "kill", "at": 17, "others": 1, "after": str(run.with_suffix(".flag"))},
            2: {"act": "fail", "at": 9},
        },
        {"trials": 3, "callbacks": [Ended(2, run.with_suffix(".flag"))]},
    ),
    "interrupted": lambda run: (
        {1: {"act": "interrupt", "at": 18, "others": 2, "flag": str(run.with_suffix(".flag"))}},
        {},
    ),
    "two, killed": lambda _: ({3: {"act": "kill", "at": 9, "others": 1}}, TWO),
    "out of memory": hogs(LARGE, LARGE, LARGE),
    "others keep": hogs(LARGE, LARGE, LARGE, keeps=True),
    "too large": hogs(4, 2 * GB, 4),
    "waits": lambda _: (
        {i: {"act": "work", "at": 9, "meet": 3, "seconds": 1.6} for i in range(3)},
        {"unit_timeout": 3.0, "trials": 3},
    ),
    "hangs": lambda _: ({1: {"act": "hang", "at": 9, "others": 2}}, {"unit_timeout": 2.0}),
    "hangs on device": lambda _: ({1: {"act": "hang_on_device", "at": 9}}, {"unit_timeout": 2.0}),
}
"""What trials do in each search, and the search's options, for its run's folder."""


if __name__ == "__main__":
    import faults_on_streams

    faults_on_streams.main(Path(sys.argv[1]), sys.argv[2:])

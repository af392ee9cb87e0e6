"""Carry out what the page's buttons ask for: commands to a run, and proofs by training again."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cerebro import control
from cerebro.errors import CerebroError, InputError, one_line

PER_SECOND = 5
MAX_VALUE = 2**31 - 1


class TooMany(Exception):
    """More than `PER_SECOND` actions in a second."""


class Rate:
    """At most `PER_SECOND` actions in any second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._times: deque[float] = deque(maxlen=PER_SECOND)

    def count(self) -> None:
        """Count an action; raise TooMany if there were too many."""
        with self._lock:
            now = self._clock()
            if len(self._times) == PER_SECOND and now - self._times[0] < 1.0:
                raise TooMany
            self._times.append(now)


def perform(folder: Path, request: Mapping[str, Any], prover: Prover) -> dict[str, Any]:
    """Do what a request asks, and return what to tell; raise CerebroError or OSError if refused.

    A request has a ``verb``, for most verbs a ``trial``, and for a clone or an added trial
    ``changes``, ``after``, ``epochs``, ``cold`` and ``stop_parent``; other names are refused.
    """
    verb = request.get("verb")
    if not isinstance(verb, str) or verb not in VERBS:
        raise InputError(f"verb must be one of {', '.join(VERBS)}")
    unknown = request.keys() - {"verb", *VERBS[verb]}
    if unknown:
        raise InputError(f"{verb} does not take {one_line(repr(min(unknown)), 60)}")
    trial = _read_count(request, "trial")
    if verb in ("clone", "extend", "prove") and trial is None:
        raise InputError(f"{verb} needs a trial")
    epochs = _read_count(request, "epochs")
    if verb == "prove":
        return {"text": prover.start(folder, _given(trial))}
    if verb == "extend":
        control.extend(folder, _given(trial), _given(epochs, "epochs"))
        return {"text": f"trial {trial} trains until epoch {epochs}"}
    if verb == "add":
        number = control.add(folder, _read_changes(request), **_present(epochs=epochs))
        return {"trial": number, "text": f"trial {number} was added"}
    if verb == "clone":
        number = control.clone(
            folder,
            _given(trial),
            _read_changes(request),
            **_present(after=_read_count(request, "after"), epochs=epochs),
            cold=_read_flag(request, "cold"),
        )
        if _read_flag(request, "stop_parent"):
            control.stop(folder, trial)
        return {"trial": number, "text": f"the clone of trial {trial} is trial {number}"}
    getattr(control, verb)(folder, trial)
    what = "the run" if trial is None else f"trial {trial}"
    return {"text": TOLD[verb].format(what)}


VERBS: dict[str, tuple[str, ...]] = {
    "stop": ("trial",),
    "pause": ("trial",),
    "unpause": ("trial",),
    "clone": ("trial", "changes", "after", "epochs", "cold", "stop_parent"),
    "add": ("changes", "epochs"),
    "extend": ("trial", "epochs"),
    "prove": ("trial",),
}
"""What can be asked for, and the names that each request may have."""

TOLD = {
    "stop": "{} stops after its current unit; its finished epochs are kept",
    "pause": "{} pauses after its current unit",
    "unpause": "{} continues",
}


def _read_count(request: Mapping[str, Any], name: str) -> int | None:
    value = request.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_VALUE:
        raise InputError(f"{name} must be a whole number from 0 to {MAX_VALUE}")
    return value


def _read_flag(request: Mapping[str, Any], name: str) -> bool:
    value = request.get(name, False)
    if not isinstance(value, bool):
        raise InputError(f"{name} must be true or false")
    return value


def _read_changes(request: Mapping[str, Any]) -> dict[str, Any]:
    value = request.get("changes", {})
    if not isinstance(value, dict):
        raise InputError("changes must be an object of settings and their values")
    return value


def _given(value: int | None, name: str = "trial") -> int:
    if value is None:
        raise InputError(f"{name} is missing")
    return value


def _present(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


class Prover:
    """Trains trials of runs again, one at a time, each in a process of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._outcomes: dict[tuple[Path, int], dict[str, str]] = {}

    def outcomes(self, folder: Path) -> dict[int, dict[str, str]]:
        """Return by trial a ``state``, which is proving, identical or failed, and a ``text``."""
        with self._lock:
            return {n: dict(told) for (run, n), told in self._outcomes.items() if run == folder}

    def start(self, folder: Path, trial: int) -> str:
        """Start a proof; raise InputError if one is in progress."""
        with self._lock:
            if self._process is not None:
                raise InputError("another trial is being proved: wait until it is done")
            command = [sys.executable, "-m", "cerebro", "replay", str(folder)]
            self._process = subprocess.Popen(
                [*command, "--trial", str(trial)],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace",
            )  # fmt: skip
            self._outcomes[folder, trial] = {"state": "proving", "text": "it is trained again"}
            threading.Thread(
                target=self._wait, args=(folder, trial, self._process), daemon=True
            ).start()
        return f"trial {trial} is trained again, in a process of its own"

    def _wait(self, folder: Path, trial: int, process: subprocess.Popen[str]) -> None:
        said, _ = process.communicate()
        text = one_line("".join(said.strip().splitlines()[-1:]), 400)
        state = "identical" if process.returncode == 0 else "failed"
        with self._lock:
            self._outcomes[folder, trial] = {"state": state, "text": text}
            self._process = None

    def close(self) -> None:
        """End the proof in progress."""
        with self._lock:
            if self._process is not None:
                self._process.terminate()


REFUSED = (CerebroError, OSError, TypeError, ValueError)
"""What `perform` may raise; the text says why."""

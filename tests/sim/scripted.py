"""A disk for tests of it, and a process whose faults are told call by call."""

from __future__ import annotations

from pathlib import Path
from random import Random

from disk import SimulatedDisk
from faults import ProcessDied


def make_disk(seed: int, real: Path) -> SimulatedDisk:
    disk = SimulatedDisk(Random(seed), real)
    disk.make_folder("/run")
    return disk


class ScriptedProcess:
    """A process whose calls of the disk are counted; call number `at` raises `fault`."""

    def __init__(self, at: int | None = None, fault: BaseException | None = None) -> None:
        self.is_dead = False
        self.calls: list[tuple[str, str]] = []
        self.slept = 0.0
        self._at = at
        self._kind: str | None = None
        self._fault = fault

    def call(self, kind: str, path: str) -> None:
        self.calls.append((kind, path))
        if self._fault is not None and (len(self.calls) - 1 == self._at or kind == self._kind):
            self.is_dead = isinstance(self._fault, ProcessDied)
            self._kind = None
            raise self._fault

    def fail_next(self, fault: BaseException) -> None:
        self._at, self._fault = len(self.calls), fault

    def fail_kind(self, kind: str, fault: BaseException) -> None:
        """Let the next call of a kind fail."""
        self._kind, self._fault = kind, fault

    def sleep(self, seconds: float) -> None:
        self.slept += seconds

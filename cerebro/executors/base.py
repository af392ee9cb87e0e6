"""What an executor is: something that runs units and says how they went.

The coordinator decides what runs where; an executor only carries it out. The
same protocol stands for this process (`inline`), for processes on this machine
(`local`) and for actors on a cluster.
"""

from __future__ import annotations

from typing import Protocol

from cerebro.unit import CheckTask, Event, RunContext, Task


class Executor(Protocol):
    """Runs units on workers numbered by the executor."""

    def start(self, context: RunContext) -> list[int]:
        """Make every worker ready for a run; return their numbers, lowest first.

        Raises
        ------
        WorkerError
            If a worker cannot be started.
        """

    def submit(self, worker: int, task: Task | CheckTask) -> None:
        """Start a task on an idle worker; returns at once."""

    def wait(self, timeout: float | None = None) -> list[Event]:
        """Return what happened, waiting until something has or `timeout` seconds passed."""

    def replace(self, worker: int) -> int:
        """Start a worker in place of a lost one and return its number."""

    def close(self, *, kill: bool = False) -> None:
        """End the run: no worker goes on with it. `kill` does not wait for units in flight."""

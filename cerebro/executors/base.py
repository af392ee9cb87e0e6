"""What an executor is: something that runs units and says how they went.

The coordinator decides what runs where; an executor only carries it out. The
same protocol stands for this process (`inline`), for processes on this machine
(`local`) and for actors on a cluster.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from multiprocessing.connection import wait as wait_for_any
from typing import Protocol

from cerebro.unit import Event, Job, RunContext

LOOK_SECONDS = 1.0
"""How long an executor that cannot be woken is left waiting."""


class Wake(Protocol):
    """Something with a descriptor that becomes readable."""

    def fileno(self) -> int: ...


class Executor(Protocol):
    """Runs units on workers numbered by the executor."""

    def start(self, context: RunContext) -> list[int]:
        """Make every worker ready for a run; return their numbers, lowest first.

        Raises
        ------
        WorkerError
            If a worker cannot be started.
        """

    def submit(self, worker: int, task: Job) -> None:
        """Start a task on an idle worker; returns at once."""

    def wait(self, timeout: float | None = None, wake: Wake | None = None) -> list[Event]:
        """Return what happened, waiting until something has or `timeout` seconds passed.

        Returns early when `wake` becomes readable. An executor without this parameter
        is asked again every second instead.
        """

    def replace(self, worker: int) -> int:
        """Start a worker in place of a lost one and return its number."""

    def close(self, *, kill: bool = False) -> None:
        """End the run: no worker goes on with it. `kill` does not wait for units in flight."""

    # An executor may also have `cancel(worker)`, which ends the worker's unit at its
    # next batch with `UnitFailed` of the kind "cancelled".


def wait_for(wake: Wake | None, timeout: float | None) -> None:
    """Wait until `wake` is readable or `timeout` seconds passed, where no unit runs."""
    wait_for_any([] if wake is None else [wake.fileno()], timeout)


def waker(executor: Executor) -> Callable[[float | None, Wake | None], list[Event]]:
    """Return `executor.wait`, which is woken as well as it can be."""
    wait: Callable[..., list[Event]] = executor.wait
    parameters = inspect.signature(wait).parameters.values()
    if any(p.name == "wake" or p.kind is p.VAR_KEYWORD for p in parameters):
        return lambda timeout, wake: wait(timeout, wake=wake)

    def wait_in_steps(timeout: float | None, wake: Wake | None) -> list[Event]:
        steps = wake is not None and (timeout is None or timeout > LOOK_SECONDS)
        return wait(LOOK_SECONDS if steps else timeout)

    return wait_in_steps

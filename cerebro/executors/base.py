"""What an executor is: something that runs units and says how they went.

The coordinator decides what runs where; an executor only carries it out. The
same protocol stands for this process (`inline`), for processes on this machine
(`local`) and for actors on a cluster (`cerebro.ray`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from cerebro.worker.messages import Job, News, RunContext


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

    def wait(self, timeout: float | None = None, wake: Wake | None = None) -> Sequence[News]:
        """Return what happened, waiting until something has or `timeout` seconds passed.

        Returns early when `wake` becomes readable: what Ray Tune asks for rings. No other run
        gives one.
        """

    def replace(self, worker: int) -> int:
        """Start a worker in place of a lost one and return its number."""

    def close(self, *, kill: bool = False) -> None:
        """End the run: no worker goes on with it. `kill` does not wait for units in flight."""

    # An executor may also have `cancel(worker)`, which ends the worker's unit at its
    # next batch with `UnitFailed` of the kind "cancelled", and be a `PlacingExecutor`. Where its
    # workers have GPUs, `devices` names these, or is ("cuda",): each worker sees its own as cuda:0.


class PlacingExecutor(Executor, Protocol):
    """An executor whose workers do not all read every shard."""

    def holders(self) -> Mapping[int, Sequence[int]] | None:
        """Return the workers that can read each shard, by shard.

        None once and for all: every worker reads all. `ShardsPlaced` says that it has changed.
        """

    def load(self, worker: int, shard: int) -> None:
        """Make a shard readable for a worker; returns at once, its units may be submitted."""


def placing(executor: Executor) -> PlacingExecutor | None:
    """Return the executor if its workers read different shards; it has been started."""
    holders = getattr(executor, "holders", None)
    return executor if holders is not None and holders() is not None else None  # type: ignore[return-value]

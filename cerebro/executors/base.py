"""Define the protocol of executors, which run units on workers and report the results.

The coordinator decides which unit runs where; the executor carries this out. One protocol covers
this process (`inline`), processes on this machine (`local`) and the workers of a cluster
(`cerebro.cluster`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from cerebro.worker.messages import Job, News, RunContext, Task


class Wake(Protocol):
    """An object with a file descriptor that becomes readable."""

    def fileno(self) -> int: ...


class Executor(Protocol):
    """Runs units on workers, which it numbers.

    It may also have ``cancel(worker)``, which ends the worker's unit at its next batch with a
    `UnitFailed` of kind "cancelled". It may be a `QueueingExecutor` or a `PlacingExecutor`. If its
    workers have GPUs, ``devices`` names them, or is ``("cuda",)``: each worker sees its own GPU as
    cuda:0.
    """

    def start(self, context: RunContext) -> list[int]:
        """Prepare every worker for a run; return their numbers, or raise WorkerError."""

    def submit(self, worker: int, task: Job) -> None:
        """Start a task on an idle worker, without waiting for it."""

    def wait(self, timeout: float | None = None, wake: Wake | None = None) -> Sequence[News]:
        """Return events, after waiting up to `timeout` seconds for the first one.

        Return early, perhaps without events, when `wake` becomes readable. Runs under Ray Tune pass
        it to receive Tune's requests.
        """

    def replace(self, worker: int) -> int:
        """Start a worker to replace a lost one; return its number."""

    def close(self, *, kill: bool = False) -> None:
        """End the run on every worker; with `kill`, do not wait for units in flight."""


class QueueingExecutor(Executor, Protocol):
    """An executor whose workers need not wait for commands between two units of a trial."""

    def queue(self, worker: int, task: Task) -> None:
        """Send a busy worker the next unit of its trial, which it begins when its unit is done.

        If the running unit does not succeed, the queued one is dropped without an event. A worker
        has at most one queued unit. Call this only when all events that `wait` has returned are
        handled.
        """


class PlacingExecutor(Executor, Protocol):
    """An executor whose workers cannot all read every shard."""

    def holders(self) -> Mapping[int, Sequence[int]] | None:
        """Return the workers that can read each pool of shards; `ShardsPlaced` reports changes.

        Pools are those of `RunContext.order`. None: every worker can read every shard throughout
        the run.
        """

    def load(self, worker: int, pool: int) -> None:
        """Make a pool readable for a worker without waiting; submit its units at any time."""


def as_queueing(executor: Executor) -> QueueingExecutor | None:
    """Return an executor if its workers can have a unit in a queue, else None."""
    return executor if hasattr(executor, "queue") else None  # type: ignore[return-value]


def as_placing(executor: Executor) -> PlacingExecutor | None:
    """Return a started executor if its workers hold different shards, else None."""
    holders = getattr(executor, "holders", None)
    return executor if holders is not None and holders() is not None else None  # type: ignore[return-value]

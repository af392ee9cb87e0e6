"""Try the first configuration of a run before anything is trained; see `cerebro.check`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cerebro.errors import StateError
from cerebro.executors.base import Executor
from cerebro.machine.devices import is_gpu
from cerebro.machine.environment import uses_gpu
from cerebro.worker.messages import CheckDone, CheckTask, Event, RunContext, Warned

MAX_START_LOSSES = 2
"""The number of workers that may die while they try the first configuration."""


@dataclass
class DryRun:
    """The outcome of a dry run."""

    workers: list[int] = field(default_factory=list)
    """Workers that are ready to train."""
    problems: Sequence[str] = ()
    """The parts of the state that a hop loses, one line each."""
    state_bytes: int = 0
    """Size of the model's state in bytes; 0: not known."""
    environment: Mapping[str, Any] | None = None
    """The workers' environment, if known."""
    warned: list[Warned] = field(default_factory=list)

    def raise_if_broken(self) -> None:
        """Raise StateError if a hop would lose parts of the models' state."""
        if self.problems:
            raise StateError(
                "the model's state does not survive a hop: "
                + "; ".join(self.problems)
                + " (put it into state_dict() and load_state_dict(), or into the net as a buffer)"
            )

    def warn_if_misplaced(self, device: str) -> None:
        """Warn if the workers do not compute on `device`, which they were given."""
        if self.environment is None:
            return
        count = len(self.workers)
        if is_gpu(device) and not uses_gpu(self.environment):
            warnings.warn(
                f"the model computes on the CPU, but {count} worker(s) have a GPU each: put it on "
                "info.device, or give devices='cpu' for a worker per core",
                stacklevel=3,
            )
        if not is_gpu(device) and uses_gpu(self.environment):
            warnings.warn(
                f"JAX computes on a GPU, which {count} worker(s) for the CPU share: "
                "give devices='cuda' for a worker per GPU, or set JAX_PLATFORMS=cpu",
                stacklevel=3,
            )


def dry_run(
    executor: Executor, workers: Sequence[int], context: RunContext, config: Mapping[str, Any]
) -> DryRun:
    """Try a configuration on the first worker while the others import the model's libraries.

    A lost worker is replaced. The first problem ends the dry run; then no worker is ready.
    """
    tried = DryRun()
    losses = 0
    pending = {worker: CheckTask(config, build_only=worker != workers[0]) for worker in workers}
    for worker, task in pending.items():
        executor.submit(worker, task)
    while pending:
        for event in executor.wait(None):
            if not isinstance(event, Event):  # nothing else matters before training
                continue
            given = pending.pop(event.worker, None)
            if isinstance(event, CheckDone):
                tried.workers.append(event.worker)
                tried.state_bytes = max(tried.state_bytes, event.state_bytes)
                tried.environment = event.environment or tried.environment
                tried.warned += event.warned
                # A configuration that does not work at all fails only its trial.
                if event.error is None and event.problems:
                    tried.problems = event.problems
                    return tried
                continue
            context.check_files()
            losses += 1
            if given is None:  # it had finished its task
                tried.workers.remove(event.worker)
            worker = executor.replace(event.worker)
            if losses > MAX_START_LOSSES:  # the trial reports it, and only that trial fails
                tried.workers.append(worker)
                continue
            pending[worker] = given or CheckTask(config, build_only=True)
            executor.submit(worker, pending[worker])
    tried.workers.sort()
    return tried

"""Make the hop check on the workers of a run, before training begins; see `cerebro.check`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cerebro.arguments import find_stacklevel
from cerebro.data.validation import UnfitDataError
from cerebro.errors import InputError, StateError, WorkerError, text_of
from cerebro.executors.base import Executor
from cerebro.machine.devices import is_gpu
from cerebro.machine.environment import uses_gpu
from cerebro.model import Words
from cerebro.report.findings import Finding
from cerebro.run.records import Ranking, TrialRecord
from cerebro.searchers.metrics import known_mode
from cerebro.worker.hop_check import LAYOUT_CURE
from cerebro.worker.messages import CheckDone, CheckTask, Event, RunContext, Warned, WorkerJoined
from cerebro.worker.read_names import ReadNames

MAX_START_LOSSES = 2
"""How many workers may die while they try the first configuration."""


@dataclass
class HopCheck:
    """The outcome of a hop check on the workers of a run."""

    workers: list[int] = field(default_factory=list)  # ready to train
    # As in `CheckDone`:
    problems: Sequence[str] = ()
    state_bytes: int = 0
    environment: Mapping[str, Any] | None = None
    metrics: tuple[str, ...] | None = None  # None: they are not known before training
    read: ReadNames | None = None
    words: Words = field(default_factory=Words)
    parameter_order: str = ""
    warned: list[Warned] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    gain: tuple[float, float] | None = None

    def add(self, event: CheckDone) -> None:
        """Add what a worker has found, which is ready now."""
        if event.error is not None and event.unfit:  # for every model of this `build`
            raise UnfitDataError(event.error)
        self.workers.append(event.worker)
        model = event.model
        self.state_bytes = max(self.state_bytes, model.state_bytes)
        self.environment = event.environment or self.environment
        self.parameter_order = model.parameter_order or self.parameter_order
        self.warned += event.warned
        self.findings += event.findings
        self.gain = event.gain or self.gain
        if model.state_bytes:
            self.metrics = model.metrics if model.declares_metrics else None
            self.words, self.read = model.words, event.read
        if event.error is None:
            self.problems = event.problems
        elif model.state_bytes:  # it trains, so no trial fails
            message = f"the model trains, but the check of a hop failed: {event.error}"
            cure = (
                "see whether cerebro.replay gives the same states for the first trial that finishes"
            )
            self.findings.append(Finding("unchecked-hop", message, cure))
        # Else the configuration cannot be trained at all, which fails only its own trial.

    def findings_to_show(self) -> list[Finding]:
        """Return the findings that a search shows, without those that PyTorch warns about."""
        torch_warns = any(warning.text.startswith("Using a target size") for warning in self.warned)
        shown = [finding for finding in self.findings if finding.matters]
        return [finding for finding in shown if not (torch_warns and finding.code == "broadcast")]

    def raise_if_broken(self) -> None:
        """Raise StateError if a hop would lose parts of a model's state."""
        if not self.problems:
            return
        text = "; ".join(self.problems)
        if LAYOUT_CURE not in text:  # which names its own cure
            text += f" ({self.words.keep})"
        raise StateError(f"the model's state does not survive a hop: {text}")

    def warn_if_misplaced(self, device: str) -> None:
        """Warn if the workers do not compute on `device`, to which they were assigned."""
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


def find_wrong_ranking(by: Ranking) -> list[Finding]:
    """Return a finding if the mode ranks the worst trials of a well-known metric first."""
    usual = known_mode(by.metric)
    if usual in (None, by.mode):
        return []
    size = "largest" if by.mode == "max" else "smallest"
    message = f"mode={by.mode!r} ranks trials with the {size} {by.metric!r} first"
    return [Finding("wrong-mode", message, f"give mode={usual!r}, or leave mode out")]


def check_hop(
    executor: Executor, workers: Sequence[int], context: RunContext, config: Mapping[str, Any]
) -> HopCheck:
    """Try a configuration on the first worker while the others import the model's libraries.

    A worker that joins meanwhile imports them too. A lost worker is replaced; if that is
    impossible, another one takes over its check. The first problem ends the hop check. Raise
    InputError if the model reads validation columns that do not fit the training data, and
    WorkerError if no worker is left.
    """
    tried = HopCheck()
    unchecked: CheckTask | None = None
    losses = 0
    pending: dict[int, CheckTask] = {}

    def submit(worker: int, task: CheckTask) -> None:
        pending[worker] = task
        executor.submit(worker, task)

    for worker in workers:
        submit(worker, CheckTask(config, build_only=worker != workers[0]))
    while pending:
        for event in executor.wait(None):
            if isinstance(event, WorkerJoined):
                submit(event.worker, CheckTask(config, build_only=True))
            if not isinstance(event, Event):
                continue
            task = pending.pop(event.worker, None)
            if isinstance(event, CheckDone):
                tried.add(event)
                if tried.problems:
                    return tried
                if unchecked is not None:
                    submit(tried.workers.pop(), unchecked)
                    unchecked = None
                continue
            context.check_files()
            losses += 1
            if task is None:  # the worker had finished its task
                tried.workers.remove(event.worker)
            new = _replace(executor, event.worker, others=bool(tried.workers or pending))
            if new is None:
                if task is not None and not task.build_only:
                    if tried.workers:
                        submit(tried.workers.pop(0), task)
                    else:
                        unchecked = task
                continue
            if losses > MAX_START_LOSSES:  # the trial will report this; only that trial fails
                tried.workers.append(new)
                continue
            submit(new, task or CheckTask(config, build_only=True))
    tried.workers.sort()
    return tried


def _replace(executor: Executor, worker: int, *, others: bool) -> int | None:
    """Replace a lost worker; if that fails, warn and return None if there are others."""
    try:
        return executor.replace(worker)
    except WorkerError as error:
        if not others:
            raise
        text = f"a worker process is missing from now on: {text_of(error)}"
        warnings.warn(text, stacklevel=3)
        return None


def warn_if_reordered(executor: Executor, worker: int, first: TrialRecord, order: str) -> None:
    """Warn if ``build`` makes the parameters in another order than when the run began.

    This is for a run that is resumed in the user's process, whose hash seed is its own.
    """
    executor.submit(worker, CheckTask(first.config, build_only=True, number=first.number))
    (event,) = executor.wait(None)
    if isinstance(event, CheckDone) and event.model.parameter_order not in ("", order):
        warnings.warn(
            "build makes the network's parameters in another order than when the run began, as "
            "from a set. States are loaded by name, but what is computed in this order differs "
            "from now on, such as sums over layers and the first weights of trials: sort the set, "
            "or train in workers, which all have one PYTHONHASHSEED",
            stacklevel=find_stacklevel(),
        )


def require_build(
    executor: Executor, workers: Sequence[int], context: RunContext, trials: Iterable[TrialRecord]
) -> list[int]:
    """Build models of trials until one can be built; return the ready workers or raise."""
    ready, cause = list(workers), None
    for record in trials:
        task = CheckTask(record.config, build_only=True, number=record.number)
        error = _build_on_first(executor, ready, context, task)
        if error is None:
            break
        cause = cause or error
    else:
        if cause is not None:
            raise InputError(
                f"build fails for finished trials that are to be trained further ({cause}): pass "
                "the run's own build; the run is unchanged"
            )
    return sorted(ready)


def _build_on_first(
    executor: Executor, ready: list[int], context: RunContext, task: CheckTask
) -> str | None:
    """Let the first of the `ready` workers build a model; return why it fails, or None.

    Lost workers are replaced in `ready`, and new ones are added. If the first one is lost, return
    None: its trial will report this.
    """
    first, pending, error = ready[0], True, None
    executor.submit(first, task)
    while pending:
        for event in executor.wait(None):
            if isinstance(event, CheckDone):
                pending, error = False, event.error
            elif isinstance(event, WorkerJoined):
                ready.append(event.worker)
            elif isinstance(event, Event):
                context.check_files()
                pending = pending and event.worker != first
                ready.remove(event.worker)
                new = _replace(executor, event.worker, others=bool(ready))
                ready += [] if new is None else [new]
    return error

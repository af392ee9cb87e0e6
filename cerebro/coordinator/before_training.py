"""Check before training that models survive a hop, and that their states fit on the disk."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cerebro.arguments import warn_user
from cerebro.data.validation import UnfitDataError
from cerebro.errors import InputError, StateError, WorkerError, text_of
from cerebro.executors.base import Executor
from cerebro.machine.devices import is_gpu
from cerebro.machine.disk import Disk
from cerebro.machine.environment import uses_gpu
from cerebro.report.findings import Finding
from cerebro.run.records import Ranking, TrialRecord
from cerebro.run.settings import Settings
from cerebro.searchers.base import Searcher, expected_trials
from cerebro.searchers.metrics import known_mode
from cerebro.worker.hop_check import LAYOUT_CURE
from cerebro.worker.messages import (
    CheckDone,
    CheckTask,
    Event,
    ModelFacts,
    RunContext,
    Warned,
    WorkerJoined,
)
from cerebro.worker.read_names import ReadNames

MAX_START_LOSSES = 2  # how many workers may die while they try the first configuration

TAIL = 3
"""The live trials per worker near the end of a run, when the last ones run in parallel."""


@dataclass
class HopCheck:
    """The outcome of a hop check on the workers of a run."""

    workers: list[int] = field(default_factory=list)  # ready to train
    starting: list[int] = field(default_factory=list)  # ready with the answer to their task
    # As in `CheckDone`:
    problems: Sequence[str] = ()
    model: ModelFacts = field(default_factory=ModelFacts)
    environment: Mapping[str, Any] | None = None
    read: ReadNames | None = None
    warned: list[Warned] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    gain: tuple[float, float] | None = None

    def add(self, event: CheckDone) -> None:
        """Add what a worker has found, which is ready now."""
        if event.error is not None and event.unfit:  # for every model of this `build`
            raise UnfitDataError(event.error)
        self.workers.append(event.worker)
        # Most is known of a model that has trained, more of one that was built than of none.
        is_built = event.model.parameter_order != ""
        if event.model.state_bytes or (is_built and not self.model.state_bytes):
            self.model = event.model
        self.environment = event.environment or self.environment
        self.read = event.read or self.read
        self.warned += event.warned
        self.findings += event.findings
        self.gain = event.gain or self.gain
        if event.error is None:
            self.problems = event.problems
        elif event.model.state_bytes:  # it trains, so no trial fails
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
            text += f" ({self.model.words.keep})"
        raise StateError(f"the model's state does not survive a hop: {text}")

    def warn_if_misplaced(self, device: str) -> None:
        """Warn if the workers do not compute on `device`, to which they were assigned."""
        if self.environment is None or is_gpu(device) == uses_gpu(self.environment):
            return
        count = len(self.workers) + len(self.starting)
        if is_gpu(device):
            text = (
                f"the model computes on the CPU, but {count} worker(s) have a GPU each: put it on "
                "info.device, or give devices='cpu' for a worker per core"
            )
        else:
            text = (
                f"JAX computes on a GPU, which {count} worker(s) for the CPU share: "
                "give devices='cuda' for a worker per GPU, or set JAX_PLATFORMS=cpu"
            )
        warnings.warn(text, stacklevel=3)


def find_wrong_ranking(by: Ranking) -> list[Finding]:
    """Return a finding if the mode ranks the worst trials of a well-known metric first."""
    usual = known_mode(by.metric)
    if usual in (None, by.mode):
        return []
    size = "largest" if by.mode == "max" else "smallest"
    message = f"mode={by.mode!r} ranks trials with the {size} {by.metric!r} first"
    return [Finding("wrong-mode", message, f"give mode={usual!r}, or leave mode out")]


def check_hop(
    executor: Executor,
    workers: Sequence[int],
    context: RunContext,
    config: Mapping[str, Any],
    *,
    wait_for_all: bool = False,
) -> HopCheck:
    """Try a configuration on the first worker while the others import the model's libraries.

    Unless `wait_for_all`, return when it has passed, while others may still be starting
    (`HopCheck.starting`). Lost workers are replaced; if that fails, another worker takes over the
    check. The first problem ends the hop check. Raise InputError if the data does not fit the
    model, and WorkerError if no worker is left.
    """
    tried = HopCheck()
    unchecked: CheckTask | None = None
    has_passed = False
    losses = 0
    pending: dict[int, CheckTask] = {}

    def submit(worker: int, task: CheckTask) -> None:
        pending[worker] = task
        executor.submit(worker, task)

    for worker in workers:
        submit(worker, CheckTask(config, build_only=worker != workers[0]))
    while pending and (wait_for_all or not has_passed):
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
                # If it failed, what the others have built tells more of the model.
                has_passed |= task is not None and not task.build_only and event.error is None
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
    tried.starting = sorted(pending)
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
    """Warn if ``build`` makes parameters in another order here, with this process's hash seed."""
    executor.submit(worker, CheckTask(first.config, build_only=True, number=first.number))
    (event,) = executor.wait(None)
    if isinstance(event, CheckDone) and event.model.parameter_order not in ("", order):
        warn_user(
            "build makes the network's parameters in another order than when the run began, as "
            "from a set. States are loaded by name, but what is computed in this order differs "
            "from now on, such as sums over layers and the first weights of trials: sort the set, "
            "or train in workers, which all have one PYTHONHASHSEED"
        )


def require_build(
    executor: Executor, workers: Sequence[int], context: RunContext, trials: Iterable[TrialRecord]
) -> list[int]:
    """Build models of trials until one can be built; return the ready workers or raise."""
    ready, errors = list(workers), []
    for record in trials:
        task = CheckTask(record.config, build_only=True, number=record.number)
        error = _build_on_first(executor, ready, context, task)
        if error is None:
            return sorted(ready)
        errors.append(error)
    if errors:
        raise InputError(
            f"build fails for finished trials that are to be trained further ({errors[0]}): pass "
            "the run's own build; the run is unchanged"
        )
    return sorted(ready)


def _build_on_first(
    executor: Executor, ready: list[int], context: RunContext, task: CheckTask
) -> str | None:
    """Let the first of the `ready` workers build a model; return why it fails, or None.

    `ready` is kept up to date. If the first one is lost, return None: its trial will report this.
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


@dataclass(frozen=True)
class Demand:
    """The least and the likely number of bytes that a run needs in one folder."""

    least: int
    likely: int

    def __add__(self, other: Demand) -> Demand:
        return Demand(self.least + other.least, self.likely + other.likely)


@dataclass(frozen=True)
class StateDemand:
    """What determines how much space a run needs for states.

    At most `live` trials have their two slots in ``state_dir`` at the same time. `trials` is None
    if only the time limit ends the search. `may_end_early`: before their last epoch.
    """

    state_bytes: int
    trials: int | None
    live: int
    workers: int
    epochs: int
    keep: str
    may_end_early: bool

    def estimate_slots(self) -> Demand:
        least = min(self.workers, self.trials or self.workers)
        return Demand(2 * least * self.state_bytes, 2 * max(least, self.live) * self.state_bytes)

    def estimate_kept(self) -> Demand:
        """Return the demand of kept states and of states in flight."""
        trials, each = self.trials or 1, self.state_bytes
        epochs = 1 if self.may_end_early else self.epochs
        least = {"all": epochs, "best": 1, "last": 1}[self.keep]
        likely = {"all": self.epochs, "best": min(2, self.epochs), "last": 1}[self.keep]
        return Demand((trials * least + 1) * each, (trials * likely + 2 * self.workers) * each)


@dataclass(frozen=True)
class _Place:
    """A folder, its demand, its demand with ``keep="last"``, and how to get more space."""

    folder: Path
    needs: Demand
    thrifty: Demand
    cure: str


def check_room(settings: Settings, searcher: Searcher, state_bytes: int, disk: Disk) -> None:
    """Raise InputError if a run's states cannot fit on the disk; warn if they might not."""
    plan = _estimate_demand(settings, searcher, state_bytes)
    states, slots = settings.folder / "states", settings.state_dir
    thrifty = replace(plan, keep="last").estimate_kept()
    # If both folders are on one disk, their demands add up, and either fix helps.
    kept, of_slots = plan.estimate_kept(), plan.estimate_slots()
    places = [
        _Place(states, kept, thrifty, "choose a run= on a larger disk"),
        _Place(slots, of_slots, of_slots, "choose a larger state_dir="),
    ]
    if disk.device(states) == disk.device(slots):
        cure = "put the states of live trials elsewhere with state_dir=, or all with run="
        places = [_Place(states, kept + of_slots, thrifty + of_slots, cure)]
    for place in places:
        free = disk.free_bytes(place.folder)
        if place.needs.least > free:
            raise InputError(_explain_demand(plan, place, disk, free, is_certain=True))
        if place.needs.likely > free:
            warnings.warn(_explain_demand(plan, place, disk, free, is_certain=False), stacklevel=2)


def _estimate_demand(settings: Settings, searcher: Searcher, state_bytes: int) -> StateDemand:
    limits, strategy = settings.limits, settings.strategy
    expected = expected_trials(searcher, limits.n_trials)
    folds, workers = settings.trials_per_config, max(1, settings.workers)
    trials = None if expected is None else expected * folds
    live = min(trials or TAIL * workers * folds, TAIL * workers * folds)
    if searcher.adaptive:  # trials that it pauses keep their slots
        live = trials or strategy.width * folds
    may_end_early = searcher.adaptive or strategy.stop is not None
    return StateDemand(
        state_bytes, trials, live, workers, limits.epochs, settings.keep, may_end_early
    )


def _explain_demand(
    plan: StateDemand, place: _Place, disk: Disk, free: int, *, is_certain: bool
) -> str:
    if is_certain:
        verb, needed, thrifty = "needs at least", place.needs.least, place.thrifty.least
    else:
        verb, needed, thrifty = "is likely to need", place.needs.likely, place.thrifty.likely
    ends = "only the time limit ends the search"
    trials = ends if plan.trials is None else f"{plan.trials} trials"
    kind = " of memory, which is the disk there," if disk.is_memory(place.folder) else ""
    keep = ", keep fewer states with keep='last'" if thrifty < needed else ""
    return (
        f"the run {verb} {_format_megabytes(needed)} for states in {place.folder}, and only "
        f"{_format_megabytes(free)}{kind} are free: states of "
        f"{_format_megabytes(plan.state_bytes)}, {trials}, {plan.workers} worker(s), "
        f"keep={plan.keep!r}; free some{keep}, or {place.cure}"
    )


def _format_megabytes(count: int) -> str:
    value = count / 1e6
    return f"{value:,.0f} MB" if value >= 10 else f"{value:.1f} MB"

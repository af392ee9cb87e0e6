"""Implement `cerebro.replay` and `cerebro.refit`, which train a trial of a run again."""

from __future__ import annotations

import math
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from cerebro.api.search import search
from cerebro.arguments import check_whole_number, warn_user
from cerebro.errors import CorruptDataError, InputError, shorten_tracebacks
from cerebro.executors.local import LocalExecutor
from cerebro.machine import environment
from cerebro.machine.devices import Device, assign_devices, choose_resume_devices, name_in_worker
from cerebro.machine.guard import refuse
from cerebro.report.format import count_noun
from cerebro.results.result import Result, open_run
from cerebro.results.trial import Trial
from cerebro.run.records import TrialRecord, joint_hash
from cerebro.run.settings import Batches, Exactness
from cerebro.run.states import CloneOf, epoch_state_file
from cerebro.searchers.metrics import known_mode
from cerebro.space import choice
from cerebro.worker import messages

_OWN_SEED = (
    "the run was trained in the user's process (workers=0), in which Python had drawn a hash seed: "
    "results that depend on the order of a set cannot be repeated (sort the set, or start the "
    "script with PYTHONHASHSEED=0)"
)

_KEPT = [field.name for group in (Batches, Exactness) for field in fields(group)]
"""The settings of a run that affect a trial."""


@dataclass(frozen=True)
class ReplayedEpoch:
    """The state hash of one epoch, as recorded and as trained again: 32 hexadecimal digits."""

    epoch: int
    recorded: str
    replayed: str

    @property
    def identical(self) -> bool:
        """Whether both hashes are the same."""
        return self.recorded == self.replayed


@dataclass(frozen=True)
class Replay:
    """The outcome of `replay`; true if every epoch's state was the same, bit for bit.

    Attributes
    ----------
    trial
        The trial's number.
    epochs
        The epochs that were trained again, each with ``epoch``, ``recorded``, ``replayed`` and
        ``identical``.
    differences
        Known differences from the run: library versions, data, source.
    error
        Why the replay could not train the trial to its end, or None.
    first_epoch
        The number of the trial's first epoch; above 0 for a clone.
    folds
        For a trial with folds, the replays of the folds.
    """

    trial: int
    epochs: list[ReplayedEpoch]
    differences: list[str] = field(default_factory=list)
    error: str | None = None
    first_epoch: int = 0
    folds: list[Replay] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Whether every epoch's state hash equals the recorded one, in every fold."""
        same = all(epoch.identical for epoch in self.epochs)
        return self.error is None and same and all(fold.identical for fold in self.folds)

    @property
    def first_difference(self) -> int | None:
        """The number of the first epoch whose state differs, from 0; None if no state differs."""
        for epoch in self.epochs:
            if not epoch.identical:
                return epoch.epoch
        differences = [fold.first_difference for fold in self.folds if not fold.identical]
        if differences:
            return min(number for number in differences if number is not None)
        return None if self.error is None else self.first_epoch + len(self.epochs)

    def __bool__(self) -> bool:
        return self.identical

    def __str__(self) -> str:
        if self.identical:
            return (
                f"trial {self.trial}: {count_noun(len(self.epochs), 'epoch')} trained again, every "
                f"state identical{f' in {len(self.folds)} folds' if self.folds else ''}"
            )
        lines = [f"trial {self.trial}: differs from epoch {self.first_difference} on"]
        if self.error is not None:
            lines.append(f"it could not be trained to the end: {self.error}")
        return "\n".join(lines + [f"known difference: {text}" for text in self.differences])


@shorten_tracebacks
def replay(
    run: str | os.PathLike[str] | Result,
    trial: int | Trial,
    build: Callable[..., Any] | None = None,
    *,
    data: Any = None,
    epochs: int | None = None,
) -> Replay:
    """Train a trial of a run again, alone, in a new worker, and compare its states.

    No state of the run is reused, so before a clone its parent is trained up to the epoch from
    which the clone began. All folds of a trial are trained, one after the other; a trial from
    ``trial.folds`` is trained alone.

    Parameters
    ----------
    run
        The run's folder, or its result.
    trial
        The trial or its number.
    build
        The run's ``build``, if it cannot be imported again.
    data
        The run's training data or a dataset that contains it, or the path of one; given if the
        data has moved.
    epochs
        How many epochs of the trial to compare, not counting its parents'; default: all that the
        run has.

    Returns
    -------
    Replay
        ``identical``, ``first_difference`` and the hashes of every epoch that the trial finished,
        even if it failed later.

    Warns
    -----
    UserWarning
        Before training, for each known difference from the run: versions, CPU, GPU, threads, flags,
        variables, data, source of ``build``. The differences are also in ``differences``.

    Raises
    ------
    InputError
        If the run, the trial or ``build`` cannot be found, or if ``epochs`` is below 1.
    """
    refuse("cerebro.replay")
    result = run if isinstance(run, Result) else Result(run, build=build)
    record = _record_of(result, trial)
    asked = check_whole_number("epochs", epochs, 1, optional=True)
    devices = choose_resume_devices(result.settings["devices"])
    with tempfile.TemporaryDirectory(prefix="cerebro-replay-") as folder:
        context = result.saved.context(
            build,
            **result.saved.open_views(data),
            folders=messages.RunFolders(folder, folder, folder),
            verify=False,
            device=name_in_worker(devices),
        )
        retries = result.settings["max_retries"]
        with closing(Retraining(context, retries, assign_devices(devices, 1))) as retraining:
            now = retraining.environment(record.config)
            differences = list_known_differences(result, context, now)
            for text in differences:
                warn_user(f"{result.path} was trained differently: {text}")
            parts = [part for part in record.folds if part.epochs] or [record]
            replays = [_train_line(retraining, result, part, asked, differences) for part in parts]
    outcome = replays[0] if not record.folds else _combine_folds(record, replays)
    if not outcome.identical and environment.HASH_SEED not in result.environment["variables"]:
        differences.append(_OWN_SEED)
    return replace(outcome, differences=differences)


def _train_line(
    retraining: Retraining, result: Result, record: TrialRecord, asked: int | None, known: list[str]
) -> Replay:
    """Train a trial after its ancestors; add differences in the ancestors' states to `known`."""
    count = len(record.epochs) if asked is None else min(asked, len(record.epochs))
    line = [(record, count)]  # the oldest ancestor first, each with its own epochs to train
    while record.parent is not None and record.parent_epoch is not None:
        parent = result.saved.records[record.parent]
        line.insert(0, (parent, record.parent_epoch + 1 - parent.first_epoch))
        record = parent
    retraining.begin()
    *ancestors, last = [retraining.train(*member) for member in line]
    for ancestor in ancestors:
        if not ancestor.identical:
            known += [f"its parent: {text}" for text in str(ancestor).splitlines()]
    return last


def _compare_epochs(record: TrialRecord, hashes: Sequence[str]) -> list[ReplayedEpoch]:
    pairs = zip(record.epochs, hashes, strict=False)
    return [ReplayedEpoch(epoch.epoch, epoch.state_hash, replayed) for epoch, replayed in pairs]


def _combine_folds(record: TrialRecord, folds: list[Replay]) -> Replay:
    """Return the replay of a trial with folds; its hashes are the joint hashes of the folds."""
    count = min(len(fold.epochs) for fold in folds) if len(folds) == len(record.folds) else 0
    hashes = [joint_hash(fold.epochs[at].replayed for fold in folds) for at in range(count)]
    epochs = _compare_epochs(record, hashes)
    errors = (f"fold {f.trial % len(record.folds)}: {f.error}" for f in folds if f.error)
    return Replay(record.number, epochs, [], next(errors, None), record.first_epoch, folds)


def find_trial(result: Result, trial: int | Trial) -> Trial:
    """Return the trial with this number; raise InputError if the result does not have it."""
    number = trial.number if isinstance(trial, Trial) else check_whole_number("trial", trial, 0)
    if number < len(result.trials):
        return result.trials[number]
    raise InputError(f"{result.path} has no trial {number}: it has 0 to {len(result.trials) - 1}")


def _record_of(result: Result, trial: int | Trial) -> TrialRecord:
    if not isinstance(trial, Trial) or trial.fold is None:
        trial = find_trial(result, trial)
    record = trial.record
    if not any(part.epochs for part in (record, *record.folds)):
        cause = f" ({record.error})" if record.error else ""
        name = f"trial {record.number} of {result.path}"
        raise InputError(f"{name} has finished no epoch{cause}: nothing to replay")
    return record


def list_known_differences(
    result: Result, context: messages.RunContext, now: Mapping[str, Any] | None
) -> list[str]:
    """List the known differences from the run; `now` is the replaying worker's environment."""
    lines = [] if now is None else environment.list_differences(result.environment, now)
    recipe = result.saved.recipe
    source = type(recipe).from_build(context.build)
    if recipe.source_hash is not None and source.source_hash != recipe.source_hash:
        lines.append(f"the source of build ({recipe.name}) has changed")
    elif recipe.file_hash is not None and source.file_hash != recipe.file_hash:
        lines.append(f"{recipe.file}, which defines build, has changed")
    views = {"data": context.train, "validation": context.validation}
    for name, view in views.items():
        if view is None:
            continue
        if view.checksum != result.saved.meta[f"{name}_checksum"]:
            lines.append(f"{name} {view.path} is not the dataset that the run was trained on")
        for shard in range(view.num_shards):
            try:
                view.shards.verify(shard)
            except (CorruptDataError, OSError) as error:
                lines.append(str(error))
    return lines


class Retraining:
    """A new worker that trains a trial again from its beginning, after its ancestors."""

    def __init__(
        self, context: messages.RunContext, retries: int, seats: Sequence[Device | None] = ()
    ) -> None:
        self._context = context
        self._retries = retries
        self._executor = LocalExecutor(
            1, context.exactness.threads, fresh=True, seats=seats, fork=False
        )
        (self._worker,) = self._executor.start(context)
        self._dispatches = 0
        self._parent: CloneOf | None = None  # the final state of the last trial trained
        self._problem: str | None = None

    def environment(self, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the worker's environment once the model is built; None if the worker is lost."""
        self._executor.submit(self._worker, messages.CheckTask(config, build_only=True))
        (event,) = self._executor.wait()
        if isinstance(event, messages.CheckDone):
            return event.environment
        self._worker = self._executor.replace(self._worker)
        return None

    def begin(self) -> None:
        """Start a new lineage: the next trial is not a clone of the last one."""
        self._parent = self._problem = None

    def train(self, record: TrialRecord, count: int) -> Replay:
        """Train a trial; a clone begins with the final state of the trial trained before it."""
        hashes: list[str] = []
        units = self._context.units_per_epoch
        first = record.first_epoch * units
        last = first + count * units - 1
        for position in range(first, last + 1):
            if self._problem is not None:
                break
            event = self._run_unit(record, position, first, last)
            if not isinstance(event, messages.UnitDone):
                self._problem = getattr(event, "message", None) or getattr(event, "reason", "")
            elif event.metrics is not None:
                hashes.append(event.state.hash)
        if self._problem is None:
            file = epoch_state_file(record.number, record.first_epoch + count - 1)
            path = str(Path(self._context.folders.states, file))
            self._parent = CloneOf.of(record, path, hashes[-1])
        epochs = _compare_epochs(record, hashes)
        return Replay(record.number, epochs, [], self._problem, record.first_epoch)

    def _run_unit(
        self, record: TrialRecord, position: int, first: int, last: int
    ) -> messages.Event:
        context = self._context
        epoch, step = divmod(position, context.units_per_epoch)
        parts = [*context.order(record.number).visits(record.key, epoch), -1]  # -1: validation
        is_clone = position == first and record.parent is not None
        for _ in range(self._retries + 1):
            self._dispatches += 1
            task = messages.Task(
                trial=record.number,
                stream=record.stream,
                config=record.config,
                epoch=epoch,
                step=step,
                part=parts[step],
                attempt=0,
                position=position,
                epochs=record.info_epochs(position, context.limits.epochs),
                dispatch=self._dispatches,
                keep_state=position == last,  # a clone may begin with this state
                clone_of=self._parent if is_clone else None,
            )
            self._executor.submit(self._worker, task)
            (event,) = self._executor.wait()
            if not isinstance(event, messages.WorkerLost):
                break
            self._worker = self._executor.replace(self._worker)
        return event

    def close(self) -> None:
        self._executor.close(kill=True)


@shorten_tracebacks
def refit(
    run: str | os.PathLike[str] | Result,
    trial: int | Trial | None = None,
    *,
    epochs: int | None = None,
    data: Any = None,
    build: Callable[..., Any] | None = None,
    folder: str | os.PathLike[str] | None = None,
    if_exists: Literal["error", "resume", "new"] = "error",
    workers: int = 1,
    devices: Any = "auto",
    callbacks: Sequence[Any] = (),
    progress: Literal["auto", "table", "lines"] | bool = "auto",
) -> Result:
    """Train a configuration of a search once more, on all rows, to get a final model.

    After a search with folds, each fold has a model that has not seen all rows. `refit` trains the
    final model in an ordinary run of one trial without validation, with the search's seed, batch
    sizes and threads. `replay` and `resume` work on this run as on any other.

    Parameters
    ----------
    run
        The search: its folder or its result.
    trial
        The configuration, given as a trial or its number; default: the best.
    epochs
        Default: the number of epochs after which the trial had its selected metric (with folds, the
        best mean). ``info.epochs`` is this number, so a schedule over ``info.total_steps`` has the
        right length.
    data
        The rows to train on. Default: all rows of a search with folds. For other searches it is
        required: the dataset before it was split, for example.
    build
        The search's ``build``, if it cannot be imported again.
    folder
        The new run's folder; default: the search's folder with ``-refit`` appended.
    if_exists, workers, devices, callbacks, progress
        As for `cerebro.search`. One trial keeps only one worker busy.

    Returns
    -------
    Result
        The new run. ``result.best.load()`` returns the model after its last epoch. Its metric is
        the search's, measured in training; if the model reports that one only in validation, it is
        the loss or another metric that the model reports in training.

    Raises
    ------
    InputError
        If there is no such trial, if it has not finished an epoch, or if `data` is missing.
    RunError
        If the trial failed.
    """
    refuse("cerebro.refit")
    searched = open_run(run, build=build)
    if isinstance(trial, Trial) and trial.fold is not None:
        raise InputError("trial must be a configuration, not one of its folds")
    the_trial = searched.best if trial is None else find_trial(searched, trial)
    if data is None:
        if searched.saved.folds() is None:
            raise InputError(
                f"{searched.path}: without folds, the run's rows are those that trial "
                f"{the_trial.number} was already trained on: give data=, such as the dataset "
                "before it was split"
            )
        data = searched.saved.dataset("data")
    if epochs is None:
        last = the_trial.best_epoch if searched.select == "best" else the_trial.epoch - 1
        if last is None or last < 0:
            raise InputError(f"trial {the_trial.number} has finished no epoch: give epochs=")
        epochs = last + 1
    settings = searched.settings
    metric, mode = _ranking_of(the_trial, searched.metric, searched.mode)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no validation data", UserWarning)
        return search(
            searched.saved.find_build(build),
            {name: choice([value]) for name, value in the_trial.config.items()},
            data,
            epochs=epochs,
            n_trials=1,
            metric=metric,
            mode=mode,
            select="last",
            keep="last",
            run=f"{searched.path}-refit" if folder is None else folder,
            background=False,
            if_exists=if_exists,
            workers=workers,
            devices=devices,
            callbacks=callbacks,
            progress=progress,
            **{name: settings[name] for name in _KEPT},
        )


def _ranking_of(trial: Trial, metric: str, mode: str) -> tuple[str, Any]:
    """Return a metric that the model reports in training, the search's if possible, and its mode.

    `search` refuses a metric that the model does not report; `Result.best` needs a finite one.
    """
    metrics = trial.metrics
    trained = [name for name in metrics if math.isfinite(metrics.get(f"train_{name}", math.nan))]
    short = metric.removeprefix("val_").removeprefix("train_")
    if short in trained:
        return short, mode
    # With folds, there are also standard deviations, which a run without folds lacks. Their names
    # come after those of their metrics.
    other = "loss" if "loss" in trained else min(trained, default=short)
    return other, known_mode(other) or mode

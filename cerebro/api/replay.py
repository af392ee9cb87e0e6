"""`cerebro.replay`: train a trial again, alone, and compare its states bit for bit."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cerebro._core as _core
from cerebro.arguments import whole_number
from cerebro.data import Dataset
from cerebro.errors import CorruptDataError, InputError
from cerebro.executors.local import LocalExecutor
from cerebro.machine import environment
from cerebro.machine.devices import Device, here, in_worker, recorded, seats
from cerebro.machine.files import path_of
from cerebro.machine.guard import refuse
from cerebro.report.format import counted
from cerebro.results.result import Result
from cerebro.results.trial import Trial
from cerebro.run.records import TrialRecord, joint_hash
from cerebro.run.states import CloneOf, epoch_state_file
from cerebro.worker.messages import (
    CheckDone,
    CheckTask,
    Event,
    RunContext,
    Task,
    UnitDone,
    WorkerLost,
)


@dataclass(frozen=True)
class ReplayedEpoch:
    """One epoch's state hash as recorded and as trained again: 32 hexadecimal digits each."""

    epoch: int
    recorded: str
    replayed: str

    @property
    def identical(self) -> bool:
        """Whether both hashes are the same."""
        return self.recorded == self.replayed


@dataclass(frozen=True)
class Replay:
    """What `replay` found; true if every epoch's state was the same, bit for bit.

    Attributes
    ----------
    trial
        The trial's number.
    epochs
        The epochs trained again: ``epoch``, ``recorded``, ``replayed`` and ``identical`` of each.
    differences
        What is known to be other than in the run: library versions, data, source.
    error
        Why the trial could not be trained to the end again, or None.
    first_epoch
        The trial's first; a clone's counts on from its parent's.
    folds
        Of a trial with folds: those of its folds.
    """

    trial: int
    epochs: list[ReplayedEpoch]
    differences: list[str] = field(default_factory=list)
    error: str | None = None
    first_epoch: int = 0
    folds: list[Replay] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Whether every epoch's state hash is the recorded one, in every fold."""
        same = all(epoch.identical for epoch in self.epochs)
        return self.error is None and same and all(fold.identical for fold in self.folds)

    @property
    def first_difference(self) -> int | None:
        """Number of the first epoch whose state differs, from 0; None if none does."""
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
                f"trial {self.trial}: {counted(len(self.epochs), 'epoch')} trained again, every "
                f"state identical{f' in {len(self.folds)} folds' if self.folds else ''}"
            )
        lines = [f"trial {self.trial}: differs from epoch {self.first_difference} on"]
        if self.error is not None:
            lines.append(f"it could not be trained to the end: {self.error}")
        return "\n".join(lines + [f"known difference: {text}" for text in self.differences])


def replay(
    run: str | os.PathLike[str] | Result,
    trial: int | Trial,
    build: Callable[..., Any] | None = None,
    *,
    data: Any = None,
    epochs: int | None = None,
) -> Replay:
    """Train a trial of a run again, alone, in a fresh worker, and compare.

    For a clone the trial that it was cloned from is trained first, up to the epoch that the
    clone began after: nothing but the run's record is taken for granted. Of a trial with folds
    all are trained, one after the other; of one of ``trial.folds`` only that one.

    Parameters
    ----------
    run
        The run's folder, or its result.
    trial
        The trial or its number.
    build
        The run's ``build``, where it cannot be imported again.
    data
        The run's training data, or a data set that they are part of, where it has been
        moved; a path will do.
    epochs
        How many epochs of the trial's own to train; default: all that the run has.

    Returns
    -------
    Replay
        ``identical``, ``first_difference`` and the hashes of every epoch that the trial has
        finished, whatever became of it later.

    Warns
    -----
    UserWarning
        Before anything is trained, for each known difference to the run: versions, CPU,
        GPU, threads, flags, variables, data, source of ``build``; also in ``differences``.

    Raises
    ------
    InputError
        If the run, the trial or ``build`` cannot be found, or ``epochs`` is below 1.
    """
    refuse("cerebro.replay")
    result = run if isinstance(run, Result) else Result(run, build=build)
    record = _record_of(result, trial)
    asked = whole_number("epochs", epochs, 1, optional=True)
    devices = here(recorded(result.settings))
    if data is not None and not isinstance(data, Dataset):
        data = Dataset(path_of("data", data))
    with tempfile.TemporaryDirectory(prefix="cerebro-replay-") as folder:
        train = result.saved.view("data", data)
        context = result.saved.context(
            build,
            train=train,
            folds=result.saved.folds_of(train),
            validation=result.saved.view("validation", data),
            state_dir=folder,
            epoch_dir=folder,
            log_dir=folder,
            verify=False,
            device=in_worker(devices),
        )
        retries = result.settings.get("max_retries", 0)
        with closing(Retraining(context, retries, seats(devices, 1))) as retraining:
            now = retraining.environment(record.config)
            known = known_differences(result, context, now)
            for text in known:
                warnings.warn(f"{result.path} was trained differently: {text}", stacklevel=2)
            parts = [part for part in record.folds if part.epochs] or [record]
            found = [_train_line(retraining, result, part, asked, known) for part in parts]
    one = found[0] if not record.folds else _together(record, found)
    return replace(one, differences=known)


def _train_line(
    retraining: Retraining,
    result: Result,
    record: TrialRecord,
    asked: int | None,
    known: list[str],
) -> Replay:
    """Train a trial after its ancestors; what these come to adds to what is `known`."""
    wanted = len(record.epochs) if asked is None else min(asked, len(record.epochs))
    retraining.begin()
    line = lineage(result.saved.records, record.number, wanted)
    *ancestors, found = [retraining.train(*member) for member in line]
    for ancestor in ancestors:
        if not ancestor.identical:
            known += [f"its parent: {text}" for text in str(ancestor).splitlines()]
    return found


def _together(record: TrialRecord, folds: list[Replay]) -> Replay:
    """What the replays of its folds are for a trial: its hashes stand for theirs."""
    count = min(len(fold.epochs) for fold in folds) if len(folds) == len(record.folds) else 0
    epochs = [
        ReplayedEpoch(
            recorded.epoch,
            recorded.state_hash,
            joint_hash(fold.epochs[at].replayed for fold in folds),
        )
        for at, recorded in enumerate(record.epochs[:count])
    ]
    errors = [
        f"fold {fold.trial % len(record.folds)}: {fold.error}" for fold in folds if fold.error
    ]
    error = errors[0] if errors else None
    return Replay(record.number, epochs, [], error, record.first_epoch, folds)


def lineage(
    records: Sequence[TrialRecord], number: int, epochs: int
) -> list[tuple[TrialRecord, int]]:
    """Return what has to be trained for a trial: its ancestors, the eldest first, and itself.

    Each with how many epochs of its own.
    """
    record = records[number]
    wanted = [(record, epochs)]
    while record.parent is not None and record.parent_epoch is not None:
        parent = records[record.parent]
        wanted.insert(0, (parent, record.parent_epoch + 1 - parent.first_epoch))
        record = parent
    return wanted


def _record_of(result: Result, trial: int | Trial) -> TrialRecord:
    if isinstance(trial, Trial) and trial.fold is not None:
        record = trial.record
        number: int | None = trial.number
    else:
        number = trial.number if isinstance(trial, Trial) else whole_number("trial", trial, 0)
        record = _by_number(result, number)
    if not any(part.epochs for part in (record, *record.folds)):
        cause = f" ({record.error})" if record.error else ""
        raise InputError(
            f"trial {number} of {result.path} has finished no epoch{cause}: nothing to replay"
        )
    return record


def _by_number(result: Result, number: int | None) -> TrialRecord:
    if number is None or number >= len(result.trials):
        raise InputError(
            f"{result.path} has no trial {number}: it has 0 to {len(result.trials) - 1}"
        )
    return result.trials[number].record


def known_differences(
    result: Result, context: RunContext, now: Mapping[str, Any] | None
) -> list[str]:
    """Say what is other than in the run before anything is trained.

    `now` describes what the replaying worker computes with, see `cerebro.machine.environment`.
    """
    lines = [] if now is None else environment.differences(result.environment, now)
    recipe = result.saved.recipe
    source = type(recipe).of(context.build)
    if recipe.source_hash is not None and source.source_hash != recipe.source_hash:
        lines.append(f"the source of build ({recipe.name}) has changed")
    elif recipe.file_hash is not None and source.file_hash != recipe.file_hash:
        lines.append(f"{recipe.file}, which defines build, has changed")
    views = {"data": context.train, "validation": context.validation}
    for name, view in views.items():
        if view is None:
            continue
        if view.checksum != result.saved.meta[f"{name}_checksum"]:
            lines.append(f"{name} {view.path} is not the data set that the run was trained on")
        for shard in range(view.num_shards):
            try:
                view._verify_shard(shard)
            except (CorruptDataError, OSError) as error:
                lines.append(str(error))
    return lines


class Retraining:
    """A fresh worker that trains a trial again from its beginning, after its ancestors.

    Parameters
    ----------
    context
        The run, with folders of its own for states and logs.
    retries
        Times that a unit is tried again after the worker died, as in the run.
    seats
        Where the worker sits, see `cerebro.executors.local.LocalExecutor`.
    """

    def __init__(
        self, context: RunContext, retries: int, seats: Sequence[Device | None] = ()
    ) -> None:
        self._context = context
        self._retries = retries
        self._executor = LocalExecutor(1, context.threads, fresh=True, seats=seats)
        (self._worker,) = self._executor.start(context)
        self._dispatches = 0
        self._parent: CloneOf | None = None  # the state that the trial trained last has come to
        self._problem: str | None = None

    def environment(self, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """What the worker computes with once the model is built; None if it is lost."""
        self._executor.submit(self._worker, CheckTask(config, build_only=True))
        (event,) = self._executor.wait()
        if isinstance(event, CheckDone):
            return event.environment
        self._worker = self._executor.replace(self._worker)
        return None

    def begin(self) -> None:
        """Note that the next trial is not a clone of the last one."""
        self._parent = self._problem = None

    def train(self, record: TrialRecord, epochs: int) -> Replay:
        """Train a trial; a clone begins with what the trial before has come to."""
        hashes: list[str] = []
        units = self._context.units_per_epoch
        first = record.first_epoch * units
        last = first + epochs * units - 1
        for position in range(first, last + 1):
            if self._problem is not None:
                break
            event = self._run_unit(record, position, first, last)
            if not isinstance(event, UnitDone):
                self._problem = getattr(event, "message", None) or getattr(event, "reason", "")
            elif event.state_hash is not None:
                hashes.append(event.state_hash)
        if self._problem is None:
            file = epoch_state_file(record.number, record.first_epoch + epochs - 1)
            self._parent = CloneOf(str(Path(self._context.epoch_dir, file)), hashes[-1])
        epochs_found = [
            ReplayedEpoch(recorded.epoch, recorded.state_hash, state_hash)
            for recorded, state_hash in zip(record.epochs, hashes, strict=False)
        ]
        return Replay(record.number, epochs_found, [], self._problem, record.first_epoch)

    def _run_unit(self, record: TrialRecord, position: int, first: int, last: int) -> Event:
        for _ in range(self._retries + 1):
            task = self._task(record, position)
            if position == first and record.parent is not None:
                task = replace(task, clone_of=self._parent)
            if position == last:  # a clone begins with this state
                task = replace(task, keep_state=True)
            self._executor.submit(self._worker, task)
            (event,) = self._executor.wait()
            if not isinstance(event, WorkerLost):
                break
            self._worker = self._executor.replace(self._worker)
        return event

    def _task(self, record: TrialRecord, position: int) -> Task:
        context = self._context
        shards = context.train.num_shards
        epoch, step = divmod(position, context.units_per_epoch)
        order = _core.visit_order(record.number, epoch, shards, stagger=context.stagger)
        self._dispatches += 1
        return Task(
            trial=record.number,
            config=record.config,
            epoch=epoch,
            step=step,
            shard=order[step] if step < shards else -1,
            attempt=0,
            position=position,
            epochs=record.info_epochs(position, context.epochs),
            dispatch=self._dispatches,
            keep_state=False,
        )

    def close(self) -> None:
        """End the worker."""
        self._executor.close(kill=True)

"""Restores a run after the process that trained it has ended.

The truth about a trial is its newest state that is whole: in its slots, where the
seal confirms it, or in the file of a finished epoch. The store's rows are a report
that may lag behind, because they are written by another thread than trains. So for
every trial that goes on:

1. Epochs that are over, but whose rows were lost with the coordinator, are found
   again: in files whose hash is the one in their name, or in the slots, if they
   stand exactly at the epoch's end. A state holds the epoch's metric sums, so the
   row can be written as it would have been.
2. The trial goes on from its slots if they are beyond the last such epoch, and less
   than an epoch beyond it: with an epoch missing between, its row would be lost. Nor
   are they beyond what is wanted of it: then the store has lost that.
3. Else it goes on from the state of its last epoch, or from the beginning.

Slots that are taken over move to new files. A worker of the old process that is still
about, because it was stopped in the middle of a write, then writes where nobody reads.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cerebro._core as _core
from cerebro.coordinator.trial import LiveTrial
from cerebro.errors import CorruptDataError
from cerebro.machine.files import open_plain, read_bytes
from cerebro.results.saved_run import SavedRun
from cerebro.run.folder import Opened, claim_state_dir, make_folders
from cerebro.run.owner import Owner
from cerebro.run.records import EpochRecord, TrialRecord
from cerebro.run.settings import Settings
from cerebro.run.states import (
    KeptFile,
    KeptState,
    epoch_state_file,
    kept_files,
    remove_slots,
    slots_stem,
    trials_with_slots,
    unpublished,
)
from cerebro.run.store import (
    Answers,
    Store,
    count_said,
    read_answers,
    read_clock,
    read_unit_seconds,
    reader,
)
from cerebro.worker.epoch_progress import EpochProgress
from cerebro.worker.messages import RunContext


@dataclass
class Standing:
    """Where a trial goes on."""

    position: int
    """Units that are committed."""
    attempt: int = 0
    """The number of its next dispatch: above all that its slots have seen."""
    origin: KeptState | None = None
    """The file to begin with, where the slots do not hold the state."""
    lost: list[EpochRecord] = field(default_factory=list)
    """Epochs that are over and have no row."""
    epoch_seconds: float = 0.0
    """What the epoch in progress has taken so far."""


@dataclass
class Restored:
    """All that a coordinator needs to go on with a run."""

    seconds: float
    """Where the run's clock stands."""
    loop: dict[str, Any] | None
    """What the search loop noted beside the searcher's state."""
    answers: dict[int, Answers]
    """What the searcher has said, by trial,"""
    said: int = 0
    """and how many answers and suggestions that are."""
    partly: bool = False
    """Whether others may be left that do not go on."""
    trials: list[LiveTrial] = field(default_factory=list)
    """By number; those that go on are waiting, at their positions."""
    lost: dict[int, list[EpochRecord]] = field(default_factory=dict)
    """Epochs that are over and have no row, by trial."""


@dataclass
class _Slots:
    """A whole state, found in a trial's slots."""

    position: int
    attempt: int
    packed: _core.StateBuffer
    progress: EpochProgress


class Restorer:
    """Finds out where trials stand; see the module's text.

    Parameters
    ----------
    epoch_dir, state_dir
        Where kept states and slots are.
    units_per_epoch
        Of every trial.
    units
        Seconds of the recorded units of epochs without a row, by trial, epoch and step.
    """

    def __init__(
        self,
        epoch_dir: Path,
        state_dir: Path,
        units_per_epoch: int,
        units: Mapping[tuple[int, int, int], float],
    ) -> None:
        self.units_per_epoch = self._per_epoch = units_per_epoch
        self._epoch_dir = epoch_dir
        self._state_dir = state_dir
        self._files = kept_files(epoch_dir)
        self._with_slots = trials_with_slots(state_dir)
        self._seconds: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        for (trial, epoch, step), seconds in units.items():
            self._seconds[trial, epoch][step] = seconds

    def stand(self, record: TrialRecord, reported: int | None = None) -> Standing:
        """Find the position that a trial resumes from, and delete the files it does not need.

        Epochs whose states are gone are removed from `record`: they are trained again.

        Parameters
        ----------
        reported
            The last epoch that was reported to an adaptive searcher; None if the searcher is
            not adaptive.
        """
        slots, attempt = self._read_slots(record.number)
        lost: list[EpochRecord] = []
        if reported is not None and self._drop_from_gap(record, reported):
            slots = None  # what is further than the gap is trained again, too
        else:
            lost = self._lost_epochs(record, slots)
        start = (record.done + len(lost)) * self._per_epoch
        end = min(start + self._per_epoch, record.target_epochs * self._per_epoch + 1)
        if slots is not None and start <= slots.position < end:
            self._move_slots(record.number, slots)
            standing = Standing(slots.position, attempt, None, lost)
        else:
            remove_slots(self._state_dir, record.number)
            standing = self._from_kept_state(record, attempt, lost)
        epoch, step = divmod(standing.position, self._per_epoch)
        seconds = self._seconds[record.number, epoch]
        standing.epoch_seconds = sum(s for at, s in seconds.items() if at < step)
        self.clear(record, standing.lost, slots=False)
        return standing

    def clear(
        self, record: TrialRecord, lost: Iterable[EpochRecord] = (), *, slots: bool = True
    ) -> None:
        """Delete files of a trial that no row names, and its slots if it has ended."""
        named = {epoch.state_file for epoch in record.epochs}
        named |= {unpublished(_file_of(epoch), epoch.state_hash) for epoch in lost}
        for file in self._files.pop(record.number, ()):
            if file.path.name not in named:
                file.path.unlink(missing_ok=True)
        if slots and record.number in self._with_slots:
            remove_slots(self._state_dir, record.number)

    def clear_unknown(self, known: int) -> None:
        """Delete files of trials whose rows were lost: their numbers are given anew.

        The searcher will suggest them again, but need not say the same if it was not
        deterministic.
        """
        for trial in [number for number in self._files if number >= known]:
            for file in self._files.pop(trial):
                file.path.unlink(missing_ok=True)
        for trial in [number for number in self._with_slots if number >= known]:
            remove_slots(self._state_dir, trial)

    def _drop_from_gap(self, record: TrialRecord, reported: int) -> bool:
        """Remove the epochs from the first whose state is gone, though a clone may need it.

        A clone begins with the last reported epoch, or with a later one once that is reported.
        Their states are deleted only after the store has later reports, so one is missing only
        where the store itself went back: its log was damaged. Return whether any were removed.
        """
        needed = max(min(reported, record.done - 1), record.first_epoch)
        for at, epoch in enumerate(record.epochs):
            file = epoch.state_file
            if epoch.epoch >= needed and not (file and (self._epoch_dir / file).exists()):
                del record.epochs[at:]
                return True
        return False

    # --- slots -----------------------------------------------------------

    def _read_slots(self, trial: int) -> tuple[_Slots | None, int]:
        """Return what the slots hold, if it is whole, and the next number for a dispatch."""
        stem = slots_stem(self._state_dir, trial)
        for suffix in (".moving.a", ".moving.slots"):
            Path(f"{stem}{suffix}").unlink(missing_ok=True)
        try:
            slots = _core.Slots(stem, False)
        except (OSError, CorruptDataError):
            return None, 0
        with contextlib.closing(slots):
            attempt = slots.attempt() + 1
            slots.fence(attempt)  # a worker that is not dead yet commits no more
            found = slots.sealed()
        if found is None:
            return None, attempt
        position, of_attempt, packed = found
        progress = EpochProgress.of_packed(packed)
        if position != progress.epoch * self._per_epoch + progress.step + 1:
            return None, attempt
        return _Slots(position, of_attempt, packed, progress), attempt

    def _move_slots(self, trial: int, slots: _Slots) -> None:
        """Put the state into files of its own, which nobody else has open.

        Killed at any moment, the old files or the new ones stand: until the page is
        replaced, the new ``.a`` holds the same state or one that the old page's seal
        does not fit.
        """
        stem = slots_stem(self._state_dir, trial)
        moving = f"{stem}.moving"
        with contextlib.closing(_core.Slots(moving, True)) as fresh:
            fresh.put(slots.packed, attempt=slots.attempt)
            fresh.commit(slots.position)
        for suffix in (".a", ".slots"):
            Path(moving + suffix).replace(f"{stem}{suffix}")
        Path(f"{stem}.b").unlink(missing_ok=True)

    # --- kept states -----------------------------------------------------

    def _from_kept_state(
        self, record: TrialRecord, attempt: int, lost: list[EpochRecord]
    ) -> Standing:
        """Go on from the last state that is in a file, or from the beginning."""
        if lost:
            position = (record.done + len(lost)) * self._per_epoch
            return Standing(position, attempt, self._kept(lost[-1]), lost)
        while record.epochs:
            last = record.epochs[-1]
            if last.state_file is not None and (self._epoch_dir / last.state_file).exists():
                return Standing(record.done * self._per_epoch, attempt, self._kept(last), lost)
            record.epochs.pop()
        return Standing(record.first_epoch * self._per_epoch, attempt, None, lost)

    def _kept(self, epoch: EpochRecord) -> KeptState:
        return KeptState(str(self._epoch_dir / _file_of(epoch)), epoch.state_hash)

    # --- epochs without a row --------------------------------------------

    def _lost_epochs(self, record: TrialRecord, slots: _Slots | None) -> list[EpochRecord]:
        """Find the epochs after the last recorded one, as far as each has a whole state.

        Each has a file afterwards, under the name that it has until it is published.
        """
        found: list[EpochRecord] = []
        files = self._files.get(record.number, [])
        for number in range(record.done, record.target_epochs):
            epoch = self._from_slots(record, number, slots)
            for file in files:
                if epoch is None and file.epoch == number:
                    epoch = self._from_file(file)
            if epoch is None:
                break
            found.append(epoch)
        return found

    def _from_slots(
        self, record: TrialRecord, epoch: int, slots: _Slots | None
    ) -> EpochRecord | None:
        """The epoch, if the slots stand exactly at its end."""
        if slots is None or slots.position != (epoch + 1) * self._per_epoch:
            return None
        state_hash = _core.hash_state(slots.packed)
        found = self._record(record.number, epoch, slots.progress, state_hash)
        path = self._epoch_dir / unpublished(_file_of(found), state_hash)
        path.unlink(missing_ok=True)  # its worker may have been killed writing it
        fd = open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with open(fd, "wb") as file:  # noqa: PTH123
            file.write(slots.packed)
        return found

    def _from_file(self, file: KeptFile) -> EpochRecord | None:
        """The epoch, if the file is whole.

        A file that has its final name was synced before it was renamed. Its row comes
        later, and until then it goes back to the name that has its hash.
        """
        try:
            packed = read_bytes(file.path)
            progress = EpochProgress.of_packed(packed)
        except (OSError, CorruptDataError):
            return None
        state_hash = _core.hash_state(packed)
        at = progress.epoch, progress.step
        if file.state_hash not in (None, state_hash) or at != (file.epoch, self._per_epoch - 1):
            return None
        epoch = self._record(file.trial, file.epoch, progress, state_hash)
        file.path.replace(self._epoch_dir / unpublished(_file_of(epoch), state_hash))
        return epoch

    def _record(
        self, trial: int, epoch: int, progress: EpochProgress, state_hash: str
    ) -> EpochRecord:
        return EpochRecord(
            epoch=epoch,
            metrics=progress.epoch_metrics(),
            seconds=sum(self._seconds[trial, epoch].values()),
            state_hash=state_hash,
            state_file=epoch_state_file(trial, epoch),
        )


def _file_of(epoch: EpochRecord) -> str:
    assert epoch.state_file is not None
    return epoch.state_file


@dataclass(frozen=True)
class Wish:
    """What is to be trained of a run."""

    epochs: int | None = None
    """Until so many epochs are done; None: as before."""
    trials: tuple[int, ...] | None = None
    """Only these; None: whatever is not over."""

    trials_each: int = 1
    """How many of the store's trials make one that is named here."""

    def includes(self, record: TrialRecord) -> bool:
        """Whether a trial goes on."""
        further = self.epochs is not None and self.epochs > record.done
        if self.trials is not None:
            return record.number // self.trials_each in self.trials and (
                record.status != "finished" or further
            )
        if record.status == "finished":
            return further
        return record.is_open


@dataclass(frozen=True)
class Previous:
    """A run as an earlier process left it, which this process is to resume."""

    saved: SavedRun
    owner: Owner
    wish: Wish
    differences: Sequence[str]
    """Differences between this environment and the one that the run began in."""


def open_again(
    previous: Previous, settings: Settings, context: RunContext
) -> tuple[Opened, Restored]:
    """Open the store for writing and find the position of every trial."""
    saved, owner = previous.saved, previous.owner
    run_id = saved.meta.get("id") or uuid.uuid4().hex
    make_folders(settings)
    claim_state_dir(settings, run_id)
    store = Store.open(saved.folder)
    try:
        restored = restore(saved, store, context, previous.wish)
        process = owner.process
        text = f"by {process}, with {settings.workers} workers"
        with store.group():
            store.add_event(restored.seconds, "resumed", "; ".join([text, *previous.differences]))
            for key, value in (
                ("id", run_id),
                ("status", "running"),
                ("error", None),
                ("paused", False),
                ("owner", {"pid": process.pid, "host": process.host}),
                ("settings", settings.record()),
            ):
                store.set_meta(key, value)
        store.flush()
    except BaseException:
        store.close()
        raise
    return Opened(owner, store), restored


def restore(saved: SavedRun, store: Store, context: RunContext, wish: Wish) -> Restored:
    """Bring all trials back: those that go on with their positions, the others at rest."""
    with reader(saved.folder) as connection:
        clock = read_clock(connection)
        restorer = Restorer(
            Path(context.epoch_dir),
            Path(context.state_dir),
            context.units_per_epoch,
            read_unit_seconds(connection),
        )
        restored = Restored(
            seconds=clock,
            loop=saved.meta.get("search_loop"),
            answers=read_answers(connection),
            partly=wish.trials is not None and not _has_suggested_all(saved),
            said=count_said(connection),
        )
    before = saved.settings["epochs"]
    restorer.clear_unknown(len(saved.records))
    with store.group():
        for record in saved.records:
            if (wish.trials is None and record.is_open) or wish.includes(record):
                answer = restored.answers.get(record.number // wish.trials_each, Answers())
                reported = answer.reported if restored.answers else None
                trial, lost = _reopen(record, store, restorer, wish, before, reported)
                restored.lost[record.number] = lost
            else:
                trial = _rest(record, store, restorer)
                if context.epochs != before:
                    _remember_epochs(record, store, before)
            restored.trials.append(trial)
    saved.forget_trials()
    return restored


def _has_suggested_all(saved: SavedRun) -> bool:
    """Whether the searcher of the run has nothing more to suggest."""
    loop = saved.meta.get("search_loop") or {}
    return saved.meta["status"] == "finished" or bool(loop.get("is_exhausted"))


def _reopen(
    record: TrialRecord,
    store: Store,
    restorer: Restorer,
    wish: Wish,
    before: int,
    reported: int | None,
) -> tuple[LiveTrial, list[EpochRecord]]:
    """Let a trial go on; return it and its epochs that have lost their rows."""
    if wish.epochs is not None and wish.epochs > record.target_epochs:
        record.target_epochs = wish.epochs
        store.set_epochs(record.number, wish.epochs)
    recorded = {epoch.epoch: epoch.state_hash for epoch in record.epochs}
    standing = restorer.stand(record, reported)
    info_epochs = record.info_epochs(standing.position, before)
    if wish.epochs is not None and wish.epochs != info_epochs:
        _remember_epochs(record, store, before)
        info_epochs = wish.epochs
        record.extensions += ((standing.position, info_epochs),)
        store.add_extension(record.number, standing.position, info_epochs)
    # A rule that had stopped it begins anew: somebody wants it to go on.
    anew = record.status == "stopped" and not record.resumable
    record.status, record.resumable = "waiting", False
    record.error = record.traceback = None
    store.set_status(record.number, "waiting")
    trial = LiveTrial(
        record,
        position=standing.position,
        first_position=record.first_epoch * restorer.units_per_epoch,
        dispatches=standing.attempt,
        epoch_seconds=standing.epoch_seconds,
        origin=standing.origin,
        info_epochs=info_epochs,
        expected={e: h for e, h in recorded.items() if e >= record.done},
        history=[] if anew else [epoch.to_history() for epoch in record.epochs],
    )
    return trial, standing.lost


def _remember_epochs(record: TrialRecord, store: Store, epochs: int) -> None:
    """Write down what ``info.epochs`` has been so far, because the run's number changes."""
    if not record.extensions:
        record.extensions = ((0, epochs),)
        store.add_extension(record.number, 0, epochs)


def _rest(record: TrialRecord, store: Store, restorer: Restorer) -> LiveTrial:
    """Leave a trial as it is; one that is not over can go on another time."""
    if record.is_open:
        record.status, record.resumable = "stopped", True
        store.set_status(record.number, "stopped", resumable=True)
    else:
        restorer.clear(record)
    # One that was stopped early may still stand for its last metrics: the rule is asked again.
    stopped = record.status == "stopped"
    return LiveTrial(record, history=[e.to_history() for e in record.epochs] if stopped else [])

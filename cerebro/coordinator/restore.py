"""Restore a run after the process that trained it has ended.

A trial continues from its newest complete state, either in its slots, if their seal confirms it, or
in the file of a finished epoch. The store's rows may be older than the states, because a separate
thread writes them. So for every trial that continues:

1. Finished epochs whose rows were lost with the coordinator are recovered from files whose content
matches the hash in their name, and from slots at exactly the end of the epoch. A state contains the
epoch's metric sums, so the row can be written as before.
2. The trial continues from its slots if they are less than one epoch past the last such epoch (else
the row of an epoch in between would be lost), and not past its target epochs (else the store has
lost a higher target).
3. Otherwise it continues from the state of its last epoch, or from its beginning.

The slots that are used are moved to new files: a worker of the old process that was stopped in the
middle of a write may later write to the old ones, which no process reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cerebro._core as _core
from cerebro.control import VERBS, Command
from cerebro.coordinator.trial import LiveTrial
from cerebro.errors import CorruptDataError
from cerebro.machine.disk import Disk
from cerebro.machine.local import Machine
from cerebro.report import format as fmt
from cerebro.results.saved_run import SavedRun
from cerebro.run import states
from cerebro.run.folder import OwnedRun, claim_state_dir, make_folders
from cerebro.run.owner import Owner
from cerebro.run.records import NOTHING_RAISED, ActionRecord, EpochRecord, TrialRecord
from cerebro.run.settings import Settings
from cerebro.run.store import (
    LastDecision,
    Store,
    count_rows,
    read_actions,
    read_clock,
    read_last_decisions,
    read_unit_seconds,
    reader,
)
from cerebro.worker.messages import RunContext
from cerebro.worker.trial_state import EpochProgress

UNSEEN = 1024
"""More dispatches than an earlier process can have sent that its trial's slots have not seen."""

DISPATCHES = 1 << 20
"""More dispatches of a trial than a process sends, of which no slots may be left."""
COUNTED = 4000
"""The number of processes, one after the other, whose dispatches fit into the slots' 32 bits."""


@dataclass
class ResumePoint:
    position: int  # the number of committed units
    attempt: int  # the number of the next dispatch, higher than any that the slots have seen
    origin: states.KeptState | None  # the state to load, if it is not in the slots
    lost: list[EpochRecord]  # their rows are missing in the store
    epoch_seconds: float  # of the epoch in progress


@dataclass
class RestoredRun:
    """The state of a run from which a coordinator resumes it."""

    seconds: float  # on the run's clock
    first_dispatch: int
    """The lowest number of a dispatch, for new trials, too: a worker of an earlier process may have
    yet to begin a unit that it was sent, and its number must be lower."""
    loop: dict[str, Any] | None  # the search loop's own state
    decisions: dict[int, LastDecision]  # the searcher's last decision for each trial
    decision_count: int = 0  # including suggestions
    partly: bool = False  # whether open trials that are not resumed may remain
    actions: Sequence[ActionRecord] = ()  # what the user has asked of earlier processes
    requests: Sequence[Command] = ()  # what the user asks with this resumption
    paused: Sequence[int] = ()  # open trials that the user has paused; with folds, configurations
    trials: list[LiveTrial] = field(default_factory=list)  # by number
    lost: dict[int, list[EpochRecord]] = field(default_factory=dict)
    """By trial: finished epochs whose rows are missing in the store."""


@dataclass
class _Slots:
    """A complete state that was found in a trial's slots."""

    position: int
    packed: _core.StateBuffer
    progress: EpochProgress


class Restorer:
    """Finds the position from which each trial continues.

    `units` has the seconds of recorded units whose epoch has no row, by trial, epoch and step.
    """

    def __init__(
        self,
        epoch_dir: Path,
        state_dir: Path,
        units_per_epoch: int,
        units: Mapping[tuple[int, int, int], float],
        disk: Disk,
    ) -> None:
        self._disk = disk
        self._per_epoch = units_per_epoch
        self._epoch_dir = epoch_dir
        self._state_dir = state_dir
        self._files = states.find_kept_files(epoch_dir, disk)
        self._with_slots = states.trials_with_slots(state_dir, disk)
        self._units = units

    def resume_point(self, record: TrialRecord, reported: int | None = None) -> ResumePoint:
        """Find where a trial continues, and delete the files that it does not need.

        Epochs whose states are missing are removed from `record`, and trained again. `reported` is
        the last epoch reported to an adaptive searcher, or None.
        """
        slots, attempt = self._read_slots(record.number)
        lost: list[EpochRecord] = []
        origin: states.KeptState | None = None
        if reported is not None and self._drop_from_gap(record, reported):
            slots = None  # everything after the missing state is trained again
        else:
            lost = self._find_lost_epochs(record, slots)
        start = (record.done + len(lost)) * self._per_epoch
        end = min(start + self._per_epoch, record.target_epochs * self._per_epoch + 1)
        if slots is not None and start <= slots.position < end:
            position, packed = slots.position, slots.packed
            number, disk = record.number, self._disk
            states.move_slots(
                self._state_dir, number, packed, position, attempt=attempt - 1, disk=disk
            )
        else:
            states.remove_slots(self._state_dir, record.number, self._disk)
            while not lost and record.epochs and not self._has_state(record.epochs[-1]):
                record.epochs.pop()
            epochs = [*record.epochs, *lost]
            position = (record.first_epoch + len(epochs)) * self._per_epoch
            origin = self._kept_state_of(epochs[-1]) if epochs else None
        epoch, steps = divmod(position, self._per_epoch)
        seconds = self._sum_seconds(record.number, epoch, steps)
        self.clear(record, lost, slots=False)
        return ResumePoint(position, attempt, origin, lost, seconds)

    def clear(
        self, record: TrialRecord, lost: Iterable[EpochRecord] = (), *, slots: bool = True
    ) -> None:
        """Delete the trial's files that no row names; with `slots`, also its slots."""
        named = {epoch.state_file for epoch in record.epochs}
        named |= {states.unpublished_name(_file_of(epoch), epoch.state_hash) for epoch in lost}
        for file in self._files.pop(record.number, ()):
            if file.path.name not in named:
                self._disk.remove(file.path)
        if slots and record.number in self._with_slots:
            states.remove_slots(self._state_dir, record.number, self._disk)

    def clear_unknown(self, known: int) -> None:
        """Delete the files of trials whose rows were lost: their numbers go to new trials."""
        for trial in [number for number in self._files if number >= known]:
            for file in self._files.pop(trial):
                self._disk.remove(file.path)
        for trial in [number for number in self._with_slots if number >= known]:
            states.remove_slots(self._state_dir, trial, self._disk)

    def _drop_from_gap(self, record: TrialRecord, reported: int) -> bool:
        """Remove the epochs from the first whose state is missing although a clone may need it.

        Return whether there was one. A clone begins with the last reported epoch or a later one,
        and a state is deleted only after the store has later reports. So it is missing only if the
        store has lost its last rows because its log was damaged.
        """
        needed = max(min(reported, record.done - 1), record.first_epoch)
        for at, epoch in enumerate(record.epochs):
            if epoch.epoch >= needed and not self._has_state(epoch):
                del record.epochs[at:]
                return True
        return False

    def _read_slots(self, trial: int) -> tuple[_Slots | None, int]:
        """Return the state in the slots, if it is complete, and the number of the next dispatch."""
        states.finish_move(self._state_dir, trial, self._disk)
        try:
            stem = states.slots_stem(self._state_dir, trial)
            slots = self._disk.open_slots(stem, create=False)
        except (OSError, CorruptDataError):
            return None, 0
        with contextlib.closing(slots):
            # A worker that is still alive can no longer commit, nor begin a unit that it was sent.
            attempt = slots.attempt() + UNSEEN
            slots.fence(attempt)
            sealed = slots.sealed()
        if sealed is None:
            return None, attempt
        position, _, packed = sealed
        progress = EpochProgress.from_packed(packed)
        if position != progress.epoch * self._per_epoch + progress.step + 1:
            return None, attempt
        return _Slots(position, packed, progress), attempt

    def _has_state(self, epoch: EpochRecord) -> bool:
        file = epoch.state_file
        return file is not None and self._disk.exists(self._epoch_dir / file)

    def _kept_state_of(self, epoch: EpochRecord) -> states.KeptState:
        return states.KeptState(str(self._epoch_dir / _file_of(epoch)), epoch.state_hash)

    def _find_lost_epochs(self, record: TrialRecord, slots: _Slots | None) -> list[EpochRecord]:
        """Find the epochs after the last recorded one that have a complete state, in a file now."""
        epochs: list[EpochRecord] = []
        for number in range(record.done, record.target_epochs):
            epoch = self._read_epoch_in_slots(record, number, slots)
            for file in self._files.get(record.number, ()):
                if epoch is None and file.epoch == number:
                    epoch = self._read_epoch_in_file(file)
            if epoch is None:
                break
            epochs.append(epoch)
        return epochs

    def _read_epoch_in_slots(
        self, record: TrialRecord, epoch: int, slots: _Slots | None
    ) -> EpochRecord | None:
        """Return the epoch if the slots' position is exactly the end of the epoch."""
        if slots is None or slots.position != (epoch + 1) * self._per_epoch:
            return None
        state_hash = _core.hash_state(slots.packed)
        lost = self._make_record(record.number, epoch, slots.progress, state_hash)
        file = _file_of(lost)
        states.write_unpublished(self._epoch_dir, file, state_hash, slots.packed, self._disk)
        return lost

    def _read_epoch_in_file(self, file: states.StateFile) -> EpochRecord | None:
        """Return the epoch if its file is complete, and give the file its unpublished name."""
        try:
            packed = self._disk.read(file.path)
            progress = EpochProgress.from_packed(packed)
        except (OSError, CorruptDataError):
            return None
        state_hash = _core.hash_state(packed)
        at = progress.epoch, progress.step
        if file.state_hash not in (None, state_hash) or at != (file.epoch, self._per_epoch - 1):
            return None
        epoch = self._make_record(file.trial, progress.epoch, progress, state_hash)
        unpublished = states.unpublished_name(_file_of(epoch), state_hash)
        # If a sync of it has failed, a second one would succeed without the data.
        self._disk.write_over(file.path, packed)
        self._disk.rename(file.path, self._epoch_dir / unpublished)
        return epoch

    def _make_record(
        self, trial: int, epoch: int, progress: EpochProgress, state_hash: str
    ) -> EpochRecord:
        seconds = self._sum_seconds(trial, epoch, self._per_epoch)
        file = states.epoch_state_file(trial, epoch)
        return EpochRecord(epoch, progress.epoch_metrics(), seconds, state_hash, file)

    def _sum_seconds(self, trial: int, epoch: int, steps: int) -> float:
        """Return how long the first units of an epoch took."""
        return sum(self._units.get((trial, epoch, step), 0.0) for step in range(steps))


def _file_of(epoch: EpochRecord) -> str:
    assert epoch.state_file is not None
    return epoch.state_file


@dataclass(frozen=True)
class ResumeRequest:
    """The trials of a run to resume, and their target epochs."""

    epochs: int | None = None  # None: as before
    trials: tuple[int, ...] | None = None  # their numbers; None: all that are open
    trials_per_config: int = 1  # how many of the store's trials, its folds, each of these has
    actions: tuple[Command, ...] = ()  # requests about trials, to carry out first
    more: bool = False  # whether the searcher has more to suggest, even if the run is finished

    def includes(self, record: TrialRecord) -> bool:
        further = self.epochs is not None and self.epochs > record.done
        if self.trials is None:
            return further if record.status == "finished" else record.is_open
        is_named = record.number // self.trials_per_config in self.trials
        return is_named and (record.status != "finished" or further)


@dataclass(frozen=True)
class Previous:
    """A run as an earlier process left it, for this process to resume."""

    saved: SavedRun
    owner: Owner
    request: ResumeRequest
    differences: Sequence[str]  # of this environment from the one in which the run began

    def find_trials_to_extend(self) -> Iterator[TrialRecord]:
        for record in self.saved.records:
            if record.status == "finished" and self.request.includes(record):
                yield record


def reopen_run(
    previous: Previous, settings: Settings, context: RunContext, machine: Machine
) -> tuple[OwnedRun, RestoredRun]:
    saved, owner, disk = previous.saved, previous.owner, machine.disk
    make_folders(settings.folder, settings.state_dir, disk)
    claim_state_dir(settings.state_dir, settings.folder, saved.meta["id"], disk)
    store = Store.open(saved.folder, machine)
    try:
        restored = restore(saved, store, context, previous.request)
        process = owner.process
        text = f"by {process}, with {fmt.count_noun(settings.workers, 'worker')}"
        now = {"status": "running", "error": None, "paused": False, "settings": settings.record()}
        now["owner"] = {"pid": process.pid, "host": process.host}
        now |= saved.new_places({"data": settings.train, "validation": settings.validation})
        with store.group():
            store.add_event(restored.seconds, "resumed", "; ".join([text, *previous.differences]))
            for item in now.items():
                store.set_meta(*item)
        store.flush()  # the result reads it
    except BaseException:
        store.close()
        raise
    return OwnedRun(owner, store), restored


def restore(
    saved: SavedRun, store: Store, context: RunContext, request: ResumeRequest
) -> RestoredRun:
    """Restore all trials: resumed ones at their positions, the others unchanged."""
    loop, epoch_dir = saved.meta.get("search_loop"), Path(context.folders.states)
    all_begun = saved.meta["status"] == "finished" or (loop or {}).get("is_exhausted")
    with reader(saved.folder, store.disk) as connection:
        units, slots = read_unit_seconds(connection), Path(context.folders.slots)
        restorer = Restorer(epoch_dir, slots, context.units_per_epoch, units, store.disk)
        resumptions = count_rows(connection, "events", "kind = 'resumed'")
        restored = RestoredRun(
            seconds=read_clock(connection),
            first_dispatch=DISPATCHES * min(resumptions + 1, COUNTED),
            loop=loop,
            decisions=read_last_decisions(connection),
            partly=request.trials is not None and not all_begun,
            decision_count=count_rows(connection, "decisions"),
            actions=read_actions(connection),
            requests=request.actions,
        )
    if request.trials is None:  # else the user names those that go on
        restored.paused = find_paused(restored.actions)
    before = saved.settings["epochs"]
    is_over = has_decided_all(saved)
    restorer.clear_unknown(len(saved.records))
    states.remove_temporary(epoch_dir, store.disk)
    with store.group():
        for record in saved.records:
            if request.includes(record):
                number = record.number // request.trials_per_config
                last = restored.decisions.get(number, LastDecision())
                # The user trains further what the searcher has paused: names it, or named it before
                # an interruption. It was at its target, which has been raised since.
                was_named = is_over and record.target_epochs > last.reported + 1
                is_released = last.paused and (request.trials is not None or was_named)
                # A trial that failed before its rung: the searcher no longer waits for it there.
                failed = restored.decisions and request.trials is not None and not record.is_open
                if is_released or failed:
                    _raise_target(record, store, before)
                if is_released:
                    restored.decisions[number] = replace(last, paused=False)
                # No clone will begin any more, so no state is kept for one.
                is_compared = restored.decisions and not is_over and record.origin == "searcher"
                reported = last.reported if is_compared else None
                trial, lost = _reopen(record, store, restorer, request, before, reported)
                restored.lost[record.number] = lost
            else:
                trial = _leave_unchanged(record, store, restorer)
                if context.limits.epochs != before:
                    _remember_epochs(record, store, before)
            restored.trials.append(trial)
    saved.forget_trials()
    return restored


def find_paused(actions: Sequence[ActionRecord]) -> list[int]:
    """Return the trials on which the user's last action was to pause them."""
    last = {a.trial: a.verb for a in actions if a.is_done and a.verb in VERBS}
    return sorted(n for n, verb in last.items() if n is not None and verb == "pause")


def has_decided_all(saved: SavedRun) -> bool:
    """Return whether the run's adaptive searcher has nothing left to suggest or to decide."""
    if saved.meta["status"] == "finished":
        return True
    loop, n_trials = saved.meta.get("search_loop") or {}, saved.settings["n_trials"]
    if not loop.get("is_exhausted") or "due" not in loop or loop["due"] or loop["next"]:
        return False
    return n_trials is None or loop["fresh"] >= n_trials  # else n_trials was increased


def _reopen(
    record: TrialRecord,
    store: Store,
    restorer: Restorer,
    request: ResumeRequest,
    before: int,
    reported: int | None,
) -> tuple[LiveTrial, list[EpochRecord]]:
    """Resume a trial; return it and the finished epochs whose rows are missing in the store."""
    _raise_target(record, store, request.epochs)
    recorded = {epoch.epoch: epoch.state_hash for epoch in record.epochs}
    point = restorer.resume_point(record, reported)
    epochs = request.epochs
    if epochs is not None and epochs != record.info_epochs(point.position, before):
        _remember_epochs(record, store, before)
        record.extensions += ((point.position, epochs),)
        store.add_extension(record.number, point.position, epochs)
    # The user wants the trial to continue, so the rule that stopped it starts again.
    anew = record.status == "stopped" and not record.resumable
    record.status, record.resumable = "waiting", False
    record.error = record.traceback = record.ended = None
    _store_status(store, record)
    trial = LiveTrial(
        record,
        position=point.position,
        dispatches=point.attempt,
        epoch_seconds=point.epoch_seconds,
        origin=point.origin,
        expected={e: h for e, h in recorded.items() if e >= record.done},
        history=[] if anew else [epoch.to_history() for epoch in record.epochs],
    )
    return trial, point.lost


def _store_status(store: Store, record: TrialRecord) -> None:
    """Record a trial's status, without what an earlier process raised."""
    store.set_status(replace(record, error=None, traceback=None, raised=NOTHING_RAISED))


def _raise_target(record: TrialRecord, store: Store, epochs: int | None) -> None:
    """Let a trial train until `epochs` epochs are done, unless it already trains as far."""
    if epochs is not None and epochs > record.target_epochs:
        record.target_epochs = epochs
        store.set_epochs(record.number, epochs)


def _remember_epochs(record: TrialRecord, store: Store, epochs: int) -> None:
    """Record the value of ``info.epochs`` so far, before the run's number of epochs changes."""
    if not record.extensions:
        record.extensions = ((0, epochs),)
        store.add_extension(record.number, 0, epochs)


def _leave_unchanged(record: TrialRecord, store: Store, restorer: Restorer) -> LiveTrial:
    """Leave a trial unchanged; an open trial can be resumed later."""
    if record.is_open:
        record.status, record.resumable = "stopped", True
        _store_status(store, record)
    else:
        restorer.clear(record)
    # The rule also needs trials that were stopped early, because it compares other trials with
    # their metrics.
    stopped = record.status == "stopped"
    return LiveTrial(record, history=[e.to_history() for e in record.epochs] if stopped else [])

"""Add, pause, resume, clone and end the trials of a run.

Every change of a trial's status is made here, so that its record, its row in the store, the
scheduler, its files and the callbacks always agree. `TrialTable` keeps the trials by number, and
`KeptStates` decides which of their states stay on disk.

A run of 100,000 trials must not keep all of them in memory. Ended trials that are no longer needed
are forgotten: the store has them, and `EndedTrials` has the status of each.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Generic, TypeVar

import cerebro._core as _core
from cerebro.coordinator.failures import ALIKE_FAILURES
from cerebro.coordinator.overview import EndedTrials, Overview
from cerebro.coordinator.trial import LiveTrial, OfUser
from cerebro.errors import InputError, StateError
from cerebro.run.records import (
    ENDED,
    NOTHING_RAISED,
    OUTSIDE,
    EpochRecord,
    Raised,
    Status,
    TrialRecord,
)
from cerebro.run.settings import Settings
from cerebro.run.states import CloneOf, KeptState, remove_slots, unpublished_name
from cerebro.run.store import LastDecision, Store, decode, encode, read_trials, reader
from cerebro.searchers.base import Suggestion
from cerebro.worker.log import log_path
from cerebro.worker.messages import RunContext, RunFolders

TrialKind = TypeVar("TrialKind", bound=LiveTrial)


class TrialTable(ABC, Generic[TrialKind]):
    """Trials by number, and the number of forgotten trials by status; subclasses add to `ended`."""

    def __init__(self, ended: EndedTrials) -> None:
        self.by_number: dict[int, TrialKind] = {}
        """All trials that are not forgotten; always includes the first `ALIKE_FAILURES` trials."""
        self.forgotten: Counter[str] = Counter()
        self.ended = ended
        self._over: dict[int, None] = {}  # an ordered set: ended, perhaps not needed

    @abstractmethod
    def end(self, trial: LiveTrial, status: Status) -> None:
        """End a trial permanently."""

    @abstractmethod
    def _read(self, number: int) -> TrialKind:
        """Read a forgotten trial from the store."""

    def _open_trials_of(self, trial: TrialKind) -> list[LiveTrial]:
        """Return the open trials of an entry: itself, or the folds of a configuration."""
        return [trial]

    def __len__(self) -> int:
        return len(self.by_number) + self.forgotten.total()

    def status_of(self, number: Any) -> Status | None:
        """Return the status of a trial, forgotten or not; None if `number` is not a trial's."""
        trial = self.by_number.get(number)
        if trial is not None:
            return trial.record.status
        return self.ended.status_of(int(number)) if isinstance(number, Integral) else None

    def find_open(self, number: int, what: str) -> tuple[TrialKind, list[LiveTrial]]:
        """Return an open trial and those that are trained for it, or raise InputError."""
        trial, status = self.by_number.get(number), self.status_of(number)
        if status is None:
            raise InputError(f"there is no trial {number}: it cannot be {what}")
        if trial is None or status in ENDED:
            raise InputError(f"trial {number} is {status}: it cannot be {what}")
        return trial, self._open_trials_of(trial)

    def recall(self, number: int) -> TrialKind | None:
        """Return a trial, from the store if it was forgotten; None if there is no such trial."""
        if number not in self.by_number and self.status_of(number) is not None:
            trial = self.by_number[number] = self._read(number)
            # The trial was forgotten after the searcher had received all its reports.
            trial.reported = trial.record.done - 1
            self.forgotten[trial.record.status] -= 1
            self._over[number] = None
        return self.by_number.get(number)

    def end_paused(self) -> None:
        """End the trials that the searcher has paused and will not resume."""
        for trial in self.by_number.values():
            if trial.paused_by_searcher and trial.record.status not in ENDED:
                self.end(trial, "stopped")

    def _forget_unused(
        self, is_awaited: Callable[[int], bool], is_needed: Callable[[int], bool]
    ) -> list[TrialKind]:
        """Forget ended trials that are not needed; look again at those that are awaited."""
        unused = []
        for number in [n for n in self._over if not is_awaited(n)]:
            del self._over[number]
            trial = self.by_number[number]
            if trial.record.status not in ENDED or number < ALIKE_FAILURES:
                continue
            if not trial.paused_by_searcher and not is_needed(number):
                unused.append(self.by_number.pop(number))
                self.forgotten[trial.record.status] += 1
        return unused


class LiveTrials(TrialTable[LiveTrial]):
    """The trials that workers train: a search's trials, or all folds in a search with folds.

    `notify_of` is called with a trial's record, a hook's name and its arguments. If `stepwise`, a
    trial waits for :meth:`extend` after each epoch. `best_epoch`, `pinned`: as for `KeptStates`.
    """

    def __init__(
        self,
        settings: Settings,
        context: RunContext,
        store: Store,
        schedule: _core.Schedule,
        overview: Overview,
        ended: EndedTrials,
        notify_of: Callable[..., None],
        *,
        stepwise: bool,
        pinned: Collection[tuple[int, int]],
        best_epoch: Callable[[TrialRecord], int | None] | None = None,
    ) -> None:
        super().__init__(ended)
        metric, mode = settings.ranking.metric, settings.ranking.mode
        find_best = best_epoch or (lambda record: record.best_epoch(metric, mode))
        self.states = KeptStates(context.folders, store, settings.keep, find_best, pinned)
        self.held = HeldByWorkers()
        self._settings = settings
        self._context = context
        self._store = store
        self._unwritten: set[int] = set()  # trials whose targets have changed since the last flush
        self._schedule = schedule
        self._overview = overview
        self._notify_of = notify_of
        self._stepwise = stepwise
        self._outside = 0  # the number of trials that the user has added
        # By trial and epoch: in a resumed run, clones that start from this epoch, whose state was
        # lost. They wait until their parent has trained it again, or has ended.
        self._awaited: dict[tuple[int, int], list[LiveTrial]] = {}

    # --- starting --------------------------------------------------------

    def add(self, suggestion: Suggestion, of_user: OfUser | None = None) -> LiveTrial:
        """Add a trial or a clone; it fails at once if its configuration cannot be stored."""
        number = len(self)
        config, problem = make_recordable(suggestion.config)
        epochs = suggestion.epochs or self._settings.limits.epochs
        record = TrialRecord(number, config, target_epochs=epochs)
        parent = None if suggestion.parent is None else self.recall(suggestion.parent)
        if parent is not None:
            record.parent, record.parent_epoch = parent.record.number, suggestion.parent_epoch
            if record.parent_epoch is None and not (of_user and of_user.cold):
                assert parent.reported_epoch is not None
                record.parent_epoch = parent.reported_epoch
        record.stream = self.next_stream(by_user=of_user is not None)
        self._outside += of_user is not None
        trial = self.by_number[number] = LiveTrial(record, reported=record.first_epoch - 1)
        trial.position = record.first_epoch * self._context.units_per_epoch
        self._unwritten.add(number)
        self._store.add_trial(record)
        if of_user and of_user.info_epochs not in (None, self._settings.limits.epochs):
            self._set_info_epochs(record, 0, of_user.info_epochs or 0)
        if parent is not None and record.parent_epoch is not None:
            trial.clone_of = self.states.clone_of(parent.record, record.parent_epoch)
        self._schedule.add_trial(
            number, epochs=self._goal(trial), epoch=record.first_epoch, stream=record.key
        )
        trial.scheduled = True
        if problem is not None:
            self._notify_of(record, "on_trial_start")
            self.end(trial, "failed", problem)
        return trial

    def next_stream(self, *, by_user: bool) -> int | None:
        """Return the stream of the next trial, None if it is its number."""
        if by_user:
            return OUTSIDE + self._outside
        return len(self) - self._outside if self._outside else None

    def _set_info_epochs(self, record: TrialRecord, position: int, epochs: int) -> None:
        record.extensions += ((position, epochs),)
        self._store.add_extension(record.number, position, epochs)

    def aim_further(self, trial: LiveTrial, epochs: int, position: int) -> None:
        """Let an open trial train longer; its ``info.epochs`` changes at a position."""
        record = trial.record
        if not record.extensions:
            self._set_info_epochs(record, 0, self._settings.limits.epochs)
        self._set_info_epochs(record, position, epochs)
        self.aim(trial, epochs)
        self._schedule.extend_trial(record.number, self._goal(trial))

    def start(self, trial: LiveTrial) -> None:
        """Mark a trial as running before one of its units is dispatched."""
        if trial.record.began is None:
            trial.record.began = self._overview.now()
        if trial.record.status != "running":
            self.set_status(trial, "running")
        if trial.record.number in self._unwritten:  # the store must not lag behind the slots
            self._unwritten.clear()
            self._store.flush()
        if not trial.started:
            trial.started = True
            self._notify_of(trial.record, "on_trial_start")

    def restore(self, trials: Sequence[LiveTrial], answers: Mapping[int, LastDecision]) -> None:
        """Take over the trials of an earlier process, and the searcher's `answers`."""
        for trial in trials:
            number = trial.record.number
            self.by_number[number] = trial
            self._outside += trial.record.origin == "user"
            answer = answers.get(number, LastDecision(reported=trial.record.first_epoch - 1))
            trial.reported, trial.paused_by_searcher = answer.reported, answer.paused
        for trial in trials:
            record = trial.record
            self._overview.forecaster.trial_restored(trial)
            if record.status in ENDED:
                self._note_end(trial)
                continue
            if record.parent_epoch is not None and not record.epochs:
                self._find_parents_state(trial, record.parent_epoch)
            epoch, step = divmod(trial.position, self._context.units_per_epoch)
            self._schedule.add_trial(
                record.number, epochs=self._goal(trial), epoch=epoch, step=step, stream=record.key
            )
            trial.scheduled = True
            if trial.paused_by_searcher:
                self.pause(trial)
        for (number, _), clones in self._awaited.items():
            for trial in (self.by_number[number], *clones):
                self._hold_or_release(trial)

    def _find_parents_state(self, clone: LiveTrial, epoch: int) -> None:
        """Start an untrained clone from its parent's state, or make it wait for this state."""
        parent = self.by_number[clone.record.parent or 0]
        is_trained_again = parent.record.done <= epoch and parent.record.status not in ENDED
        first_position = clone.record.first_epoch * self._context.units_per_epoch
        if is_trained_again and clone.position == first_position:
            self._awaited.setdefault((parent.record.number, epoch), []).append(clone)
            return
        # The clone's slots may have the state. If not, only this trial fails.
        with contextlib.suppress(StateError):
            clone.clone_of = self.states.clone_of(parent.record, epoch)

    def _release_clones(self, parent: LiveTrial, epoch: int) -> None:
        for clone in self._awaited.pop((parent.record.number, epoch), ()):
            if clone.record.status not in ENDED:
                clone.clone_of = self.states.clone_of(parent.record, epoch)
                self._hold_or_release(clone)
        if parent.paused_by_searcher and parent.record.done > parent.reported:
            self.pause(parent)

    # --- epochs ----------------------------------------------------------

    def add_epoch(self, trial: LiveTrial, epoch: EpochRecord) -> None:
        trial.epoch_seconds = 0.0
        trial.history.append(epoch.to_history())
        self.states.add_epoch(trial.record, epoch, self._epoch_for_clones(trial))
        self._release_clones(trial, epoch.epoch)
        self._drop_parent(trial)  # no longer needed, not even after a power failure
        self._notify_of(trial.record, "on_epoch_end", dict(epoch.metrics))

    def extend(self, trial: LiveTrial) -> None:
        if self._stepwise:
            self._schedule.extend_trial(trial.record.number, self._goal(trial))
            self.states.retire(trial.record, trial.reported_epoch)

    def pause(self, trial: LiveTrial) -> None:
        """Pause a trial until the searcher resumes it."""
        self._hold_or_release(trial)
        self.set_status(trial, "paused")

    def shelve(self, trial: LiveTrial) -> None:
        """Free the slots and live models of a paused trial; the state of its last epoch stays."""
        state = self.states.find_last_state(trial.record)
        if state is None or trial.worker is not None or trial.record.status in ENDED:
            return
        trial.origin = state
        self._free(trial.record.number)

    def _free(self, number: int) -> None:
        remove_slots(Path(self._context.folders.slots), number, self._store.disk)
        self.held.free(number)

    def resume(self, trial: LiveTrial, epochs: int) -> None:
        record = trial.record
        self.aim(trial, epochs)
        self._unwritten.add(record.number)
        self._schedule.extend_trial(record.number, self._goal(trial))
        self._hold_or_release(trial)
        if not trial.held:
            self.set_status(trial, "waiting")

    def aim(self, trial: LiveTrial, epochs: int) -> None:
        """Set how many epochs the searcher wants of a trial, even if it was stopped early."""
        trial.record.target_epochs = epochs
        self._store.set_epochs(trial.record.number, epochs)

    # --- the user's commands ---------------------------------------------

    def hold(self, trial: LiveTrial) -> None:
        trial.held = True
        self._hold_or_release(trial)

    def release(self, trial: LiveTrial) -> None:
        trial.held = False
        self._hold_or_release(trial)
        if trial.record.status == "paused" and not trial.paused_by_searcher:
            self.set_status(trial, "waiting")

    def await_state(self, trial: LiveTrial, awaited: bool) -> None:
        """Hold a trial while the state of its last epoch is being copied, or release it."""
        trial.awaits_state = awaited
        if trial.record.status not in ENDED:
            self._hold_or_release(trial)

    def go_back(self, trial: LiveTrial, position: int | None) -> None:
        """Send a trial back to `position`, or, if that is later, the end of its last epoch."""
        record, units = trial.record, self._context.units_per_epoch
        last_kept = record.done * units
        if position is None or position < last_kept:
            position = last_kept
            trial.origin = self.states.find_last_state(record)
            trial.epoch_seconds = 0.0
        trial.awaits_state = False
        if record.status in ENDED:
            return
        self._overview.forecaster.trial_went_back(trial.position, position)
        trial.position = position
        epoch, step = divmod(position, units)
        self._schedule.rewind_trial(record.number, epoch=epoch, step=step)
        self._hold_or_release(trial)

    def _hold_or_release(self, trial: LiveTrial) -> None:
        """Tell the scheduler whether the trial must wait, for any reason."""
        number = trial.record.number
        paused = trial.paused_by_searcher and all(parent != number for parent, _ in self._awaited)
        awaits_parent = any(clone is trial for clones in self._awaited.values() for clone in clones)
        if trial.held or paused or trial.awaits_state or awaits_parent:
            self._schedule.hold_trial(number)
        else:
            self._schedule.release_trial(number)

    # --- ending ----------------------------------------------------------

    def end(
        self,
        trial: LiveTrial,
        status: Status,
        error: str = "",
        traceback: str = "",
        raised: Raised = NOTHING_RAISED,
    ) -> None:
        record = trial.record
        record.error, record.traceback, record.raised = error or None, traceback or None, raised
        record.ended = self._overview.now()
        self._schedule.drop_trial(record.number)
        self._drop_parent(trial)
        for number, epoch in [key for key in self._awaited if key[0] == record.number]:
            for clone in self._awaited.pop((number, epoch)):
                self._hold_or_release(clone)  # its first unit will fail: no state
        self._overview.forecaster.trial_ended(trial)
        self.set_status(trial, status)
        self.states.retire(record, self._epoch_for_clones(trial))
        self._free(record.number)
        self._remove_empty_log(record.number)
        self._notify_of(record, "on_trial_end")
        self._note_end(trial)

    def _remove_empty_log(self, number: int) -> None:
        """Delete a trial's log if it is empty; in a run of 100,000 trials, most print nothing."""
        disk, log = self._store.disk, log_path(self._context.folders.logs, number)
        with contextlib.suppress(OSError):
            if disk.size(log) == 0:
                disk.remove(log)

    def _note_end(self, trial: LiveTrial) -> None:
        self.ended.add(trial.record, trial.row(self._settings.ranking))
        if not trial.record.is_open:  # open trials determine the run's status
            self._over[trial.record.number] = None

    def forget_ended(self, is_expected: Callable[[int], bool]) -> list[int]:
        """Forget ended trials that are not needed and not expected to report; return them."""
        # The others return to `_over` in `clear_pause`, or when their last clone begins.
        unused = self._forget_unused(
            lambda number: self.by_number[number].worker is not None or is_expected(number),
            self.states.is_needed,
        )
        for trial in unused:
            if trial.scheduled:
                self._schedule.forget_trial(trial.record.number)
            self.states.forget(trial.record.number)
            self.held.forget(trial.record.number)
        return [trial.record.number for trial in unused]

    def clear_pause(self, trial: LiveTrial) -> None:
        """Clear the searcher's pause before the trial is resumed or dropped."""
        trial.paused_by_searcher = False
        if trial.record.status in ENDED:
            self._over[trial.record.number] = None

    def _read(self, number: int) -> LiveTrial:
        self._store.flush()
        with reader(self._store.folder, self._store.disk) as connection:
            (record,) = read_trials(connection, [number])
        return LiveTrial(record)

    # --- without folds, each trial is what the searcher sees -----------------

    def update_from(self, trial: LiveTrial) -> LiveTrial | None:
        """Return what to report once a trial has finished an epoch or ended; None: not yet."""
        return trial

    def update_all(self) -> None:
        """Update the trials of a resumed run."""

    def folds_beside(self, trial: LiveTrial) -> Sequence[LiveTrial]:
        """Return the other open trials that end with a trial."""
        return ()

    def mark_open_as_stopped(self) -> None:
        """Mark open trials as stopped at the run's end; their slots stay for a later resume."""
        for trial in self.by_number.values():
            if trial.record.status not in ENDED:
                self.set_status(trial, "stopped", resumable=True)

    def _drop_parent(self, trial: LiveTrial) -> None:
        """Release the parent's state when a clone no longer needs it."""
        record = trial.record
        if trial.clone_of is None or record.parent is None or record.parent_epoch is None:
            return
        parent = self.by_number[record.parent]
        self.states.release(parent.record, record.parent_epoch, self._epoch_for_clones(parent))
        trial.clone_of = None
        if parent.record.status in ENDED:
            self._over[record.parent] = None

    def set_status(self, trial: LiveTrial, status: Status, *, resumable: bool = False) -> None:
        """Set a trial's status; if `resumable`, the trial counts as open whatever the status."""
        trial.record.status, trial.record.resumable = status, resumable
        self._store.set_status(trial.record)

    def _epoch_for_clones(self, trial: LiveTrial) -> int | None:
        """Return the epoch whose state must stay because a clone may start from it."""
        return trial.reported_epoch if self._stepwise else None

    def _goal(self, trial: LiveTrial) -> int:
        if not self._stepwise:
            return trial.record.target_epochs
        epochs = trial.reported + (1 if trial.paused_by_searcher else 2)
        # A resumed trial may have trained further, before the decision reached the store.
        epoch, step = divmod(trial.position, self._context.units_per_epoch)
        return max(epochs, epoch + (step > 0))


def make_recordable(config: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return a configuration as the store and a replay have it, and why it is invalid, or None."""
    stored, problem = {}, None
    for name, value in config.items():
        try:
            stored[str(name)] = decode(encode(value))
        except InputError as error:
            stored[str(name)] = repr(value)
            problem = problem or str(error)
    return stored, problem


class HeldByWorkers:
    """Which workers may hold a trial's model or slots, and what they can free."""

    def __init__(self) -> None:
        self._workers: dict[int, set[int]] = {}  # by trial
        self._free: dict[int, list[int]] = {}  # by worker: trials of which it can free everything

    def take(self, worker: int, trial: int) -> tuple[int, ...]:
        """Record that a worker gets a unit of a trial; return the trials that it can free."""
        self._workers.setdefault(trial, set()).add(worker)
        return tuple(self._free.pop(worker, ()))

    def free(self, trial: int) -> None:
        for worker in self._workers.get(trial, ()):
            self._free.setdefault(worker, []).append(trial)

    def forget(self, trial: int) -> None:
        self._workers.pop(trial, None)

    def forget_worker(self, worker: int) -> None:
        self._free.pop(worker, None)
        for workers in self._workers.values():
            workers.discard(worker)


class KeptStates:
    """Keeps the states of finished epochs.

    `best_epoch` returns the epoch whose state ``keep="best"`` keeps; `pinned` has the trials and
    epochs whose states the searcher needs.
    """

    def __init__(
        self,
        folders: RunFolders,
        store: Store,
        keep: str,
        best_epoch: Callable[[TrialRecord], int | None],
        pinned: Collection[tuple[int, int]],
    ) -> None:
        self._folder = Path(folders.states)
        self._store = store
        self._keep = keep
        self._kept: dict[int, dict[int, EpochRecord]] = {}
        self._needed: Counter[tuple[int, int]] = Counter()
        self._best_epoch = best_epoch
        self._pinned = pinned

    def add_epoch(
        self, record: TrialRecord, epoch: EpochRecord, for_clones: int | None = None
    ) -> None:
        """Record a finished epoch, publish its state, and delete states that are no longer needed.

        That of `for_clones`, the last reported epoch, stays, because a clone would begin with it.
        """
        record.epochs.append(epoch)
        file = epoch.state_file
        paths = None if file is None else self._paths_of(file, epoch.state_hash)
        self._store.add_epoch(record.number, epoch, paths)
        self.retire(record, for_clones)

    def clone_of(self, record: TrialRecord, epoch: int) -> CloneOf:
        """Return a trial's state after an epoch; the state stays on disk until :meth:`release`."""
        found = self.find_clone_of(record, epoch)
        self._needed[record.number, epoch] += 1
        return found

    def find_clone_of(self, record: TrialRecord, epoch: int) -> CloneOf:
        """Return a trial's state after an epoch, which may be deleted soon."""
        start = next((e for e in record.epochs if e.epoch == epoch), None)
        if start is None or start.state_file is None:
            raise StateError(f"trial {record.number} has no state of epoch {epoch}: it was deleted")
        return CloneOf.of(record, str(self._folder / start.state_file), start.state_hash)

    def find_last_state(self, record: TrialRecord) -> KeptState | None:
        """Return the state of a trial's last epoch, which always stays; None before any epoch."""
        last = record.epochs[-1] if record.epochs else None
        if last is None or last.state_file is None:
            return None
        return KeptState(str(self._folder / last.state_file), last.state_hash)

    def release(self, record: TrialRecord, epoch: int, for_clones: int | None) -> None:
        """Release a parent's state once the clone has its own."""
        self._needed[record.number, epoch] -= 1
        self._needed += Counter()  # drops counts that are not above 0
        self.retire(record, for_clones)

    def discard(self, file: str | None, state_hash: str) -> None:
        if file is not None:
            self._store.disk.remove(self._paths_of(file, state_hash)[0])

    def _paths_of(self, file: str, state_hash: str) -> tuple[Path, Path]:
        """Return the paths of a state before and after it is published."""
        return self._folder / unpublished_name(file, state_hash), self._folder / file

    def retire(self, record: TrialRecord, for_clones: int | None = None) -> None:
        """Delete states that `keep` does not require; the state of the last epoch always stays."""
        if not record.epochs:
            return
        epochs = self._kept.setdefault(record.number, {})
        last = record.epochs[-1]
        # A resumed trial also has states written by an earlier process.
        for epoch in record.epochs if not epochs else [last]:
            if epoch.state_file is not None:
                epochs[epoch.epoch] = epoch
        if self._keep == "all":
            return
        best = self._best_epoch(record) if self._keep == "best" else None
        for number in sorted(set(epochs) - {last.epoch, best, for_clones}):
            if self._needed[record.number, number] > 0 or (record.key, number) in self._pinned:
                continue
            epoch = epochs.pop(number)
            assert epoch.state_file is not None
            self._store.retire_state(record.number, number, self._folder / epoch.state_file)
            epoch.state_file = None

    def is_needed(self, number: int) -> bool:
        return any(trial == number for trial, _ in self._needed)

    def forget(self, number: int) -> None:
        self._kept.pop(number, None)

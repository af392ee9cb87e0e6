"""The trials of a run and what becomes of them: added, paused, resumed, cloned, ended.

Whatever changes a trial's fate goes through here, so that its record, its row in the
store, the scheduler, its files and the callbacks always say the same.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import cerebro._core as _core
from cerebro.coordinator.callbacks import Hooks
from cerebro.coordinator.failures import ALIKE_FAILURES
from cerebro.coordinator.kept_states import KeptStates
from cerebro.coordinator.overview import EndedTrials, Overview
from cerebro.coordinator.trial import LiveTrial
from cerebro.errors import InputError, StateError
from cerebro.run.records import ENDED, NOTHING_RAISED, EpochRecord, Raised, Status, TrialRecord
from cerebro.run.settings import Settings
from cerebro.run.store import Answers, Store, decode, encode, read_trials, reader
from cerebro.searchers.base import Suggestion
from cerebro.worker.log import log_path, remove_if_empty
from cerebro.worker.messages import RunContext


class LiveTrials:
    """The trials of a run by number; see the module's text.

    Those that have ended are forgotten: the store has them, from which :meth:`recall` reads
    one that is cloned, and the overview what displays show.

    Parameters
    ----------
    stepwise
        Whether a trial trains no further than one epoch until :meth:`go_on` says so,
        because a searcher decides after each.
    expected
        How many trials there will be, where that is known.
    ended
        Where they are noted that have ended; default: where displays look.
    """

    def __init__(
        self,
        settings: Settings,
        context: RunContext,
        store: Store,
        schedule: _core.Schedule,
        overview: Overview,
        hooks: Hooks,
        *,
        stepwise: bool,
        expected: int | None = None,
        ended: EndedTrials | None = None,
    ) -> None:
        self.by_number: dict[int, LiveTrial] = {}
        """All that are not forgotten; always the first `ALIKE_FAILURES`."""
        self.forgotten: Counter[str] = Counter()
        """How many are, by status."""
        self.states = KeptStates(settings, context, store)
        self._ended: dict[int, list[int]] = {}  # trials of which a worker has not heard it yet
        self._settings = settings
        self._context = context
        self._store = store
        self._flushes = 0
        self._schedule = schedule
        self._overview = overview
        self.ended = overview.ended if ended is None else ended
        self._hooks = hooks
        self._stepwise = stepwise
        self._expected = expected
        self._over: dict[int, None] = {}  # ended, and perhaps of no more use: a set in order

    # --- beginning -------------------------------------------------------

    def add(self, suggestion: Suggestion) -> LiveTrial:
        """Add a new trial or a clone; one that cannot be trained has failed already."""
        number = len(self)
        config, problem = recordable(suggestion.config)
        record = TrialRecord(
            number, config, target_epochs=suggestion.epochs or self._settings.epochs
        )
        parent = None if suggestion.parent is None else self.recall(suggestion.parent)
        if parent is not None:
            assert parent.told is not None
            earlier = suggestion.parent_epoch
            record.parent = parent.record.number
            record.parent_epoch = parent.told if earlier is None else earlier
        trial = self.by_number[number] = LiveTrial(record, reported=record.first_epoch - 1)
        trial.first_position = record.first_epoch * self._context.units_per_epoch
        trial.position = trial.first_position
        trial.unwritten = self._flushes
        self._store.add_trial(
            *(number, config, record.status, record.target_epochs),
            *(record.parent, record.parent_epoch),
        )
        if parent is not None and record.parent_epoch is not None:
            trial.clone_of = self.states.clone_of(parent.record, record.parent_epoch)
        self._schedule.add_trial(number, epochs=self._goal(trial), epoch=record.first_epoch)
        trial.scheduled = True
        self._plan(trial, record.target_epochs)
        self._expect_others()
        if problem is not None:
            self._hooks.tell_of(record, "on_trial_start")
            self.end(trial, "failed", problem)
        return trial

    def start(self, trial: LiveTrial) -> None:
        """A unit of the trial is handed to a worker."""
        if trial.record.status != "running":
            self.set_status(trial, "running")
        if trial.unwritten == self._flushes:  # slots beyond what is on record are of no use
            self._flushes += 1
            self._store.flush()
        if not trial.started:
            trial.started = True
            self._hooks.tell_of(trial.record, "on_trial_start")

    def restore(self, trials: Sequence[LiveTrial], answers: Mapping[int, Answers]) -> None:
        """Take in the trials of an earlier process; those that have not ended train on.

        Parameters
        ----------
        answers
            What the searcher has said of each, if it listens.
        """
        for trial in trials:
            number = trial.record.number
            self.by_number[number] = trial
            answer = answers.get(number, Answers(reported=trial.record.first_epoch - 1))
            trial.reported, trial.asleep = answer.reported, answer.asleep
        for trial in trials:
            record = trial.record
            self._plan_units(trial, trial.position - trial.first_position)
            self._overview.units_done_before += trial.planned
            if record.status in ENDED:
                self._note_end(trial)
                continue
            if record.parent_epoch is not None and not record.epochs:
                parent = self.by_number[record.parent or 0].record
                with contextlib.suppress(StateError):  # it may do without, or fail alone
                    trial.clone_of = self.states.clone_of(parent, record.parent_epoch)
            epoch, step = divmod(trial.position, self._context.units_per_epoch)
            self._schedule.add_trial(
                record.number, epochs=self._goal(trial), epoch=epoch, step=step
            )
            trial.scheduled = True
            if trial.asleep:
                self._hold_or_release(trial)
                self.set_status(trial, "paused")
            else:
                self._plan(trial, record.target_epochs)
        self._expect_others()

    # --- epochs ----------------------------------------------------------

    def add_epoch(self, trial: LiveTrial, epoch: EpochRecord) -> None:
        """Record a finished epoch."""
        trial.epoch_seconds = 0.0
        trial.history.append(epoch.to_history())
        self.states.add_epoch(trial.record, epoch, self._told(trial))
        self._drop_parent(trial)  # a loss of power would no longer take it back to there
        self._hooks.tell_of(trial.record, "on_epoch_end", dict(epoch.metrics))

    def go_on(self, trial: LiveTrial) -> None:
        """Let the trial train the next epoch."""
        if self._stepwise:
            self._schedule.extend_trial(trial.record.number, self._goal(trial))
            self.states.retire(trial.record, trial.told)

    def pause(self, trial: LiveTrial) -> None:
        """The searcher lets the trial wait; its slots stay, and a live model may."""
        self._hold_or_release(trial)
        self._plan(trial, trial.record.done)
        self.set_status(trial, "paused")

    def shelve(self, trial: LiveTrial) -> None:
        """Free the slots of a paused trial, and its live models: its last epoch's state stays."""
        kept = self.states.kept(trial.record)
        if kept is None or trial.worker is not None or trial.record.status in ENDED:
            return
        trial.origin = kept
        self.states.remove_slots(trial.record.number)
        for worker in trial.workers:
            self._ended.setdefault(worker, []).append(trial.record.number)

    def resume(self, trial: LiveTrial, epochs: int) -> None:
        """The searcher lets a trial go on that it had paused."""
        record = trial.record
        record.target_epochs = epochs
        self._store.set_epochs(record.number, epochs)
        trial.unwritten = self._flushes
        self._schedule.extend_trial(record.number, self._goal(trial))
        self._hold_or_release(trial)
        self._plan(trial, epochs)
        if not trial.held:
            self.set_status(trial, "waiting")

    # --- the user's commands ---------------------------------------------

    def hold(self, trial: LiveTrial) -> None:
        """Give the trial no further unit until it is released."""
        trial.held = True
        self._hold_or_release(trial)

    def release(self, trial: LiveTrial) -> None:
        """Let a trial go on that was held."""
        trial.held = False
        self._hold_or_release(trial)
        if trial.record.status == "paused" and not trial.asleep:
            self.set_status(trial, "waiting")

    def await_state(self, trial: LiveTrial, awaited: bool) -> None:
        """Let a trial rest until the state of its last epoch is where it is kept."""
        trial.unkept = awaited
        if trial.record.status not in ENDED:
            self._hold_or_release(trial)

    def go_back(self, trial: LiveTrial, position: int | None) -> None:
        """Take a trial back to a state that there still is: the others are lost.

        Parameters
        ----------
        position
            Units behind that state; None, or before its last epoch's end: that one is where
            it goes back to, or to its beginning.
        """
        record, units = trial.record, self._context.units_per_epoch
        kept = record.done * units if record.epochs else trial.first_position
        if position is None or position < kept:
            position = kept
            trial.origin = self.states.kept(record)
            trial.epoch_seconds = 0.0
        trial.unkept = False
        if record.status in ENDED:
            return
        self._overview.units_done -= trial.position - position
        trial.position = position
        epoch, step = divmod(position, units)
        self._schedule.rewind_trial(record.number, epoch=epoch, step=step)
        self._hold_or_release(trial)

    def _hold_or_release(self, trial: LiveTrial) -> None:
        """Tell the scheduler whether the trial rests, for whatever reason."""
        if trial.held or trial.asleep or trial.unkept:
            self._schedule.hold_trial(trial.record.number)
        else:
            self._schedule.release_trial(trial.record.number)

    def named(self, number: int, what: str) -> tuple[LiveTrial, list[LiveTrial]]:
        """Return a trial that has not ended, and what is trained of it: itself.

        Raises
        ------
        InputError
            If there is no such trial, or it has ended; `what` says what cannot be done.
        """
        trial = self.by_number.get(number)
        status = self.status_of(number)
        if status is None:
            raise InputError(f"there is no trial {number}: it cannot be {what}")
        if trial is None or status in ENDED:
            raise InputError(f"trial {number} is {status}: it cannot be {what}")
        return trial, [trial]

    def status_of(self, number: Any) -> Status | None:
        """What a trial is, forgotten or not; None where there is none, whatever is asked for."""
        trial = self.by_number.get(number)
        if trial is not None:
            return trial.record.status
        return self.ended.status_of(int(number)) if isinstance(number, Integral) else None

    def recall(self, number: int) -> LiveTrial | None:
        """Return a trial, from the store if it was forgotten; None where there is none."""
        if number in self.by_number or self.status_of(number) is None:
            return self.by_number.get(number)
        self._store.flush()
        with reader(self._store.folder) as connection:
            (record,) = read_trials(connection, [number])
        # It was forgotten when the searcher had heard of all that it trained.
        trial = self.by_number[number] = LiveTrial(record, reported=record.done - 1)
        self.forgotten[record.status] -= 1
        self._over[number] = None
        return trial

    def __len__(self) -> int:
        return len(self.by_number) + self.forgotten.total()

    # --- ending ----------------------------------------------------------

    def end(
        self,
        trial: LiveTrial,
        status: Status,
        error: str = "",
        traceback: str = "",
        raised: Raised = NOTHING_RAISED,
    ) -> None:
        """End a trial for good."""
        record = trial.record
        record.error = error or None
        record.traceback = traceback or None
        record.raised = raised
        self._schedule.drop_trial(record.number)
        self._drop_parent(trial)
        self._plan_units(trial, trial.position - trial.first_position)
        self.set_status(trial, status)
        self.states.retire(record, self._told(trial))
        self.states.remove_slots(record.number)
        for worker in trial.workers:
            self._ended.setdefault(worker, []).append(record.number)
        remove_if_empty(log_path(self._context.log_dir, record.number))
        self._hooks.tell_of(record, "on_trial_end")
        self._note_end(trial)

    def _note_end(self, trial: LiveTrial) -> None:
        self.ended.add(trial.record, trial.row(self._settings.ranking))
        if not trial.record.is_open:  # else what the run is depends on it
            self._over[trial.record.number] = None

    def forget_ended(self, is_expected: Callable[[int], bool]) -> list[int]:
        """Forget the trials that have ended and that nobody will ask for; return them.

        Parameters
        ----------
        is_expected
            Whether a report of a trial is still to be delivered.
        """
        forgotten = []
        for number in list(self._over):
            trial = self.by_number[number]
            if trial.worker is not None or is_expected(number):
                continue
            del self._over[number]
            # It is looked at again when it wakes, or its last clone has begun.
            if trial.asleep or self.states.is_needed(number) or number < ALIKE_FAILURES:
                continue
            del self.by_number[number]
            if trial.scheduled:
                self._schedule.forget_trial(number)
            self.forgotten[trial.record.status] += 1
            self.states.forget(number)
            forgotten.append(number)
        return forgotten

    def wake(self, trial: LiveTrial) -> None:
        """The searcher has paused the trial and does so no longer."""
        trial.asleep = False
        if trial.record.status in ENDED:
            self._over[trial.record.number] = None

    def end_paused(self) -> None:
        """Nobody will resume the trials that the searcher has paused: they are over."""
        for trial in self.by_number.values():
            if trial.asleep and trial.record.status not in ENDED:
                self.end(trial, "stopped")

    def mark_open_as_stopped(self) -> None:
        """The run ends before its trials: they show as stopped, and their slots stay."""
        for trial in self.by_number.values():
            if trial.record.status not in ENDED:
                self.set_status(trial, "stopped", resumable=True)

    def _drop_parent(self, trial: LiveTrial) -> None:
        """A clone does not need its parent's state any more."""
        record = trial.record
        if trial.clone_of is None or record.parent is None or record.parent_epoch is None:
            return
        parent = self.by_number[record.parent]
        self.states.release(parent.record, record.parent_epoch, self._told(parent))
        trial.clone_of = None
        if parent.record.status in ENDED:
            self._over[record.parent] = None

    def ended_for(self, worker: int) -> tuple[int, ...]:
        """Trials that have ended since a worker was told last."""
        return tuple(self._ended.pop(worker, ()))

    def forget_worker(self, worker: int) -> None:
        self._ended.pop(worker, None)
        for trial in self.by_number.values():
            trial.workers.discard(worker)

    def set_status(self, trial: LiveTrial, status: Status, *, resumable: bool = False) -> None:
        """Change a trial's status; `resumable` says that it is not over, whatever the status."""
        record = trial.record
        record.status, record.resumable = status, resumable
        self._store.set_status(
            *(record.number, status, record.error or "", record.traceback or ""),
            resumable=resumable,
            raised=record.raised,
        )

    def _told(self, trial: LiveTrial) -> int | None:
        """The epoch whose state has to stay because a clone might begin with it."""
        return trial.told if self._stepwise else None

    # --- counting --------------------------------------------------------

    def _goal(self, trial: LiveTrial) -> int:
        """Epochs until which the scheduler may train the trial."""
        if not self._stepwise:
            return trial.record.target_epochs
        wanted = trial.reported + (1 if trial.asleep else 2)
        # Of a resumed run: it may have trained on when what let it was still to be written.
        epoch, step = divmod(trial.position, self._context.units_per_epoch)
        return max(wanted, epoch + (step > 0))

    def _plan(self, trial: LiveTrial, epochs: int) -> None:
        """Expect the trial to train until `epochs` are done."""
        self._plan_units(trial, (epochs - trial.record.first_epoch) * self._context.units_per_epoch)

    def _expect_others(self) -> None:
        """Count the units of trials that the searcher will be asked for."""
        others = max(0, (self._expected or 0) - len(self))
        units = self._settings.epochs * self._context.units_per_epoch
        self._overview.units_to_come = others * units

    def _plan_units(self, trial: LiveTrial, units: int) -> None:
        self._overview.units_planned += units - trial.planned
        trial.planned = units


def recordable(config: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return a configuration as it will be read back, and why no trial can have it.

    A replay sees the configuration that the store has, so that trials must too. What it
    cannot hold stands as text in the place of a configuration that cannot be trained.
    """
    known, problem = {}, None
    for name, value in config.items():
        try:
            known[str(name)] = decode(encode(value))
        except InputError as error:
            known[str(name)] = repr(value)
            problem = problem or str(error)
    return known, problem

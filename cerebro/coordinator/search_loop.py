"""The conversation with the searcher: what is asked, what is told, what is recorded.

Everything that the searcher says in one go (answers to reports, suggestions) becomes one
group of rows in the store together with the searcher's own state, so that a run that
is resumed finds them all or none.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from cerebro.coordinator.callbacks import Hooks
from cerebro.coordinator.failures import as_told, worst
from cerebro.coordinator.folds import FoldedTrials
from cerebro.coordinator.rounds import Report, Rounds
from cerebro.coordinator.searcher_record import Notes
from cerebro.coordinator.trial import LiveTrial
from cerebro.coordinator.trials import LiveTrials
from cerebro.errors import InputError
from cerebro.run.records import ENDED
from cerebro.run.settings import Settings
from cerebro.run.store import Store
from cerebro.searchers.base import DONE, Decision, Searcher, Suggestion, suggestion_problem

TIMED_WIDTH = 64
ADVANCE = 1000
"""Trials that wait, where nothing depends on how they do. All are known when there are no
more of them, which is when it matters which one comes last."""
MAX_STEPS = 1000
"""Before the coordinator looks at the clock again: of the suggestions all may be bad."""


class SearchLoop:
    """Asks a searcher for trials and tells it how they do.

    Parameters
    ----------
    first
        A suggestion that was taken from the searcher already.
    """

    def __init__(
        self,
        settings: Settings,
        searcher: Searcher,
        store: Store,
        hooks: Hooks,
        trials: LiveTrials | FoldedTrials,
        first: Suggestion | None,
    ) -> None:
        self.searcher = searcher
        self.rounds = Rounds(ordered=searcher.adaptive and not settings.asynchronous)
        self.is_exhausted = False
        """Nothing is asked any more."""
        self._settings = settings
        self._store = store
        self._hooks = hooks
        self._trials = trials
        self._first = first
        self._fresh = 0  # trials that are no clones
        self._news = False
        self._exact = bool(getattr(searcher, "exact_metrics", False))
        self._notes = Notes(searcher)
        self._standing: set[int] = set()  # trials that ended early and are reported on

    # --- what the coordinator says ---------------------------------------

    def epoch_done(self, trial: LiveTrial, epoch: int, metrics: Mapping[str, float]) -> None:
        """Take the report of a finished epoch, unless the epoch was trained again."""
        if epoch <= trial.reported:
            return
        self.rounds.arrive(Report(trial.record.number, epoch, metrics))

    def ended(self, trial: LiveTrial) -> None:
        """A trial failed, diverged or was stopped by the user: the searcher is told the worst.

        So that a searcher that listens turns away from it.
        """
        metrics = {} if self._exact else {self._settings.metric: worst(self._settings.mode)}
        record = trial.record
        self.rounds.arrive(Report(record.number, record.done, metrics, ended=True))

    def advance(self, *, ask: bool = True) -> bool:
        """Tell what it is time to tell, and ask for what there is room for.

        Parameters
        ----------
        ask
            False: nothing new is begun any more.

        Returns
        -------
        bool
            Whether anything was told or asked.
        """
        with self._hooks.later(), self._store.group():
            self._news = False
            self._shelve()
            for _ in range(MAX_STEPS):
                if not self._step(ask):
                    break
            if self._news and getattr(self.searcher, "is_recorded", True):
                self._store.set_meta("search_loop", self.state_dict())
                if self._notes.are_due:
                    self._write_down()
        return self._news

    def finish(self) -> None:
        """Nothing more is said: what the searcher has come to is on record as it is."""
        if getattr(self.searcher, "is_recorded", True) and not self._notes.are_complete:
            with self._store.group():
                self._write_down()

    def _write_down(self) -> None:
        """Record the searcher's state, and what had been said by then."""
        try:
            size = self._store.set_meta("searcher", self.searcher.state_dict())
        except InputError as error:
            raise InputError(
                f"the searcher {self._settings.searcher_name}: state_dict() must return JSON: "
                f"{error}"
            ) from error
        self._store.set_meta("searcher_said", self._notes.said)
        self._notes.written(size)

    # --- a resumed run ---------------------------------------------------

    def restore(self, state: Mapping[str, Any] | None, said: int) -> None:
        """Go on from :meth:`state_dict`; None: the searcher had not been asked yet.

        Parameters
        ----------
        said
            How many answers and suggestions are on record.
        """
        self._notes = Notes(self.searcher, said)
        if state is not None:
            self._fresh = int(state["fresh"])
            # With more trials than before there may be something to ask for again.
            enough = self._settings.n_trials is None or self._has_all_trials()
            self.is_exhausted = bool(state["is_exhausted"]) and enough
            if self.searcher.adaptive:
                self.rounds.load_state_dict(state)

    def arrive_again(self) -> None:
        """Let the reports arrive that the searcher has not answered, as far as is on record."""
        for number, trial in self._trials.by_number.items():
            record = trial.record
            if self.searcher.adaptive:
                if number in self.rounds.members:
                    self._arrive_again(trial)
            elif record.status not in ENDED:
                self.rounds.join(number)
                if record.epochs:
                    self.epoch_done(trial, record.epochs[-1].epoch, record.epochs[-1].metrics)

    def _arrive_again(self, trial: LiveTrial) -> None:
        """The same for one trial, which is to report."""
        record = trial.record
        due = [epoch for epoch in record.epochs if epoch.epoch == trial.reported + 1]
        if due:
            self.epoch_done(trial, due[0].epoch, due[0].metrics)
        elif record.status == "stopped" and self._stops_early(trial):
            self._standing.add(record.number)
            metrics = record.epochs[-1].metrics
            self.rounds.arrive(Report(record.number, trial.reported + 1, metrics))
        elif record.status in ENDED:
            self.ended(trial)

    def state_dict(self) -> dict[str, Any]:
        """Return, as JSON, what is to be known beside the searcher's own state."""
        state = {"fresh": self._fresh, "is_exhausted": self.is_exhausted}
        # To a searcher that does not listen every trial that has not ended is a member.
        return state | self.rounds.state_dict() if self.searcher.adaptive else state

    # --- telling ---------------------------------------------------------

    def _step(self, ask: bool) -> bool:
        report = self.rounds.take()
        if report is not None:
            self._deliver(report)
            self._drop()
            return True
        if not self.rounds.is_over or not ask:
            return False
        asked = self._ask()
        return self.rounds.begin() or asked

    def _deliver(self, report: Report) -> None:
        trial = self._trials.by_number[report.trial]
        record = trial.record
        decision = self._report(report)
        trial.reported = report.epoch
        self._standing.discard(record.number)
        if report.ended:
            return
        over = record.status in ENDED  # early, of itself: it only stands for what it was
        if decision is Decision.PAUSE:
            trial.asleep = True
            if not over:
                self._trials.pause(trial)
        elif report.epoch + 1 >= record.target_epochs or decision is Decision.STOP:
            if not over:
                finished = report.epoch + 1 >= record.target_epochs
                self._trials.end(trial, "finished" if finished else "stopped")
        elif over or self._stops_early(trial):
            if not over:
                self._trials.end(trial, "stopped")
            self._stand(trial)
        else:
            self._trials.go_on(trial)
            self.rounds.join(record.number)
            if self.searcher.adaptive:
                self._arrive_again(trial)  # of a resumed run: it may have trained on

    def _drop(self) -> None:
        """End paused trials that the searcher says it will not resume: their slots are freed."""
        dropped = getattr(self.searcher, "dropped", None)
        numbers = dropped() if callable(dropped) else []
        if not isinstance(numbers, (list, tuple)):
            raise InputError(
                f"the searcher {self._settings.searcher_name}: dropped() must return a list of "
                f"trials' numbers, not {numbers!r}"
            )
        for number in numbers:
            trial = self._trials.by_number.get(number) if type(number) is int else None
            if trial is None or not trial.asleep:
                raise InputError(
                    f"the searcher {self._settings.searcher_name} drops trial {number!r}, which it "
                    "has not paused"
                )
            self._trials.wake(trial)
            if trial.record.status not in ENDED:
                self._trials.end(trial, "stopped")

    def _shelve(self) -> None:
        """Free what paused trials hold that the searcher says it will not resume soon."""
        shelved = getattr(self.searcher, "shelved", None)
        for number in shelved() if callable(shelved) else ():
            trial = self._trials.by_number.get(number)
            if trial is not None and trial.asleep:
                self._trials.shelve(trial)

    def _stand(self, trial: LiveTrial) -> None:
        """Report a trial's last metrics for an epoch that it, stopped early, no longer trains.

        A searcher that compares trials would else wait for it for ever.
        """
        if not self.searcher.adaptive:
            return
        record = trial.record
        metrics = record.epochs[-1].metrics
        self._standing.add(record.number)
        self.rounds.join(record.number)
        self.rounds.arrive(Report(record.number, trial.reported + 1, metrics))

    def _stops_early(self, trial: LiveTrial) -> bool:
        rule = self._settings.stop
        return rule is not None and rule.should_stop(trial.history)

    def _report(self, report: Report) -> Decision:
        told = report.metrics
        if not self._exact:
            told = as_told(told, self._settings.metric, self._settings.mode)
        decision = self.searcher.report(report.trial, report.epoch, told)
        if not isinstance(decision, Decision):
            raise InputError(
                f"the searcher {self._settings.searcher_name} answered {decision!r} to the report "
                f"of trial {report.trial}, epoch {report.epoch}: report() must return a Decision"
            )
        if self.searcher.adaptive:  # else it does not matter what it hears
            self._note(report.trial, report.epoch, decision.value, None)
        return decision

    # --- asking ----------------------------------------------------------

    def _ask(self) -> bool:
        """Take suggestions while there is room; False if the searcher has none now."""
        asked = 0
        width = self._width()
        while not self.is_exhausted and self._live() < width and asked < width:
            if not self.searcher.adaptive and self._has_all_trials():
                self._exhaust()
                break
            suggestion, self._first = self._first or self.searcher.suggest(), None
            if suggestion is None:
                break
            if suggestion is DONE:
                self._exhaust()
                break
            self._check(suggestion)
            if self._is_fresh(suggestion) and self._has_all_trials():
                self._exhaust()
                break
            self._begin(suggestion)
            asked += 1
        return asked > 0

    def _begin(self, suggestion: Suggestion) -> None:
        if suggestion.trial is not None:
            self._resume(self._trials.by_number[suggestion.trial], suggestion)
            return
        trial = self._trials.add(suggestion)
        record = trial.record
        self._fresh += self._is_fresh(suggestion)
        self.rounds.join(record.number)
        if record.status in ENDED:
            self.ended(trial)
        kind = "begin" if record.parent is None else "clone"
        self._note(record.number, record.first_epoch, kind, record.target_epochs)

    def _resume(self, trial: LiveTrial, suggestion: Suggestion) -> None:
        record = trial.record
        epochs = suggestion.epochs or self._settings.epochs
        self._trials.wake(trial)
        self._note(record.number, trial.reported + 1, "resume", epochs)
        if record.status not in ENDED:
            self._trials.resume(trial, epochs)
            self.rounds.join(record.number)
            self._arrive_again(trial)
        elif trial.stopping:  # by the user, while it was paused
            self.rounds.join(record.number)
            self.ended(trial)
        else:
            record.target_epochs = epochs
            self._stand(trial)

    def _check(self, suggestion: Any) -> None:
        """Raise InputError if the searcher says what cannot be done."""
        problem = self._problem(suggestion)
        if problem is not None:
            raise InputError(f"the searcher {self._settings.searcher_name} {problem}")

    def _problem(self, suggestion: Any) -> str | None:
        problem = suggestion_problem(suggestion)
        if problem is not None:
            return problem
        epochs = suggestion.epochs
        if suggestion.trial is not None:
            return self._problem_of_resuming(suggestion.trial, epochs or self._settings.epochs)
        if suggestion.parent is not None:
            return self._problem_of_cloning(suggestion, epochs or self._settings.epochs)
        return None

    def _problem_of_resuming(self, number: Any, epochs: int) -> str | None:
        trial = self._trials.by_number.get(number)
        status = self._trials.status_of(number)
        if status is None:
            return f"resumes trial {number!r}, which does not exist"
        if trial is None or not trial.asleep:
            return f"resumes trial {number}, which it has not paused ({status})"
        if epochs <= trial.reported + 1:
            return (
                f"resumes trial {number} until {epochs} epochs are done, but it has done "
                f"{trial.reported + 1}"
            )
        return None

    def _problem_of_cloning(self, suggestion: Suggestion, epochs: int) -> str | None:
        number: Any = suggestion.parent
        parent = self._trials.recall(number)
        if parent is None:
            return f"clones trial {number!r}, which does not exist"
        if parent.told is None:
            return f"clones trial {number}, of which no epoch has been reported yet"
        epoch = parent.told if suggestion.parent_epoch is None else suggestion.parent_epoch
        kept = {known.epoch for known in parent.record.epochs if known.state_file is not None}
        kept.add(parent.told)  # which always is
        if epoch not in kept or epoch > parent.told:
            return f"clones trial {number} after epoch {epoch}, of which no state is kept"
        if epochs <= epoch + 1:
            return (
                f"clones trial {number} until {epochs} epochs are done, but that one has done "
                f"{epoch + 1}, which count: suggest more"
            )
        return None

    def _note(self, trial: int, epoch: int, decision: str, epochs: int | None) -> None:
        self._news = True
        if self.searcher.adaptive:
            self._notes.said += 1
            self._store.add_decision(self.rounds.number, trial, epoch, decision, epochs)

    def _width(self) -> int:
        """Trials live at a time: a searcher that listens gets `width`, others some in advance."""
        if self.searcher.adaptive:
            return self._settings.width
        # A search that only time ends must not be asked for all its trials at once.
        timed = self._settings.n_trials is None and self._settings.time_limit is not None
        if timed:
            return TIMED_WIDTH
        # Without stagger all trials go through the data together.
        return ADVANCE if self._settings.stagger else sys.maxsize

    def _live(self) -> int:
        """Trials that train, or wait to be told how they go on."""
        return self.rounds.live - len(self._standing)

    def _exhaust(self) -> None:
        self.is_exhausted = self._news = True

    def _is_fresh(self, suggestion: Suggestion) -> bool:
        return suggestion.trial is None and suggestion.parent is None

    def _has_all_trials(self) -> bool:
        n_trials = self._settings.n_trials
        return n_trials is not None and self._fresh >= n_trials

"""Ask the searcher for trials, report their epochs, and carry out its decisions.

Trials finish their epochs in an order that depends on timing; `Rounds` brings their reports into
one that does not (docs/design/search-loop.md). One pass of the loop writes the searcher's decisions
and suggestions, together with the loop's own state, as one group of rows, so a resumed run finds
all of them or none.

The same loop runs searches that train (`cerebro.coordinator.coordinator`) and simulated ones
(`cerebro.coordinator.simulated_trials`): the protocols `Trials` and `Record` hide the differences.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from cerebro.coordinator.failures import make_comparable, worst_value_of
from cerebro.coordinator.numbering import Numbering
from cerebro.coordinator.searcher_record import StateSaving
from cerebro.coordinator.trial import LiveTrial, OfUser
from cerebro.coordinator.user import Hooks
from cerebro.errors import InputError
from cerebro.run.records import ENDED, Status
from cerebro.run.settings import SearchSettings
from cerebro.searchers.base import DONE, Decision, Searcher, Suggestion, suggestion_problem

TIMED_WIDTH = 64
ADVANCE = 1000
"""How many trials wait in advance if the searcher is not adaptive. The scheduler then knows all
remaining trials near the end of the run, when their order matters.
"""
MAX_STEPS = 1000
"""The most steps before the clock is checked again, even if no suggestion is valid."""


@dataclass(frozen=True)
class Report:
    """The report of one epoch of a trial to the searcher."""

    trial: int
    epoch: int
    metrics: Mapping[str, float]
    ended: bool = False
    """Whether the trial failed or was stopped by the user: it ends whatever the answer is."""


class Rounds:
    """Holds reports back until they are due; if not `ordered`, delivers them as they arrive."""

    def __init__(self, *, ordered: bool = True) -> None:
        self.ordered = ordered
        self.number = -1
        self._due: list[int] = []  # a heap: the trials that have not reported in this round
        self._next: set[int] = set()  # members of the next round; if not ordered, all members
        self._arrived: dict[int, Report] = {}

    @property
    def live(self) -> int:
        """The number of trials whose reports are still to come."""
        return len(self._due) + len(self._next)

    @property
    def awaited(self) -> list[int]:
        """The trials that have not reported in this round, by number."""
        return [trial for trial in sorted(self._due) if trial not in self._arrived]

    @property
    def is_over(self) -> bool:
        """Whether the searcher may now be asked for suggestions."""
        return not self._due

    def expects(self, trial: int) -> bool:
        return trial in self._arrived or trial in self._next or trial in self._due

    def join(self, trial: int) -> None:
        self._next.add(trial)

    def arrive(self, report: Report) -> None:
        self._arrived[report.trial] = report

    def take(self) -> Report | None:
        """Return the next report, whose trial must :meth:`join` again; None: it has not arrived."""
        if self.ordered:
            if not self._due or self._due[0] not in self._arrived:
                return None
            return self._arrived.pop(heapq.heappop(self._due))
        for trial in self._arrived:
            self._next.discard(trial)
            return self._arrived.pop(trial)
        return None

    def begin(self) -> bool:
        """Begin the next round if this one is over; return whether a round was begun."""
        if not self.ordered or self._due or not self._next:
            return False
        self.number += 1
        self._due = sorted(self._next)
        self._next = set()
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "due": sorted(self._due), "next": sorted(self._next)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`; reports that were not delivered must arrive again."""
        self.number = int(state["number"])
        self._due = sorted(state["due"])
        self._next = set(state["next"])
        self._arrived = {}


class Trials(Protocol):
    """The trials of a search, as `LiveTrials` describes them; also folded or simulated ones."""

    @property
    def by_number(self) -> Mapping[int, LiveTrial]: ...
    def add(self, suggestion: Suggestion, of_user: OfUser | None = None) -> LiveTrial: ...
    def extend(self, trial: LiveTrial) -> None: ...
    def pause(self, trial: LiveTrial) -> None: ...
    def shelve(self, trial: LiveTrial) -> None: ...
    def resume(self, trial: LiveTrial, epochs: int) -> None: ...
    def aim(self, trial: LiveTrial, epochs: int) -> None: ...
    def clear_pause(self, trial: LiveTrial) -> None: ...
    def end(self, trial: LiveTrial, status: Status) -> None: ...
    def status_of(self, number: Any) -> Status | None: ...
    def recall(self, number: int) -> LiveTrial | None: ...


class Record(Protocol):
    """Stores the searcher's decisions: a run's `Store`, which describes the methods, or memory."""

    def group(self) -> AbstractContextManager[None]: ...
    def set_meta(self, key: str, value: Any) -> int: ...
    def add_decision(
        self, round: int, trial: int, epoch: int, decision: str, epochs: int | None, /
    ) -> None: ...


class SearchLoop:
    """Asks a searcher for trials, after `first`, and reports their epochs to it."""

    def __init__(
        self,
        settings: SearchSettings,
        searcher: Searcher,
        record: Record,
        hooks: Hooks,
        trials: Trials,
        first: Suggestion | None = None,
    ) -> None:
        self.searcher = searcher
        self.rounds = Rounds(ordered=searcher.adaptive and not settings.strategy.asynchronous)
        self.is_exhausted = False  # whether the searcher will not be asked again
        self._ranking = settings.ranking
        self._limits = settings.limits
        self._strategy = settings.strategy
        self._stagger = settings.batches.stagger
        self._record = record
        self._hooks = hooks
        self._trials = trials
        self._first = first
        self.begun = 0  # the number of trials that have begun, not counting clones
        self._changed = False
        self._saving = StateSaving(searcher)
        self._ended_early: set[int] = set()  # trials whose reports the searcher still receives
        self.numbering = Numbering()

    # --- events of the run -----------------------------------------------

    def epoch_done(self, trial: LiveTrial, epoch: int, metrics: Mapping[str, float]) -> None:
        """Queue the report of a finished epoch, unless it was reported before."""
        if trial.record.origin == "user":
            self.numbering.due.append(trial)
        elif epoch > trial.reported:
            self.rounds.arrive(Report(trial.record.number, epoch, metrics))

    def trial_ended(self, trial: LiveTrial) -> None:
        """Report the worst metric, so that an adaptive searcher avoids such configurations."""
        if trial.record.origin == "user":
            return
        exact = self.searcher.exact_metrics
        metrics = {} if exact else {self._ranking.metric: worst_value_of(self._ranking.mode)}
        record = trial.record
        self.rounds.arrive(Report(record.number, record.done, metrics, ended=True))

    def advance(self, *, ask: bool = True, max_steps: int = MAX_STEPS) -> bool:
        """Deliver the reports that are due, and ask for trials while too few are live.

        Return whether the searcher decided or suggested anything. `ask` allows more trials to
        start. At most `max_steps` reports and rounds of suggestions are handled.
        """
        with self._hooks.postpone_calls(), self._record.group():
            self._changed = False
            went_on = self._go_on_outside()
            self._shelve_paused()
            for _ in range(max_steps):
                if not self._step(ask):
                    break
            if self._changed and self.searcher.is_recorded:
                self._record.set_meta("search_loop", self.state_dict())
                if self._saving.is_due:
                    self._save_searcher()
        return self._changed or went_on

    def _go_on_outside(self) -> bool:
        """Let the user's trials train on, or end them: the searcher does not know them."""
        trials, self.numbering.due = self.numbering.due, []
        for trial in trials:
            record = trial.record
            trial.reported = record.done - 1
            if record.status in ENDED:
                continue
            if record.done >= record.target_epochs:
                self._trials.end(trial, "finished")
            elif self._stops_early(trial):
                self._trials.end(trial, "stopped")
            else:
                self._trials.extend(trial)
        return bool(trials)

    def add_outside(self, suggestion: Suggestion, of_user: OfUser) -> LiveTrial:
        """Add a trial of the user's."""
        trial = self._trials.add(suggestion, of_user)
        self.numbering.note_outside(trial.record.number)
        return trial

    def count_waiting_for(self, number: int) -> int:
        """Return how many trials wait for a paused one, because epochs are compared in rounds."""
        rounds = self.rounds
        return rounds.live - 1 if rounds.ordered and rounds.expects(number) else 0

    def explain_waiting(self) -> str:
        """Return which paused trials the round waits for; empty if none."""
        if not self.rounds.ordered:
            return ""
        trials = self._trials.by_number
        held = [n for n in self.rounds.awaited if n in trials and trials[n].held]
        if not held:
            return ""
        which = ("trial " if len(held) == 1 else "trials ") + ", ".join(map(str, held[:5]))
        return f"round {self.rounds.number} waits for {which} (paused by you)"

    def finish(self) -> None:
        if self.searcher.is_recorded and not self._saving.is_complete:
            with self._record.group():
                self._save_searcher()

    def _save_searcher(self) -> None:
        """Record the searcher's state and the number of decisions that it includes."""
        try:
            size = self._record.set_meta("searcher", self.searcher.state_dict())
        except InputError as error:
            raise self._error(f": state_dict() must return JSON: {error}") from error
        self._record.set_meta("searcher_said", self._saving.decisions)
        self._saving.note_saved(size)

    # --- a resumed run ---------------------------------------------------

    def restore(self, state: Mapping[str, Any] | None, decisions: int) -> None:
        """Continue from a `state_dict`, None if never asked, and the number of stored decisions."""
        self._saving = StateSaving(self.searcher, decisions)
        self.numbering = Numbering(trial.record for trial in self._trials.by_number.values())
        if state is not None:
            self.begun = int(state["fresh"])
            # If the number of trials was increased, the searcher may have more to suggest.
            enough = self._limits.n_trials is None or self._has_all_trials()
            self.is_exhausted = bool(state["is_exhausted"]) and enough
            if self.searcher.adaptive:
                self.rounds.load_state_dict(state)

    def arrive_again(self) -> None:
        """Queue the reports of stored epochs for which the searcher has no decision yet."""
        for number, trial in self._trials.by_number.items():
            record = trial.record
            if record.origin == "user":
                if record.epochs and record.status not in ENDED:
                    self.numbering.due.append(trial)
            elif self.searcher.adaptive:
                if self.rounds.expects(number):
                    self._arrive_again(trial)
            elif record.status not in ENDED:
                self.rounds.join(number)
                if record.epochs:
                    self.epoch_done(trial, record.epochs[-1].epoch, record.epochs[-1].metrics)

    def _arrive_again(self, trial: LiveTrial) -> None:
        """Queue the report that the searcher lacks, if its epoch is stored, or the trial's end."""
        record = trial.record
        due = [epoch for epoch in record.epochs if epoch.epoch == trial.reported + 1]
        if due:
            self.epoch_done(trial, due[0].epoch, due[0].metrics)
        elif record.status == "stopped" and self._stops_early(trial):
            self._arrive_early(trial)
        elif record.status in ENDED:
            self.trial_ended(trial)

    def state_dict(self) -> dict[str, Any]:
        state = {"fresh": self.begun, "is_exhausted": self.is_exhausted}
        # Unless the searcher is adaptive, every trial that has not ended is a member.
        return state | self.rounds.state_dict() if self.searcher.adaptive else state

    # --- reports ---------------------------------------------------------

    def _step(self, ask: bool) -> bool:
        report = self.rounds.take()
        if report is not None:
            self._deliver(report)
            self._end_dropped()
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
        self._ended_early.discard(record.number)
        if report.ended:
            return
        over = record.status in ENDED  # stopped early: its last metrics are reported again
        if decision is Decision.PAUSE:
            trial.paused_by_searcher = True
            if not over:
                self._trials.pause(trial)
        elif report.epoch + 1 >= record.target_epochs or decision is Decision.STOP:
            if not over:
                # A comparison that stops a trial without a finite metric also gives up the epochs
                # that later suggestions could have asked for.
                value = report.metrics.get(self._ranking.metric, 0.0)
                gives_up = decision is Decision.STOP and not math.isfinite(value)
                epochs = self._limits.epochs if gives_up else record.target_epochs
                finished = report.epoch + 1 >= epochs
                self._trials.end(trial, "finished" if finished else "stopped")
        elif over or self._stops_early(trial):
            if not over:
                self._trials.end(trial, "stopped")
            self._report_again(trial)
        else:
            self._trials.extend(trial)
            self.rounds.join(record.number)
            if self.searcher.adaptive:
                self._arrive_again(trial)  # a resumed run may have trained more epochs of it

    def _end_dropped(self) -> None:
        """End the paused trials that the searcher will not resume, and free their slots."""
        numbers: Any = self.searcher.dropped()
        if not isinstance(numbers, (list, tuple)):
            raise self._error(f": dropped() must return a list of trials' numbers, not {numbers!r}")
        for own in numbers:
            number = self.numbering.of_run(own)
            trial = self._trials.by_number.get(number) if type(number) is int else None
            if trial is None or not trial.paused_by_searcher:
                raise self._error(f" drops trial {own!r}, which it has not paused")
            self._trials.clear_pause(trial)
            if trial.record.status not in ENDED:
                self._trials.end(trial, "stopped")

    def _shelve_paused(self) -> None:
        """Free the resources of paused trials that the searcher will not resume soon."""
        for number in self.searcher.shelved():
            trial = self._trials.by_number.get(self.numbering.of_run(number))
            if trial is not None and trial.paused_by_searcher:
                self._trials.shelve(trial)

    def _report_again(self, trial: LiveTrial) -> None:
        """Report again for a trial that was stopped early: a searcher would wait for it forever."""
        if self.searcher.adaptive:
            self.rounds.join(trial.record.number)
            self._arrive_early(trial)

    def _arrive_early(self, trial: LiveTrial) -> None:
        number, metrics = trial.record.number, trial.record.epochs[-1].metrics
        self._ended_early.add(number)
        self.rounds.arrive(Report(number, trial.reported + 1, metrics))

    def _stops_early(self, trial: LiveTrial) -> bool:
        rule = self._strategy.stop
        return rule is not None and rule.should_stop(trial.history)

    def _report(self, report: Report) -> Decision:
        metrics = report.metrics
        if not self.searcher.exact_metrics:
            metrics = make_comparable(metrics, self._ranking)
        decision = self.searcher.report(self.numbering.own(report.trial), report.epoch, metrics)
        if not isinstance(decision, Decision):
            raise self._error(
                f" answered {decision!r} to the report of trial {report.trial}, epoch "
                f"{report.epoch}: report() must return a Decision"
            )
        if self.searcher.adaptive:  # else reports change nothing
            self._add_decision(report.trial, report.epoch, decision.value, None)
        return decision

    # --- suggestions ----------------------------------------------------------

    def _ask(self) -> bool:
        """Take suggestions until enough trials are live; return False if none is ready."""
        asked = 0
        width = self._limit_of_live()
        while not self.is_exhausted and asked < width:
            if self.rounds.live - len(self._ended_early) >= width:
                break
            suggestion: Any = DONE
            if self.searcher.adaptive or not self._has_all_trials():
                suggestion, self._first = self._first or self.searcher.suggest(), None
            if suggestion is None:
                break
            if suggestion is not DONE:
                suggestion = self._check(suggestion)
            if suggestion is DONE or (self._is_fresh(suggestion) and self._has_all_trials()):
                self.is_exhausted = self._changed = True
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
        self.begun += self._is_fresh(suggestion)
        self.rounds.join(record.number)
        if record.status in ENDED:
            self.trial_ended(trial)
        kind = "begin" if record.parent is None else "clone"
        self._add_decision(record.number, record.first_epoch, kind, record.target_epochs)

    def _resume(self, trial: LiveTrial, suggestion: Suggestion) -> None:
        record = trial.record
        epochs = suggestion.epochs or self._limits.epochs
        self._trials.clear_pause(trial)
        self._add_decision(record.number, trial.reported + 1, "resume", epochs)
        if record.status not in ENDED:
            self._trials.resume(trial, epochs)
            self.rounds.join(record.number)
            self._arrive_again(trial)
        elif trial.stopping:  # the user stopped it while it was paused
            self.rounds.join(record.number)
            self.trial_ended(trial)
        else:
            # Recorded, because a resumed run must also report it until then.
            self._trials.aim(trial, epochs)
            self._report_again(trial)

    def _error(self, what: str) -> InputError:
        return InputError(f"the searcher {self._strategy.searcher_name}{what}")

    def _check(self, suggestion: Any) -> Suggestion:
        """Return a valid suggestion with the run's numbers."""
        problem = suggestion_problem(suggestion)
        if problem is None:
            suggestion = self.numbering.translate(suggestion)
            epochs = suggestion.epochs or self._limits.epochs
            if suggestion.trial is not None:
                problem = self._find_problem_of_resuming(suggestion.trial, epochs)
            elif suggestion.parent is not None:
                problem = self._find_problem_of_cloning(suggestion, epochs)
        if problem is not None:
            raise self._error(f" {problem}")
        assert isinstance(suggestion, Suggestion)
        return suggestion

    def _find_problem_of_resuming(self, number: Any, epochs: int) -> str | None:
        trial = self._trials.by_number.get(number)
        status = self._trials.status_of(number)
        if status is None:
            return f"resumes trial {number!r}, which does not exist"
        if trial is None or not trial.paused_by_searcher:
            return f"resumes trial {number}, which it has not paused ({status})"
        if epochs <= trial.reported + 1:
            return (
                f"resumes trial {number} until {epochs} epochs are done, but it has done "
                f"{trial.reported + 1}"
            )
        return None

    def _find_problem_of_cloning(self, suggestion: Suggestion, epochs: int) -> str | None:
        number: Any = suggestion.parent
        parent = self._trials.recall(number)
        if parent is None:
            return f"clones trial {number!r}, which does not exist"
        last = parent.reported_epoch
        if last is None:
            return f"clones trial {number}, which has not reported an epoch yet"
        epoch = last if suggestion.parent_epoch is None else suggestion.parent_epoch
        available = {e.epoch for e in parent.record.epochs if e.state_file is not None}
        available.add(last)  # its state always is
        if epoch not in available or epoch > last:
            return f"clones trial {number} after epoch {epoch}, whose state is not kept"
        if epochs <= epoch + 1:
            return (
                f"clones trial {number} until {epochs} epochs are done, but its parent has done "
                f"{epoch + 1}, which count: suggest more"
            )
        return None

    def _add_decision(self, trial: int, epoch: int, decision: str, epochs: int | None) -> None:
        self._changed = True
        if self.searcher.adaptive:
            self._saving.decisions += 1
            self._record.add_decision(self.rounds.number, trial, epoch, decision, epochs)

    def _limit_of_live(self) -> int:
        """Return how many trials may be live: `width` if adaptive, else enough for the workers."""
        if self.searcher.adaptive:
            return self._strategy.width
        if self._limits.n_trials is None and self._limits.time_limit is not None:
            return TIMED_WIDTH  # only time ends the search: do not ask for all trials at once
        # Without stagger, all trials go through the data at the same time.
        return ADVANCE if self._stagger else sys.maxsize

    def _is_fresh(self, suggestion: Suggestion) -> bool:
        return suggestion.trial is None and suggestion.parent is None

    def _has_all_trials(self) -> bool:
        n_trials = self._limits.n_trials
        return n_trials is not None and self.begun >= n_trials

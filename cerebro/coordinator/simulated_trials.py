"""A search in which nothing is trained: the conversation with a searcher, and nothing else.

What `cerebro.testing` drives a searcher with and `cerebro.plan` foresees a search with.
The same order of asking and telling as in a run, without workers, states or a store.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from cerebro.coordinator.rounds import Report, Rounds
from cerebro.coordinator.searcher_record import Word, catch_up
from cerebro.errors import InputError
from cerebro.searchers.base import DONE, Decision, Searcher, Suggestion, prepare
from cerebro.space import Space


@dataclass
class SimulatedTrial:
    """What became of one trial."""

    number: int
    config: dict[str, Any]
    target: int
    epoch: int = 0
    """Epochs trained; a clone begins with its parent's."""
    status: str = "running"
    """``running paused stopped finished failed``"""
    parent: int | None = None
    values: list[float] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)


class ContractError(AssertionError):
    """A searcher did what none may do."""


class Conversation:
    """Asks a searcher for trials and tells it how they do.

    Parameters
    ----------
    searcher
        One that has not been set up.
    setup
        The arguments of its ``setup``, the space aside.
    width
        Trials live at a time; None: no limit for a searcher that does not listen, else 8.
    """

    def __init__(
        self,
        searcher: Searcher,
        space: Space,
        setup: dict[str, Any],
        *,
        width: int | None = None,
        asynchronous: bool = False,
    ) -> None:
        self.trials: list[SimulatedTrial] = []
        self.is_exhausted = False
        self._searcher = searcher
        self._space = space
        self._setup = setup
        adaptive = bool(getattr(searcher, "adaptive", False))
        self._width = (8 if adaptive else math.inf) if width is None else width
        self._rounds = Rounds(ordered=adaptive and not asynchronous)
        self._words: list[Word] = []  # said since the state was written down last
        self._fresh = 0
        self._told: dict[tuple[int, int], dict[str, float]] = {}
        prepare(searcher, space, **setup)
        self._state = self._state_now()

    def resume(self, fresh: Searcher, *, retell: int = 0) -> None:
        """Go on with another searcher that is given the state of this one, as JSON.

        Parameters
        ----------
        retell
            How old the state may be, in answers and suggestions: the searcher is told again
            what it was told since, as in a run that is resumed.
        """
        if len(self._words) >= retell:
            self._state, self._words = self._state_now(), []
        prepare(fresh, self._space, **self._setup)
        fresh.load_state_dict(json.loads(self._state))
        try:
            catch_up(
                *(fresh, self._words),
                told=lambda trial, epoch: self._told[trial, epoch],
                config_of=lambda trial: self.trials[trial].config,
                epochs=self._setup["epochs"],
            )
        except InputError as error:
            raise ContractError(str(error)) from None
        self._searcher = fresh

    def _state_now(self) -> str:
        return json.dumps(self._searcher.state_dict(), allow_nan=False)

    def trained(self, number: int, value: float) -> None:
        """A trial has trained an epoch; NaN: it failed there."""
        trial = self.trials[number]
        trial.values.append(value)
        if math.isnan(value):  # what the coordinator tells of a trial that failed
            value = math.inf if self._setup["mode"] == "min" else -math.inf
            trial.status = "failed"
        metrics = {self._setup["metric"]: value}
        self._rounds.arrive(Report(number, trial.epoch, metrics, trial.status == "failed"))

    def advance(self) -> list[int]:
        """Tell and ask what it is time for; return the trials that train an epoch now."""
        start: list[int] = []
        while True:
            report = self._rounds.take()
            if report is not None:
                start += self._deliver(report)
            elif self._rounds.is_over:
                asked = self._ask()
                start += asked
                if not self._rounds.begin() and not asked:
                    return start
            else:
                return start

    def end(self) -> list[SimulatedTrial]:
        """Return all trials; those still paused are stopped, as at the end of a run."""
        for trial in self.trials:
            if trial.status == "running":
                raise ContractError(f"trial {trial.number} was lost: it still runs at the end")
            if trial.status == "paused":
                trial.status = "stopped"
        return self.trials

    def _deliver(self, report: Report) -> list[int]:
        trial = self.trials[report.trial]
        decision = self._searcher.report(report.trial, report.epoch, dict(report.metrics))
        if not isinstance(decision, Decision):
            raise ContractError(f"report() returned {decision!r}, which is no Decision")
        self._told[report.trial, report.epoch] = dict(report.metrics)
        self._words.append(Word(report.trial, report.epoch, decision.value, None))
        trial.decisions.append(decision.value)
        on = [] if report.ended else self._apply(trial, decision)
        self._take_dropped()
        return on

    def _apply(self, trial: SimulatedTrial, decision: Decision) -> list[int]:
        trial.epoch += 1
        if decision is Decision.PAUSE:
            trial.status = "paused"
        elif trial.epoch >= trial.target:
            trial.status = "finished"
        elif decision is Decision.STOP:
            trial.status = "stopped"
        else:
            self._rounds.join(trial.number)
            return [trial.number]
        return []

    def _take_dropped(self) -> None:
        take = getattr(self._searcher, "dropped", None)
        for number in take() if callable(take) else ():
            if self.trials[number].status != "paused":
                raise ContractError(f"drops trial {number}, which is not paused")
            self.trials[number].status = "stopped"

    def _ask(self) -> list[int]:
        asked: list[int] = []
        while not self.is_exhausted and self._rounds.live < self._width:
            suggestion = self._searcher.suggest()
            if suggestion is DONE:
                self.is_exhausted = True
            elif suggestion is None:
                break
            elif isinstance(suggestion, Suggestion):
                if self._is_one_too_many(suggestion):
                    self.is_exhausted = True
                    break
                asked.append(self._begin(suggestion))
                self._rounds.join(asked[-1])
                self._words.append(self._word(suggestion, asked[-1]))
            else:
                raise ContractError(f"suggest() returned {suggestion!r}")
        self._take_dropped()
        return asked

    def _is_one_too_many(self, suggestion: Suggestion) -> bool:
        """Whether a search would end here, which has `n_trials` new ones and no more."""
        wanted: float | None = self._setup["n_trials"]
        if suggestion.trial is not None or suggestion.parent is not None or wanted is None:
            return False
        self._fresh += 1
        return self._fresh > wanted

    def _word(self, suggestion: Suggestion, number: int) -> Word:
        trial = self.trials[number]
        kind = "resume" if suggestion.trial is not None else "begin"
        kind = "clone" if suggestion.parent is not None else kind
        return Word(number, trial.epoch, kind, trial.target)

    def _begin(self, suggestion: Suggestion) -> int:
        target = suggestion.epochs or self._setup["epochs"]
        if suggestion.trial is not None:
            return self._again(suggestion.trial, target)
        number = len(self.trials)
        json.dumps(suggestion.config, allow_nan=False)
        trial = SimulatedTrial(number, dict(suggestion.config), target, parent=suggestion.parent)
        if suggestion.parent is not None:
            if not 0 <= suggestion.parent < number:
                raise ContractError(f"clones trial {suggestion.parent}, which does not exist")
            trial.epoch = self.trials[suggestion.parent].epoch
        if target <= trial.epoch:
            raise ContractError(f"trial {number} is to train until epoch {target}: nothing")
        self.trials.append(trial)
        return number

    def _again(self, number: int, target: int) -> int:
        if not 0 <= number < len(self.trials):
            raise ContractError(f"resumes trial {number}, which does not exist")
        trial = self.trials[number]
        if trial.status != "paused":
            raise ContractError(f"resumes trial {number}, which is {trial.status}")
        if target <= trial.epoch:
            raise ContractError(f"resumes trial {number} until epoch {target}, which it has done")
        trial.target, trial.status = target, "running"
        return number

"""For the tests of whoever writes a searcher: drive it without training anything, and check it.

`check_searcher` is what every searcher of Cerebro passes and yours should too::

    from cerebro.testing import check_searcher

    def test_my_searcher():
        check_searcher(lambda: MySearcher(patience=3))

`drive` runs a search over learning curves given as a function, in any order of arrival,
and returns what became of every trial.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cerebro import _core
from cerebro.rounds import Report, Rounds
from cerebro.searchers.base import DONE, Decision, Searcher, Suggestion
from cerebro.space import Space, as_space, choice, integer, loguniform, uniform, when

Curve = Callable[[Mapping[str, Any], int, int], float]
"""``curve(config, trial, epoch)``: the metric of an epoch (from 0); NaN: the trial fails there."""

MAX_STEPS = 100_000

SPACE = {
    "lr": loguniform(1e-4, 1e-1),
    "dropout": uniform(0.0, 0.5),
    "layers": integer(1, 4),
    "optimizer": choice(["sgd", "adam"]),
    "sgd only": when("optimizer", "sgd", {"momentum": uniform(0.0, 0.99)}),
}
"""What `check_searcher` searches unless it is given a space: a bit of everything."""


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


def drive(
    searcher: Searcher,
    curve: Curve,
    *,
    space: Any = None,
    epochs: int = 9,
    n_trials: int | None = 9,
    width: int = 8,
    seed: int = 0,
    metric: str = "loss",
    mode: str = "min",
    order: int | None = 0,
    asynchronous: bool = False,
    interrupt: Callable[[], Searcher] | None = None,
) -> list[SimulatedTrial]:
    """Run a search in which nothing is trained; return its trials by number.

    Parameters
    ----------
    searcher
        A searcher that has not been set up yet.
    curve
        The metric of a trial's epoch.
    width
        Trials live at a time.
    order
        Seed of the order in which trials finish their epochs; None: by number.
    asynchronous
        Reports are delivered as they arrive, as with ``asynchronous=True``.
    interrupt
        Makes a fresh searcher, which is given the state of the old one after every group of
        answers, as if the run were resumed each time.

    Raises
    ------
    ContractError
        If the searcher does what none may do: resumes a trial that is not paused, trains a
        stopped one, never ends, or returns something else than the protocol says.
    """
    setup = {
        "seed": seed, "epochs": epochs, "n_trials": n_trials, "metric": metric, "mode": mode,
        "points": (),
    }  # fmt: skip
    return _Driver(searcher, curve, as_space(SPACE if space is None else space), setup).run(
        width, order, asynchronous, interrupt
    )


class _Driver:
    def __init__(
        self, searcher: Searcher, curve: Curve, space: Space, setup: dict[str, Any]
    ) -> None:
        self.searcher = searcher
        self.curve = curve
        self.space = space
        self.setup = setup
        self.trials: list[SimulatedTrial] = []
        self.exhausted = False
        self.rounds = Rounds()

    def run(
        self,
        width: int,
        order: int | None,
        asynchronous: bool,
        interrupt: Callable[[], Searcher] | None,
    ) -> list[SimulatedTrial]:
        self.rounds = Rounds(ordered=not asynchronous)
        self.searcher.setup(self.space, **self.setup)
        shuffle = None if order is None else random.Random(order)
        training: list[int] = []
        for _ in range(MAX_STEPS):
            training += self._converse(width)
            if interrupt is not None:
                self._resume(interrupt())
            if not training:
                if not self.exhausted:
                    raise ContractError("suggest() returns None while no trial is training")
                return self._ended()
            at = 0 if shuffle is None else shuffle.randrange(len(training))
            self._train(training.pop(at))
        raise ContractError(f"the search has not ended after {MAX_STEPS} epochs")

    def _resume(self, fresh: Searcher) -> None:
        state = json.loads(json.dumps(self.searcher.state_dict(), allow_nan=False))
        fresh.setup(self.space, **self.setup)
        fresh.load_state_dict(state)
        self.searcher = fresh

    def _train(self, number: int) -> None:
        trial = self.trials[number]
        value = self.curve(trial.config, number, trial.epoch)
        trial.values.append(value)
        metrics = {self.setup["metric"]: value}
        if math.isnan(value):  # what the coordinator tells of a trial that failed
            worst = math.inf if self.setup["mode"] == "min" else -math.inf
            metrics = {self.setup["metric"]: worst}
            trial.status = "failed"
        self.rounds.arrive(Report(number, trial.epoch, metrics, trial.status == "failed"))

    def _converse(self, width: int) -> list[int]:
        """Tell and ask what it is time for; return the trials that train an epoch now."""
        start: list[int] = []
        while True:
            report = self.rounds.take()
            if report is not None:
                start += self._deliver(report)
            elif self.rounds.is_over:
                asked = self._ask(width)
                start += asked
                if not self.rounds.begin() and not asked:
                    return start
            else:
                return start

    def _deliver(self, report: Report) -> list[int]:
        trial = self.trials[report.trial]
        decision = self.searcher.report(report.trial, report.epoch, dict(report.metrics))
        if not isinstance(decision, Decision):
            raise ContractError(f"report() returned {decision!r}, which is no Decision")
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
            self.rounds.join(trial.number)
            return [trial.number]
        return []

    def _take_dropped(self) -> None:
        take = getattr(self.searcher, "dropped", None)
        for number in take() if callable(take) else ():
            if self.trials[number].status != "paused":
                raise ContractError(f"drops trial {number}, which is not paused")
            self.trials[number].status = "stopped"

    def _ask(self, width: int) -> list[int]:
        asked: list[int] = []
        while not self.exhausted and self.rounds.live < width:
            suggestion = self.searcher.suggest()
            if suggestion is DONE:
                self.exhausted = True
            elif suggestion is None:
                break
            elif isinstance(suggestion, Suggestion):
                asked.append(self._begin(suggestion))
                self.rounds.join(asked[-1])
            else:
                raise ContractError(f"suggest() returned {suggestion!r}")
        self._take_dropped()
        return asked

    def _begin(self, suggestion: Suggestion) -> int:
        target = suggestion.epochs or self.setup["epochs"]
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

    def _ended(self) -> list[SimulatedTrial]:
        for trial in self.trials:
            if trial.status == "running":
                raise ContractError(f"trial {trial.number} was lost: it still runs at the end")
            if trial.status == "paused":
                trial.status = "stopped"
        return self.trials


def check_searcher(
    make: Callable[[], Searcher],
    *,
    space: Any = None,
    epochs: int = 9,
    n_trials: int | None = 12,
    width: int = 4,
) -> None:
    """Check that a searcher keeps the protocol; for your own test suite.

    Deterministic: equal for any order in which trials finish their epochs. Nothing lost or
    twice: every trial ends, none that was stopped trains again, paused ones are resumed at
    most where they stand. Resumable: a fresh searcher with the old one's state, stored as
    JSON after every answer, goes on the same way. Sound: failing trials do not hang it, and
    a search whose trials all fail ends.

    Parameters
    ----------
    make
        Returns a new searcher that has not been set up; called several times.
    space, epochs, n_trials, width
        The search that it is driven through.

    Raises
    ------
    ContractError
        Saying what the searcher did.
    """
    options: dict[str, Any] = {
        "space": space, "epochs": epochs, "n_trials": n_trials, "width": width,
    }  # fmt: skip
    reference = drive(make(), smooth_curve, order=None, **options)
    if not reference:
        raise ContractError("suggests no trial")
    if n_trials is not None:
        fresh = sum(trial.parent is None for trial in reference)
        if fresh > n_trials:
            raise ContractError(f"began {fresh} trials where n_trials={n_trials}")
    for order in range(3):
        _same(reference, drive(make(), smooth_curve, order=order, **options), "another order")
    resumed = drive(make(), smooth_curve, order=1, interrupt=make, **options)
    _same(reference, resumed, "a resume after every answer")
    again = drive(make(), smooth_curve, order=None, mode="max", **options)
    _same(again, drive(make(), smooth_curve, order=2, mode="max", **options), "another order")
    failing = drive(make(), failing_curve, order=None, **options)
    _same(failing, drive(make(), failing_curve, order=3, **options), "another order")
    drive(make(), lambda config, trial, epoch: math.nan, **options)
    if getattr(make(), "adaptive", False):
        drive(make(), smooth_curve, order=4, asynchronous=True, **options)


def smooth_curve(config: Mapping[str, Any], trial: int, epoch: int) -> float:
    """A learning curve that falls to a level of its own; no two trials are equal."""
    level, speed = _core.random_doubles(2, 17, "search", trial)
    return float(level + math.exp(-(0.2 + speed) * epoch))


def failing_curve(config: Mapping[str, Any], trial: int, epoch: int) -> float:
    """Like `smooth_curve`, but every third trial fails: at once, or some epochs later."""
    if trial % 3 == 1 and epoch == trial % 4:
        return math.nan
    return smooth_curve(config, trial, epoch)


def _same(expected: list[SimulatedTrial], found: list[SimulatedTrial], why: str) -> None:
    if len(expected) != len(found):
        raise ContractError(f"{why} gives {len(found)} trials instead of {len(expected)}")
    for one, other in zip(expected, found, strict=True):
        if one != other:
            raise ContractError(f"{why} changes trial {one.number}:\n{one}\n{other}")

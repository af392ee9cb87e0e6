"""Tools for testing your own searcher: drive it without training anything, and check it.

Every searcher in Cerebro passes `check_searcher`, and yours should too::

    from cerebro.testing import check_searcher

    def test_my_searcher():
        check_searcher(lambda: MySearcher(patience=3))

`drive` runs a search over learning curves that a function gives, in any order of arrival, and
returns its trials. Both use the loop that runs a search.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import cerebro._core as _core
from cerebro.coordinator.simulated_trials import ContractError, SimulatedSearch, SimulatedTrial
from cerebro.errors import InputError
from cerebro.run.records import Ranking
from cerebro.run.settings import Exactness, Limits, SearchSettings, Strategy
from cerebro.searchers import Searcher, make_searcher
from cerebro.space import as_space, choice, integer, loguniform, uniform, when

__all__ = ["ContractError", "SimulatedTrial", "check_searcher", "drive"]

Curve = Callable[[Mapping[str, Any], int, int], float]
"""``curve(config, trial, epoch)`` returns an epoch's metric (from 0); NaN: the trial fails."""

MAX_STEPS = 100_000

SPACE = {
    "lr": loguniform(1e-4, 1e-1),
    "dropout": uniform(0.0, 0.5),
    "layers": integer(1, 4),
    "optimizer": choice(["sgd", "adam"]),
    "sgd only": when("optimizer", "sgd", {"momentum": uniform(0.0, 0.99)}),
}
"""The default space of `drive` and `check_searcher`: one dimension of each kind."""


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
    retell: int = 0,
) -> list[SimulatedTrial]:
    """Run a search in which nothing is trained; return its trials by number.

    Parameters
    ----------
    searcher
        A searcher that has not been set up yet.
    curve
        Returns the metric of a trial's epoch.
    width
        The number of trials live at a time, if the searcher is adaptive.
    order
        The seed of the order in which trials finish their epochs; None: by trial number.
    asynchronous
        Whether reports are delivered as they arrive, as with ``asynchronous=True``.
    interrupt
        Returns a new searcher, which loads the state of the old one after every group of decisions,
        as if the run were resumed each time.
    retell
        The largest number of decisions by which this state may be too old; later reports are
        repeated.

    Raises
    ------
    ContractError
        If the searcher breaks a rule: it resumes a trial that is not paused, trains a stopped one,
        never ends, or returns a value of the wrong type.
    """
    the_searcher = make_searcher(searcher)
    name = type(the_searcher).__name__
    ranking, limits = Ranking(metric, mode, "best"), Limits(epochs=epochs, n_trials=n_trials)
    strategy = Strategy(searcher_name=name, width=width, asynchronous=asynchronous)
    settings = SearchSettings(
        ranking=ranking, strategy=strategy, limits=limits, exactness=Exactness(seed=seed)
    )
    the_space = as_space(SPACE if space is None else space)
    search = SimulatedSearch(the_searcher, the_space, settings)
    shuffle = None if order is None else random.Random(order)
    training: list[int] = []
    for _ in range(MAX_STEPS):
        try:
            training += search.take_ready()
            if interrupt is not None:
                search.replace_searcher(make_searcher(interrupt()), retell=retell)
        except InputError as error:
            raise ContractError(str(error)) from error
        if not training:
            if not search.is_exhausted:
                raise ContractError("suggest() returns None while no trial is training")
            return search.end()
        number = training.pop(0 if shuffle is None else shuffle.randrange(len(training)))
        record = search.record_of(number)
        search.add_value(number, curve(record.config, number, record.done))
    raise ContractError(f"the search has not ended after {MAX_STEPS} epochs")


def check_searcher(
    make: Callable[[], Searcher],
    *,
    space: Any = None,
    epochs: int = 9,
    n_trials: int | None = 12,
    width: int = 4,
) -> None:
    """Check that a searcher obeys the rules of `cerebro.searchers.Searcher`.

    The searcher must be deterministic: the order in which trials finish their epochs changes
    nothing. It must not lose or repeat a trial: every trial ends, no stopped trial trains again,
    and a paused trial is resumed where it paused. It must be resumable: a new searcher that loads
    the old one's state, stored as JSON after every decision, makes the same decisions, and so does
    one that loads an older state and receives the later reports again. Failing trials must not
    block it, and a search whose trials all fail must end.

    Parameters
    ----------
    make
        Returns a new searcher that has not been set up; called several times.
    space, epochs, n_trials, width
        The search with which to check it.

    Raises
    ------
    ContractError
        If the searcher breaks a rule; the message says which.
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
            raise ContractError(f"began {fresh} trials, but n_trials={n_trials}")
    for order in range(3):
        _check_same(reference, drive(make(), smooth_curve, order=order, **options), "another order")
    resumed = drive(make(), smooth_curve, order=1, interrupt=make, **options)
    _check_same(reference, resumed, "a resume after every answer")
    if make_searcher(make()).repeatable:
        retold = drive(make(), smooth_curve, order=1, interrupt=make, retell=7, **options)
        _check_same(reference, retold, "a resume from an older state")
    again = drive(make(), smooth_curve, order=None, mode="max", **options)
    _check_same(again, drive(make(), smooth_curve, order=2, mode="max", **options), "another order")
    failing = drive(make(), failing_curve, order=None, **options)
    _check_same(failing, drive(make(), failing_curve, order=3, **options), "another order")
    drive(make(), lambda config, trial, epoch: math.nan, **options)
    if make_searcher(make()).adaptive:
        drive(make(), smooth_curve, order=4, asynchronous=True, **options)


def smooth_curve(config: Mapping[str, Any], trial: int, epoch: int) -> float:
    """Return the metric of a falling learning curve; no two trials have the same curve."""
    level, speed = _core.random_doubles(2, 17, "search", trial)
    return float(level + math.exp(-(0.2 + speed) * epoch))


def failing_curve(config: Mapping[str, Any], trial: int, epoch: int) -> float:
    """Return the metric of `smooth_curve`; every third trial fails, at once or later."""
    if trial % 3 == 1 and epoch == trial % 4:
        return math.nan
    return smooth_curve(config, trial, epoch)


def _check_same(expected: list[SimulatedTrial], found: list[SimulatedTrial], why: str) -> None:
    if len(expected) != len(found):
        raise ContractError(f"{why} gives {len(found)} trials instead of {len(expected)}")
    for trial, other in zip(expected, found, strict=True):
        if trial != other:
            raise ContractError(f"{why} changes trial {trial.number}:\n{trial}\n{other}")

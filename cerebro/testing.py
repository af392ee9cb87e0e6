"""For the tests of whoever writes a searcher: drive it without training anything, and check it.

`check_searcher` is what every searcher of Cerebro passes and yours should too::

    from cerebro.testing import check_searcher

    def test_my_searcher():
        check_searcher(lambda: MySearcher(patience=3))

`drive` runs a search over learning curves given as a function, in any order of arrival,
and returns what became of every trial.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import cerebro._core as _core
from cerebro.coordinator.simulated_trials import ContractError, Conversation, SimulatedTrial
from cerebro.searchers.base import Searcher
from cerebro.space import as_space, choice, integer, loguniform, uniform, when

__all__ = ["ContractError", "SimulatedTrial", "check_searcher", "drive"]

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
    retell
        How old that state may be: what the old one was told since is told again.

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
    the_space = as_space(SPACE if space is None else space)
    search = Conversation(searcher, the_space, setup, width=width, asynchronous=asynchronous)
    shuffle = None if order is None else random.Random(order)
    training: list[int] = []
    for _ in range(MAX_STEPS):
        training += search.advance()
        if interrupt is not None:
            search.resume(interrupt(), retell=retell)
        if not training:
            if not search.is_exhausted:
                raise ContractError("suggest() returns None while no trial is training")
            return search.end()
        number = training.pop(0 if shuffle is None else shuffle.randrange(len(training)))
        trial = search.trials[number]
        search.trained(number, curve(trial.config, number, trial.epoch))
    raise ContractError(f"the search has not ended after {MAX_STEPS} epochs")


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
    JSON after every answer, goes on the same way, and so does one with an older state that
    is told again what was told since. Sound: failing trials do not hang it, and a search
    whose trials all fail ends.

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
    if getattr(make(), "repeatable", True):
        retold = drive(make(), smooth_curve, order=1, interrupt=make, retell=7, **options)
        _same(reference, retold, "a resume from an older state")
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

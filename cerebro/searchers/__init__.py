"""Decide which configuration is trained next, and for how long."""

from __future__ import annotations

import math
from typing import Any

from cerebro.errors import InputError
from cerebro.searchers.asha import ASHA
from cerebro.searchers.base import (
    DONE,
    Decision,
    Searcher,
    SpaceSearcher,
    Suggestion,
    add_defaults,
)
from cerebro.searchers.grid import GridSearch
from cerebro.searchers.hyperband import Hyperband, SuccessiveHalving, hyperband_brackets
from cerebro.searchers.optuna_samplers import TPE, GaussianProcess
from cerebro.searchers.pbt import PBT
from cerebro.searchers.quasi_random import QuasiRandomSearch
from cerebro.searchers.random import RandomSearch
from cerebro.searchers.stopping import MedianStopping
from cerebro.space import Space

__all__ = [
    "ASHA",
    "DONE",
    "PBT",
    "TPE",
    "Decision",
    "GaussianProcess",
    "GridSearch",
    "Hyperband",
    "MedianStopping",
    "QuasiRandomSearch",
    "RandomSearch",
    "Searcher",
    "SuccessiveHalving",
    "Suggestion",
    "hyperband_brackets",
    "make_searcher",
]

_BY_NAME: dict[str, type[Any]] = {
    "random": RandomSearch,
    "grid": GridSearch,
    "quasirandom": QuasiRandomSearch,
    "successive_halving": SuccessiveHalving,
    "hyperband": Hyperband,
    "asha": ASHA,
    "median": MedianStopping,
    "pbt": PBT,
    "tpe": TPE,
    "gp": GaussianProcess,
}
_METHODS = ("suggest", "report", "state_dict", "load_state_dict")


def set_up(searcher: Searcher, space: Space, settings: Any) -> None:
    """Set a searcher up for a search with these `cerebro.run.settings.SearchSettings`."""
    ranking, limits = settings.ranking, settings.limits
    if isinstance(searcher, SpaceSearcher):
        searcher.select = ranking.select
    timed = limits.n_trials is None and limits.time_limit is not None
    searcher.setup(
        space,
        seed=settings.exactness.seed,
        epochs=limits.epochs,
        n_trials=math.inf if timed else limits.n_trials,
        metric=ranking.metric,
        mode=ranking.mode,
        points=list(settings.strategy.points),
    )


def make_searcher(searcher: str | Searcher | type[Searcher]) -> Searcher:
    """Return a searcher, given its name, an object or a class.

    Parameters
    ----------
    searcher
        A name, such as "random" or "hyperband", a searcher, or a searcher class that needs no
        arguments.

    Raises
    ------
    InputError
        If the name is unknown, or the object lacks a method of
        :class:`~cerebro.searchers.base.Searcher`.
    """
    if isinstance(searcher, str):
        kind = _BY_NAME.get(searcher.lower())
        if kind is None:
            names = ", ".join(repr(name) for name in _BY_NAME)
            raise InputError(
                f"searcher={searcher!r} is not known; there are {names}, or "
                "pass an object with the methods of cerebro.searchers.Searcher"
            )
        built: Searcher = kind()
        return built
    instance: Any = searcher() if isinstance(searcher, type) else searcher
    missing = [name for name in _METHODS if not callable(getattr(instance, name, None))]
    if missing:
        raise InputError(
            f"searcher={instance!r} is not a searcher: it has no {missing[0]}() method; Optuna's "
            "samplers are for cerebro.optuna.optimize, Ray Tune's searchers for cerebro.ray.fit"
        )
    if not isinstance(instance, Searcher):
        add_defaults(instance)
    if not isinstance(instance.adaptive, bool):
        raise InputError(
            f"searcher={instance!r} does not declare whether it uses reports: give it an attribute "
            "adaptive, True or False"
        )
    result: Searcher = instance
    return result

"""Decide which configuration is trained next, and for how long."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

from cerebro.errors import InputError
from cerebro.machine.imports import import_lazily
from cerebro.searchers.base import DONE, Decision, Searcher, Suggestion, add_defaults
from cerebro.searchers.halving import ASHA, Hyperband, SuccessiveHalving, hyperband_brackets
from cerebro.searchers.metrics import MedianStopping
from cerebro.searchers.pbt import PBT
from cerebro.searchers.sequences import GridSearch, QuasiRandomSearch, RandomSearch

if TYPE_CHECKING:
    from cerebro.integrations.optuna.samplers import TPE, GaussianProcess

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

__getattr__ = import_lazily(
    __name__, dict.fromkeys(("TPE", "GaussianProcess"), "cerebro.integrations.optuna.samplers")
)

_BY_NAME = {
    "random": "RandomSearch",
    "grid": "GridSearch",
    "quasirandom": "QuasiRandomSearch",
    "successive_halving": "SuccessiveHalving",
    "hyperband": "Hyperband",
    "asha": "ASHA",
    "median": "MedianStopping",
    "pbt": "PBT",
    "tpe": "TPE",
    "gp": "GaussianProcess",
}
_METHODS = ("suggest", "report", "state_dict", "load_state_dict")


def make_searcher(searcher: str | Searcher | type[Searcher]) -> Searcher:
    """Return a searcher, given its name, an object or a class that needs no arguments.

    Raises InputError if the name is unknown, or the object lacks a method of `Searcher`.
    """
    made: Any = searcher
    if isinstance(searcher, str):
        name = _BY_NAME.get(searcher.lower())
        if name is None:
            names = ", ".join(repr(name) for name in _BY_NAME)
            raise InputError(
                f"searcher={searcher!r} is not known; there are {names}, or "
                "pass an object with the methods of cerebro.searchers.Searcher"
            )
        made = getattr(sys.modules[__name__], name)
    if isinstance(made, type):
        made = made()
    missing = [name for name in _METHODS if not callable(getattr(made, name, None))]
    if missing:
        raise InputError(
            f"searcher={made!r} is not a searcher: it has no {missing[0]}() method; Optuna's "
            "samplers are for cerebro.optuna.optimize, Ray Tune's searchers for cerebro.ray.fit"
        )
    if not isinstance(made, Searcher):
        add_defaults(made)
    if not isinstance(made.adaptive, bool):
        raise InputError(
            f"searcher={made!r} does not declare whether it uses reports: give it an attribute "
            "adaptive, True or False"
        )
    return cast(Searcher, made)

"""Check which schedulers and search algorithms of Ray Tune `cerebro.ray.fit` supports.

A scheduler or a search algorithm may use any part of Tune's controller. So only those whose
requirements are known are supported.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from cerebro.errors import InputError
from cerebro.machine.imports import import_extra

CLOCKS = {"time_total_s", "time_this_iter_s", "time_since_restore", "timestamp"}

_THROUGH_TUNER = "give it to tune.Tuner(cerebro.ray.trainable(build, data, ...)) instead"

_REFUSED = {
    "PopulationBasedTraining": "use cerebro.search(..., searcher=cerebro.PBT(...)), or "
    + _THROUGH_TUNER,
    "PopulationBasedTrainingReplay": _THROUGH_TUNER,
    "PB2": "use cerebro.search(..., searcher=cerebro.PBT(...)), or " + _THROUGH_TUNER,
    "HyperBandForBOHB": "use HyperBandScheduler, with OptunaSearch for a model of the space",
    "TuneBOHB": "it needs HyperBandForBOHB: use OptunaSearch with HyperBandScheduler",
    "ResourceChangingScheduler": "trials do not have separate resources here: give the scheduler "
    "inside it",
}


def import_tune(what: str) -> Any:
    return import_extra("ray.tune", "ray", f"{what} needs Ray Tune")


def check_scheduler(scheduler: Any) -> Any:
    """Return the scheduler to use; None means Tune's FIFO scheduler, which only starts trials.

    Raises InputError if the scheduler does not work without Tune's controller.
    """
    from ray.tune import schedulers

    if scheduler is None:
        return schedulers.FIFOScheduler()
    supported = (
        schedulers.FIFOScheduler,
        schedulers.AsyncHyperBandScheduler,
        schedulers.MedianStoppingRule,
        schedulers.HyperBandScheduler,
    )
    name = type(scheduler).__name__
    if type(scheduler) not in supported:
        if not isinstance(scheduler, schedulers.TrialScheduler):
            raise InputError(
                f"scheduler={scheduler!r} is not a scheduler of ray.tune: use ASHAScheduler, "
                "HyperBandScheduler or MedianStoppingRule"
            )
        raise InputError(
            f"scheduler: {name} cannot be driven by cerebro.ray.fit: {_suggest_alternative(name)}"
        )
    attribute = getattr(scheduler, "_time_attr", None)
    if attribute in CLOCKS:
        raise InputError(
            f"scheduler: {name}(time_attr={attribute!r}) decides by the clock, so that each run "
            "differs: give time_attr='training_iteration', and periods in epochs"
        )
    return scheduler


def read_scheduler_arguments(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's arguments, as far as its attributes show them.

    Metric and mode are left out: they are those of the search.
    """
    values = {name.removeprefix("_"): value for name, value in vars(scheduler).items()}
    if "eta" in values:  # HyperBandScheduler
        values |= {"max_t": values["max_t_attr"], "reduction_factor": values["eta"]}
    if "brackets" in values:  # ASHAScheduler; a rung is a milestone and its results, the last first
        first, _ = values["brackets"][0]._rungs[-1]
        values |= {"brackets": len(values["brackets"]), "grace_period": first}
    arguments = {name: values.get(name) for name in inspect.signature(type(scheduler)).parameters}
    return {
        name: value
        for name, value in arguments.items()
        if isinstance(value, (bool, int, float, str)) and name not in ("metric", "mode")
    }


def format_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the call that makes an object, for messages."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def check_searcher(searcher: Any) -> Any:
    """Return the search algorithm to use: a `Searcher`, or a `BasicVariantGenerator`.

    Raises InputError if it is neither, or if it needs a scheduler that is not supported.
    """
    from ray.tune.search import BasicVariantGenerator, SearchGenerator

    if searcher is None:
        return BasicVariantGenerator()
    if isinstance(searcher, SearchGenerator):
        searcher = searcher.searcher
    if type(searcher) is BasicVariantGenerator:
        return searcher
    innermost = searcher
    while hasattr(innermost, "searcher"):  # a ConcurrencyLimiter or a Repeater
        innermost = innermost.searcher
    name = type(innermost).__name__
    if name in _REFUSED:
        raise InputError(
            f"searcher: {name} cannot be driven by cerebro.ray.fit: {_suggest_alternative(name)}"
        )
    missing = [n for n in ("suggest", "on_trial_complete") if not hasattr(searcher, n)]
    if missing or isinstance(searcher, type):
        raise InputError(
            f"searcher={searcher!r} is not a search algorithm of ray.tune: use OptunaSearch(...), "
            "another Searcher, or BasicVariantGenerator(...)"
        )
    return searcher


def _suggest_alternative(name: str) -> str:
    return _REFUSED.get(name, "which parts of Tune it needs is not known; " + _THROUGH_TUNER)

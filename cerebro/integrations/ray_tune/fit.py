"""Implement `cerebro.ray.fit`: Ray Tune's search algorithms and schedulers, in this process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from cerebro.api.search import search
from cerebro.arguments import SEARCH, check_whole_number, explain_keywords, list_words
from cerebro.errors import InputError
from cerebro.machine.guard import refuse
from cerebro.machine.imports import import_extra
from cerebro.space import Space

if TYPE_CHECKING:
    from cerebro.results.result import Result

DEFAULT_WIDTH = 8

_OWN = ("param_space", "scheduler", "num_samples")  # elsewhere other libraries' keywords

WORDS = {
    **{
        other: "num_samples" if word == "n_trials" else word
        for other, word in SEARCH.items()
        if other not in _OWN
    },
    **list_words(
        {
            "param_space": "space config params search_space",
            "searcher": "search_alg search_algorithm sampler algorithm",
            "scheduler": "pruner",
            "build": "trainable model train_fn run_or_experiment",
            "give its fields as keywords, such as metric=, num_samples= and run=": "tune_config "
            "run_config",
            "leave it out: Tune's searcher is in this process": "background",
            "leave it out: workers= and threads= set the resources": "resources_per_trial "
            "max_failures",
        }
    ),
}


@explain_keywords(WORDS, search, name="cerebro.ray.fit")
def fit(
    build: Callable[..., Any],
    data: Any,
    *,
    param_space: Mapping[str, Any],
    searcher: Any = None,
    scheduler: Any = None,
    metric: str | None = None,
    mode: Literal["min", "max"] | None = None,
    num_samples: int | None = None,
    n_trials: int | None = None,
    epochs: int | None = None,
    **options: Any,
) -> Result:
    """Search with Ray Tune's algorithms, without a cluster and without a process per trial.

    One call replaces Tune's ``tune.Tuner(trainable, param_space=...,
    tune_config=tune.TuneConfig(...)).fit()``. The search algorithm and the scheduler run in this
    process, in an order that does not depend on timing; Cerebro's workers train.

    Parameters
    ----------
    build, data
        As for `cerebro.search`.
    param_space
        Tune's dictionary: dimensions such as `tune.uniform`, `tune.grid_search`,
        `tune.sample_from`, constants (a list is a constant, as in Tune) and nested dictionaries.
    searcher
        A `ray.tune.search.Searcher` such as `OptunaSearch`, possibly in a `ConcurrencyLimiter`, or
        a `BasicVariantGenerator`; None: a `BasicVariantGenerator`. Give a searcher its own seed.
    scheduler
        `ASHAScheduler`, `HyperBandScheduler`, `MedianStoppingRule` (with
        ``time_attr="training_iteration"``) or `FIFOScheduler` (default). It measures time in
        epochs.
    metric, mode
        The metric that ranks trials, and its direction; default: those of the searcher or the
        scheduler, else ``"loss"``.
    num_samples
        As in `tune.TuneConfig`: the number of samples for each combination of grids, or of trials
        of a searcher; -1 sets no limit and needs `time_limit`. Default 1; required with a searcher.
        A resumed run may have more, except with a scheduler that pauses trials.
    n_trials
        The largest number of trials; as for `num_samples`.
    epochs
        The number of epochs per trial; default: the scheduler's ``max_t``.
    options
        The other arguments of `cerebro.search`. The default of `width`, the number of live trials,
        is the limit of a `ConcurrencyLimiter`, else 8.

    Returns
    -------
    Result
        As from `cerebro.search`. Trials that the scheduler ended are ``stopped``.

    Raises
    ------
    InputError
        If Ray is not installed, or if a searcher or scheduler cannot be used this way (the message
        names an alternative), or if a resumed run cannot have this `num_samples`; also as for
        `cerebro.search`.

    Notes
    -----
    The same call with ``if_exists="resume"`` resumes a run; create the searcher and the scheduler
    with the same arguments as before. With a larger `num_samples`, even a finished run goes on.
    Schedulers that pause trials (`HyperBandScheduler`, ``MedianStoppingRule(hard_stop=False)``)
    cannot have more trials afterwards: they have already chosen among the earlier ones.
    """
    refuse("cerebro.ray.fit")
    import_extra("ray.tune", "ray", "cerebro.ray.fit needs Ray Tune")
    from cerebro.integrations.ray_tune.searcher import TuneSearcher

    if not isinstance(param_space, Mapping):
        raise InputError(f"param_space must be a dictionary as for tune.Tuner, not {param_space!r}")
    the_scheduler, algorithm = check_scheduler(scheduler), check_searcher(searcher)
    options.setdefault("width", _find_width(algorithm))
    recorded_space = Space({})
    with contextlib.suppress(InputError):  # not everything of Tune's is a dimension of Cerebro's
        recorded_space = Space(param_space)
    return search(
        build,
        recorded_space,
        data,
        epochs=_choose_epochs(epochs, the_scheduler),
        n_trials=n_trials,
        background=False,
        searcher=TuneSearcher(
            param_space,
            algorithm,
            the_scheduler,
            _choose_samples(num_samples, n_trials, algorithm, options),
        ),
        metric=_choose_setting("metric", metric, algorithm, the_scheduler) or "loss",
        mode=_choose_setting("mode", mode, algorithm, the_scheduler),
        **options,
    )


def _choose_setting(name: str, value: Any, *sources: Any) -> Any:
    """Return an argument; if it is None, return the value of the searcher or the scheduler."""
    if value is not None:
        return value
    values = [getattr(source, f"_{name}", None) for source in sources]
    setting = next((value for value in values if value is not None), None)
    if isinstance(setting, (list, tuple)):
        raise InputError(
            f"searcher: it has several objectives ({name}={setting!r}); Cerebro optimizes one"
        )
    return setting


def _choose_epochs(epochs: int | None, scheduler: Any) -> int:
    if epochs is not None:
        return epochs
    for name in ("_max_t", "_max_t_attr"):
        if getattr(scheduler, name, None) is not None:
            return int(getattr(scheduler, name))
    raise InputError("epochs is missing: give epochs=, or a scheduler with max_t")


def _choose_samples(
    num_samples: int | None, n_trials: int | None, algorithm: Any, options: Mapping[str, Any]
) -> int:
    from ray.tune.search import BasicVariantGenerator

    if num_samples is None:
        if type(algorithm) is BasicVariantGenerator:
            return 1
        num_samples = -1
    if num_samples == -1 and n_trials is None and options.get("time_limit") is None:
        raise InputError(
            f"{type(algorithm).__name__} never ends by itself: give num_samples (the number of "
            "trials) or time_limit"
        )
    if num_samples == 0:
        raise InputError("num_samples=0 trains nothing: give at least 1")
    return -1 if num_samples == -1 else check_whole_number("num_samples", num_samples, 1, math.inf)


def _find_width(algorithm: Any) -> int:
    while algorithm is not None:
        limit = getattr(algorithm, "max_concurrent", None)
        if limit:
            return int(limit)
        algorithm = getattr(algorithm, "searcher", None)
    return DEFAULT_WIDTH


# --- what is supported -------------------------------------------------------------

# A scheduler or a search algorithm may use any part of Tune's controller. So only those whose
# requirements are known are supported.

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


def check_scheduler(scheduler: Any) -> Any:
    """Return the scheduler, or Tune's FIFO; raise InputError if it needs Tune's controller."""
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
        _refuse_class("scheduler", name)
    attribute = getattr(scheduler, "_time_attr", None)
    if attribute in CLOCKS:
        raise InputError(
            f"scheduler: {name}(time_attr={attribute!r}) decides by the clock, so that each run "
            "differs: give time_attr='training_iteration', and periods in epochs"
        )
    return scheduler


def check_searcher(searcher: Any) -> Any:
    """Return the `Searcher` or `BasicVariantGenerator`; raise InputError if it is unsupported."""
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
        _refuse_class("searcher", name)
    missing = [n for n in ("suggest", "on_trial_complete") if not hasattr(searcher, n)]
    if missing or isinstance(searcher, type):
        raise InputError(
            f"searcher={searcher!r} is not a search algorithm of ray.tune: use OptunaSearch(...), "
            "another Searcher, or BasicVariantGenerator(...)"
        )
    return searcher


def _refuse_class(what: str, name: str) -> NoReturn:
    why = _REFUSED.get(name, "which parts of Tune it needs is not known; " + _THROUGH_TUNER)
    raise InputError(f"{what}: {name} cannot be driven by cerebro.ray.fit: {why}")

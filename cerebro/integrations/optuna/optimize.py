"""Implement `cerebro.optuna.optimize`: a search whose searcher asks an Optuna study."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import optuna
from optuna.trial import FrozenTrial

from cerebro.api.search import search
from cerebro.arguments import (
    SEARCH,
    SHARED,
    check_optional_real,
    check_whole_number,
    explain_keywords,
    list_words,
    warn_user,
)
from cerebro.data.order import Shuffle
from cerebro.errors import InputError
from cerebro.integrations.optuna.study_searcher import (
    ParameterChooser,
    StudyOfRun,
    StudySearcher,
    Watcher,
)
from cerebro.machine.files import path_of
from cerebro.machine.guard import refuse
from cerebro.run.recipe import StudyBuild, check_build
from cerebro.searchers.metrics import metric_mode

if TYPE_CHECKING:
    from cerebro.results.result import Result

WORDS = {
    **SHARED,
    **{other: word for other, word in SEARCH.items() if word == "n_trials"},
    **list_words(
        {
            "timeout": "max_time time_budget_s",
            "define": "space config param_space search_space param_distributions",
            "catch": "except errors",
            "the study has one: optuna.create_study(direction='maximize')": "direction mode",
            "Cerebro optimizes one metric: create the study with direction=": "directions",
            "the study has one: optuna.create_study(sampler=..., pruner=...)": "sampler pruner "
            "searcher scheduler",
            "leave it out: models are built in worker processes": "gc_after_trial",
            "leave it out: the value of a study's trial is that of its last epoch": "select",
            "leave it out: a run= that exists is resumed": "if_exists",
            "enqueue them: study.enqueue_trial(...)": "points",
            "leave it out: the study is in this process": "background",
            "leave it out: a study suggests and receives trials in rounds": "asynchronous",
        }
    ),
}


@explain_keywords(WORDS, search, ("run_callbacks",), "cerebro.optuna.optimize")
def optimize(
    study: optuna.Study,
    build: Callable[..., Any],
    data: Any,
    *,
    define: Callable[[optuna.Trial], Mapping[str, Any]] | None = None,
    n_trials: int | None = None,
    epochs: int,
    validation: Any = None,
    metric: str = "loss",
    width: int = 8,
    workers: int | None = None,
    threads: int = 1,
    batch_size: int | None = None,
    timeout: float | None = None,
    catch: type[Exception] | Sequence[type[Exception]] = (),
    callbacks: Sequence[Callable[[optuna.Study, FrozenTrial], None]] = (),
    run: str | os.PathLike[str] | None = None,
    progress: Literal["auto", "table", "lines"] | bool = "auto",
    shuffle: Shuffle | None = None,
    **options: Any,
) -> Result:
    """Train the trials of an Optuna study by model hopper parallelism.

    Parameters
    ----------
    study
        A study with one objective. Its sampler, pruner, storage and direction are used.
    build
        ``build(trial)`` or ``build(trial, info)``: suggests hyperparameters and returns a model. It
        is called once per trial in this process, in the order of the trials' numbers, with the
        study's trial. Workers call it again with an `optuna.trial.FixedTrial` of the same values,
        number and attributes, whose ``study`` has a name, a direction, and a ``stop()`` that does
        nothing.
    data, epochs, validation, metric, width, workers, threads, batch_size, shuffle, run, progress
        As for `cerebro.search`; `batch_size` may be suggested under that name instead.
    define
        ``define(trial)`` makes the suggestions that `build` will make, so that no model is
        built in this process. It returns a mapping to add to the configuration, or None.
    n_trials
        Trials that the run adds to the study, including pruned and failed ones. None: until
        `timeout`, or until a callback stops the study. If `run` exists and has fewer, the same call
        with a larger number adds the difference.
    timeout
        Seconds after which no new trial starts; active trials are trained to completion. To
        interrupt these too, pass `cerebro.search`'s argument ``time_limit=``.
    catch
        Exceptions, including their subclasses, that fail only their trial: its state becomes FAIL,
        and the study continues. Any other exception ends the study, as in `optuna.Study.optimize`.
        `optuna.TrialPruned`, raised in `build` or during training, makes its trial PRUNED. A run
        whose trials have all failed still ends with a RunError.
    callbacks
        Called with the study and each finished trial, in the order of rounds and, within a round,
        of trial numbers. They may call ``study.stop()``.
    options
        More arguments of `cerebro.search`, such as ``seed`` or ``keep``.

    Returns
    -------
    Result
        The run. In the study, ``trial.system_attrs["cerebro"]`` has the run's folder and the
        trial's number in the run.

    Raises
    ------
    InputError
        If the study has several objectives, its storage cannot be written, or the run belongs to a
        different study.
    RunError
        If a trial raises an exception that is not in `catch`.

    Notes
    -----
    If `run` exists, it is resumed: active trials continue from their last committed unit, and no
    trial of a dead process remains RUNNING in the study. A finished run with `n_trials` trials is
    returned unchanged; to add as many again, give another `run`.

    Every epoch's metric is reported as an intermediate value, with the epoch, from 0, as its step;
    the value of a trial is the metric of its last epoch. The pruner is called after every epoch but
    the last. Metrics that are not finite are handled as in Optuna: pruners prune NaN, infinity is a
    valid value, and a trial whose value is NaN fails.
    """
    refuse("cerebro.optuna.optimize")
    check_whole_number("epochs", epochs, 1)
    n_trials = check_whole_number("n_trials", n_trials, 1, optional=True)
    timeout = check_optional_real("timeout", timeout, above=0)
    check_study(study, metric, epochs)
    check_build(build)
    if define is not None and not callable(define):
        raise InputError(f"define must be a function, not {define!r}")
    observers = _check_several("callbacks", callbacks, callable, "functions")
    caught = _check_several(
        "catch",
        catch,
        lambda kind: isinstance(kind, type) and issubclass(kind, Exception),
        "exceptions' classes",
    )
    folder = None if run is None else path_of("run", run)
    searcher = StudySearcher(
        StudyOfRun(study, str(folder or ""), observers),
        ParameterChooser(build, define, batch_size),
        n_trials=n_trials,
        epochs=epochs,
        metric=metric,
        timeout=timeout,
        catch=caught,
    )
    try:
        result = search(
            StudyBuild(build),
            {},
            data,
            epochs=epochs,
            n_trials=None,
            validation=validation,
            searcher=searcher,
            metric=metric,
            mode="min" if study.direction is optuna.study.StudyDirection.MINIMIZE else "max",
            select="last",
            batch_size=batch_size,
            shuffle=shuffle,
            width=width,
            workers=workers,
            threads=threads,
            run=run,
            background=False,
            if_exists="error" if run is None else "resume",
            progress=progress,
            callbacks=[Watcher(searcher), *options.pop("run_callbacks", ())],
            **options,
        )
    except BaseException:
        with contextlib.suppress(Exception):  # the storage may be what has failed
            searcher.close()
        raise
    searcher.close()
    return result


def check_study(study: optuna.Study, metric: str, epochs: int) -> None:
    """Raise InputError for a study that cannot be optimized; warn of likely mistakes."""
    if not isinstance(study, optuna.Study):
        raise InputError(
            f"study must be an optuna.Study, not {study!r}: make one with optuna.create_study(...)"
        )
    if len(study.directions) != 1:
        raise InputError(
            f"the study {study.study_name!r} has several objectives, but Cerebro optimizes one: "
            "create it with direction= instead of directions="
        )
    if study._thread_local.in_optimize_loop:
        raise InputError(
            f"the study {study.study_name!r} is being optimized: optimize() cannot be called for "
            "it in its own build or callbacks"
        )
    least, most = (getattr(study.pruner, f"_{end}_resource", None) for end in ("min", "max"))
    if isinstance(least, int) and isinstance(most, int) and most < least:
        raise InputError(
            f"the pruner's max_resource={most} is below its min_resource={least}, so it would "
            f"never prune: give max_resource={epochs}, the epochs, and a smaller min_resource"
        )
    if isinstance(least, int) and least > epochs:
        warn_user(
            f"the pruner's min_resource={least} is above epochs={epochs}: it will prune nothing"
        )
    direction = study.direction.name.lower()
    with contextlib.suppress(InputError):  # for a metric that is not well known
        usual = "minimize" if metric_mode(metric) == "min" else "maximize"
        if direction != usual:
            warn_user(
                f"the study {study.study_name!r} is to {direction} {metric}: if that is not meant, "
                f"create it with direction={usual!r}"
            )


def _check_several(name: str, value: Any, fits: Callable[[Any], bool], of: str) -> tuple[Any, ...]:
    """Return one value or an iterable of them as a tuple; raise InputError if any is invalid."""
    values = tuple(value) if hasattr(value, "__iter__") else (value,)
    if not all(map(fits, values)):
        raise InputError(f"{name} must be a list of {of}, not {value!r}")
    return values

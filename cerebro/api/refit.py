"""Implement `cerebro.refit`: train a configuration once more, on all rows."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Literal

from cerebro.api.replay import find_trial
from cerebro.api.search import search
from cerebro.errors import InputError, shorten_tracebacks
from cerebro.machine.guard import refuse
from cerebro.results.result import Result, open_run
from cerebro.results.trial import Trial
from cerebro.run.settings import Batches, Exactness
from cerebro.searchers.metrics import known_mode
from cerebro.space import choice

_KEPT = [field.name for group in (Batches, Exactness) for field in fields(group)]
"""The settings of a run that affect a trial."""


@shorten_tracebacks
def refit(
    run: str | os.PathLike[str] | Result,
    trial: int | Trial | None = None,
    *,
    epochs: int | None = None,
    data: Any = None,
    build: Callable[..., Any] | None = None,
    folder: str | os.PathLike[str] | None = None,
    if_exists: Literal["error", "resume", "new"] = "error",
    workers: int = 1,
    devices: Any = "auto",
    callbacks: Sequence[Any] = (),
    progress: Literal["auto", "table", "lines"] | bool = "auto",
) -> Result:
    """Train a configuration of a search once more, on all rows, to get a final model.

    After a search with folds, each fold has a model that has not seen all rows. `refit` trains the
    final model in an ordinary run of one trial without validation, with the search's seed, batch
    sizes and threads. `replay` and `resume` work on this run as on any other.

    Parameters
    ----------
    run
        The search: its folder or its result.
    trial
        The configuration, given as a trial or its number; default: the best.
    epochs
        Default: the number of epochs after which the trial had its selected metric (with folds, the
        best mean). ``info.epochs`` is this number, so a schedule over ``info.total_steps`` has the
        right length.
    data
        The rows to train on. Default: all rows of a search with folds. For other searches it is
        required: the dataset before it was split, for example.
    build
        The search's ``build``, if it cannot be imported again.
    folder
        The new run's folder; default: the search's folder with ``-refit`` appended.
    if_exists, workers, devices, callbacks, progress
        As for `cerebro.search`. One trial keeps only one worker busy.

    Returns
    -------
    Result
        The new run. ``result.best.load()`` returns the model after its last epoch. Its metric is
        the search's, measured in training; if the model reports that one only in validation, it is
        the loss or another metric that the model reports in training.

    Raises
    ------
    InputError
        If there is no such trial, if it has not finished an epoch, or if `data` is missing.
    RunError
        If the trial failed.
    """
    refuse("cerebro.refit")
    searched = open_run(run, build=build)
    if isinstance(trial, Trial) and trial.fold is not None:
        raise InputError("trial must be a configuration, not one of its folds")
    the_trial = searched.best if trial is None else find_trial(searched, trial)
    if data is None:
        if searched.saved.folds() is None:
            raise InputError(
                f"{searched.path}: without folds, the run's rows are those that trial "
                f"{the_trial.number} was already trained on: give data=, such as the dataset "
                "before it was split"
            )
        data = searched.saved.dataset("data")
    if epochs is None:
        last = the_trial.best_epoch if searched.select == "best" else the_trial.epoch - 1
        if last is None or last < 0:
            raise InputError(f"trial {the_trial.number} has finished no epoch: give epochs=")
        epochs = last + 1
    settings = searched.settings
    metric, mode = _ranking_of(the_trial, searched.metric, searched.mode)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no validation data", UserWarning)
        return search(
            searched.saved.find_build(build),
            {name: choice([value]) for name, value in the_trial.config.items()},
            data,
            epochs=epochs,
            n_trials=1,
            metric=metric,
            mode=mode,
            select="last",
            keep="last",
            run=f"{searched.path}-refit" if folder is None else folder,
            if_exists=if_exists,
            workers=workers,
            devices=devices,
            callbacks=callbacks,
            progress=progress,
            **{name: settings[name] for name in _KEPT},
        )


def _ranking_of(trial: Trial, metric: str, mode: str) -> tuple[str, Any]:
    """Return a metric that the model reports in training, the search's if possible, and its mode.

    `search` refuses a metric that the model does not report; `Result.best` needs a finite one.
    """
    metrics = trial.metrics
    trained = [name for name in metrics if math.isfinite(metrics.get(f"train_{name}", math.nan))]
    short = metric.removeprefix("val_").removeprefix("train_")
    if short in trained:
        return short, mode
    # With folds, there are also standard deviations, which a run without folds lacks. Their names
    # come after those of their metrics.
    other = "loss" if "loss" in trained else min(trained, default=short)
    return other, known_mode(other) or mode

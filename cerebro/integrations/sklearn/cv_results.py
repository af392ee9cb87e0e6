"""The results of `SearchCV`, as scikit-learn's searches have them."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

from cerebro.arguments import find_stacklevel
from cerebro.integrations.sklearn.choices import Originals, restore_choices
from cerebro.integrations.sklearn.configured import SCORE
from cerebro.results.result import Result


def conclude(result: Result, originals: Originals, refit: Any) -> dict[str, Any]:
    """Return the fitted attributes that tell how a run's configurations compare.

    `refit` is `SearchCV`'s; warns of configurations without a score.
    """
    trials = result.trials
    failed = [trial for trial in trials if trial.status in ("failed", "diverged")]
    if failed:
        warnings.warn(
            f"{len(failed)} of {len(trials)} configurations failed, the first: {failed[0].error}",
            stacklevel=find_stacklevel(),
        )
    table = cv_results(result, originals)
    means = table["mean_test_score"]
    if not failed and not np.isfinite(means).all():
        warnings.warn(
            f"One or more of the test scores are non-finite: {means}", stacklevel=find_stacklevel()
        )
    if callable(refit):
        index = _check_index(refit(table), len(trials))
    else:
        # `Result.best` may be a configuration that failed later; here it has no score.
        lost = {trial.number for trial in failed}
        scored = (t.number for t in result.top(len(trials)) if t.number not in lost)
        index = next(scored, result.best.number)
    return {
        "cv_results_": table,
        "best_index_": index,
        "best_params_": table["params"][index],
        "best_score_": float(means[index]),
        "best_epochs_": int(table["epochs"][index]),
    }


def cv_results(result: Result, originals: Originals) -> dict[str, Any]:
    """Return a run with folds as scikit-learn's table of a search: one value per configuration."""
    from scipy.stats import rankdata

    trials = result.trials
    scores = np.array(
        [[fold.metrics.get(SCORE, math.nan) for fold in trial.folds] for trial in trials], float
    )
    scores[[trial.status in ("failed", "diverged") for trial in trials]] = math.nan
    params = [restore_choices(trial.config, originals) for trial in trials]
    table: dict[str, Any] = _collect_times(result, scores.shape)
    for name in sorted({name for config in params for name in config}):
        column = np.ma.MaskedArray(np.empty(len(params), object), mask=True)
        for number, config in enumerate(params):
            if name in config:
                column[number] = config[name]
        table[f"param_{name}"] = column
    table["params"] = params
    for fold in range(scores.shape[1]):
        table[f"split{fold}_test_score"] = scores[:, fold]
    table["mean_test_score"] = scores.mean(axis=1)
    table["std_test_score"] = scores.std(axis=1)
    # The highest mean has rank 1, ties share the lowest rank, NaN comes last.
    losses = np.where(np.isnan(table["mean_test_score"]), np.inf, -table["mean_test_score"])
    table["rank_test_score"] = rankdata(losses, method="min").astype(np.int32)
    table["epochs"] = np.array(
        [t.epoch if t.best_epoch is None else t.best_epoch + 1 for t in trials], np.int64
    )
    table["status"] = np.array([trial.status for trial in trials])
    return table


def _collect_times(result: Result, shape: tuple[int, ...]) -> dict[str, Any]:
    seconds = {"train": np.zeros(shape), "eval": np.zeros(shape)}
    for unit in result.units():
        seconds[unit["kind"]][unit["trial"], unit["fold"]] += unit["end"] - unit["start"]
    table = {}
    for name, kind in (("fit", "train"), ("score", "eval")):
        table[f"mean_{name}_time"] = seconds[kind].mean(axis=1)
        table[f"std_{name}_time"] = seconds[kind].std(axis=1)
    return table


def _check_index(index: Any, count: int) -> int:
    """Return `index`, the return value of the function `refit`, as an int after checking it."""
    if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
        raise TypeError(f"refit must return the index of a configuration, an int, not {index!r}")
    if not 0 <= index < count:
        raise IndexError(f"refit returned the index {index}, but there are {count} configurations")
    return int(index)

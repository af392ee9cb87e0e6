"""Determine whether a metric is minimized; stop trials that no longer improve or fall behind."""

from __future__ import annotations

import difflib
import math
import re
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from cerebro.arguments import check_real_number, check_whole_number
from cerebro.errors import InputError
from cerebro.searchers.base import (
    DONE,
    AdaptiveSearcher,
    Decision,
    Suggested,
    decode_values,
    encode_values,
)

Mode = Literal["min", "max"]

_MIN = """
    loss nll bce cross_entropy crossentropy log_loss logloss hinge kl kl_divergence
    mse mae rmse rmsle msle mape smape medae mean_squared_error mean_absolute_error
    root_mean_squared_error mean_absolute_percentage_error huber
    error error_rate err zero_one_loss perplexity ppl bits_per_byte bpb bits_per_character bpc
    brier brier_score ece calibration_error wer cer ter fid inertia
"""
_MAX = """
    accuracy acc balanced_accuracy top1 top5 top1_accuracy top5_accuracy
    binary_accuracy categorical_accuracy
    auc roc_auc auroc pr_auc auprc average_precision ap map mean_average_precision
    f1 f1_score f1_macro f1_micro f_score fbeta precision recall sensitivity specificity
    r2 r2_score explained_variance correlation pearson spearman kendall
    iou miou mean_iou jaccard dice psnr ssim bleu rouge rouge1 rouge2 rougel meteor
    ndcg mrr hit_rate recall_at_k precision_at_k mcc kappa cohen_kappa em exact_match
"""


def known_mode(metric: str) -> Mode | None:
    """Return whether a well-known metric is minimized or maximized; None for others."""
    name = _normalize_name(metric)
    if name in _MIN.split():
        return "min"
    return "max" if name in _MAX.split() else None


def find_nearest(metric: str, names: Iterable[str]) -> str | None:
    """Return the name that is most like a metric, such as ``accuracy`` for ``acc``; or None."""
    prefix = next((start for start in ("val_", "train_") if metric.startswith(start)), "")
    originals = {
        name.removeprefix(prefix).lower(): name
        for name in names
        if (name.startswith(prefix) if prefix else not name.startswith(("val_", "train_")))
    }
    stem = metric.removeprefix(prefix).lower()
    short = [name for name in originals if _abbreviates(name, stem) or _abbreviates(stem, name)]
    near = short[:1] or difflib.get_close_matches(stem, originals, 1)
    return originals[near[0]] if near else None


def _abbreviates(short: str, name: str) -> bool:
    """Return whether a name is the beginning of a word of another one, or its initials."""
    words = re.split(r"[_\W]+", name)
    initials = "".join(word[:1] for word in words)
    return len(short) > 1 and (short == initials or any(w.startswith(short) for w in words))


def _normalize_name(metric: str) -> str:
    return metric.lower().removeprefix("val_").removeprefix("train_").replace("-", "_")


def metric_mode(metric: Any, mode: str | None = None, *, argument: str = "metric") -> Mode:
    """Return whether `metric` is minimized or maximized; raise InputError if this is unknown."""
    if not isinstance(metric, str) or not metric:
        raise InputError(f"{argument} must be the name of a metric, not {metric!r}")
    if mode is not None:
        if mode not in ("min", "max"):
            raise InputError(f"mode must be 'min' or 'max', not {mode!r}")
        return cast(Mode, mode)
    usual = known_mode(metric)
    if usual is not None:
        return usual
    name = _normalize_name(metric)
    place = "" if argument == "metric" else f"{argument}: "
    near = difflib.get_close_matches(name, [*_MIN.split(), *_MAX.split()], 1)
    meant = ": for"
    if near:  # with the prefix of the given name
        meant = f"; did you mean {metric[: len(metric) - len(name)] + near[0]!r}? For"
    raise InputError(
        f"{place}unknown metric {metric!r}{meant} a metric of your own, pass mode='min' or "
        "mode='max'"
    )


@dataclass(frozen=True)
class EarlyStopping:
    """Stop a trial whose metric has not improved for some epochs.

    Whether a trial stops depends only on its own history, never on timing (Prechelt, "Early
    stopping - but when?", 1998).

    Parameters
    ----------
    monitor
        The metric's name, as in ``history``: ``"loss"``, ``"val_accuracy"``.
    patience
        The number of epochs without improvement after which a trial stops; 0 means 1, as in Keras
        and Lightning.
    min_delta
        The smallest change that counts as an improvement, at least 0.
    mode
        ``"min"`` or ``"max"``; not needed for well-known metrics.

    Raises
    ------
    InputError
        If a value is out of range, or the metric's mode is unknown.
    """

    monitor: str = "loss"
    patience: int = 3
    min_delta: float = 0.0
    mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        patience = check_whole_number("EarlyStopping: patience", self.patience, 0, math.inf)
        min_delta = check_real_number("EarlyStopping: min_delta", self.min_delta, least=0)
        object.__setattr__(self, "patience", patience)
        object.__setattr__(self, "min_delta", min_delta)
        metric_mode(self.monitor, self.mode, argument="EarlyStopping: monitor")

    def check_metrics(self, metrics: Iterable[str]) -> None:
        """Raise InputError unless `monitor` is among the metrics that a model reports."""
        names = sorted(metrics)
        if self.monitor not in names:
            near = find_nearest(self.monitor, names)
            raise InputError(
                f"EarlyStopping: the model reports no metric {self.monitor!r}; it reports "
                f"{', '.join(names)}{(near and f': did you mean monitor={near!r}?') or ''}"
            )

    def should_stop(self, history: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether a trial with this history should stop."""
        sign = 1.0 if metric_mode(self.monitor, self.mode) == "min" else -1.0
        best, waited = float("inf"), 0
        for epoch in history:
            self.check_metrics(epoch["metrics"])
            value = sign * epoch["metrics"][self.monitor]
            if value < best - self.min_delta:
                best, waited = value, 0
            else:
                waited += 1
        return waited >= max(self.patience, 1)


class MedianStopping(AdaptiveSearcher):
    """Random search that stops a trial whose best value so far is worse than the median of
    the other trials' average values up to the same epoch.

    The rule of Golovin et al., "Google Vizier: A Service for Black-Box Optimization", KDD 2017,
    section 3.2.2.

    Parameters
    ----------
    grace_epochs
        The number of epochs before a trial may be stopped.
    min_trials
        The number of other trials that must have reached the same epoch.
    """

    _endless = "median stopping"
    _shown = ("grace_epochs", "min_trials")

    def __init__(self, grace_epochs: int = 1, min_trials: int = 3) -> None:
        self._grace_epochs = check_whole_number("grace_epochs", grace_epochs, 1, math.inf)
        self._min_trials = check_whole_number("min_trials", min_trials, 1, math.inf)

    def _prepare(self) -> None:
        self._best: dict[int, float] = {}
        self._sums: dict[int, float] = {}
        self._averages: list[list[float]] = []  # by epoch: of all trials so far, sorted

    def suggest(self) -> Suggested:
        """Return a new trial, which trains to the end unless it is stopped."""
        return self._suggest_new(self._epochs) if self._next < self._limit else DONE

    def _decide(self, trial: int, epoch: int, value: float) -> Decision:
        if not math.isfinite(value):
            self._forget(trial)
            return Decision.STOP
        self._best[trial] = min(value, self._best.get(trial, math.inf))
        self._sums[trial] = self._sums.get(trial, 0.0) + value
        while len(self._averages) <= epoch:
            self._averages.append([])
        others = self._averages[epoch]
        stops = False
        if epoch + 1 > self._grace_epochs and len(others) >= self._min_trials:
            half = len(others) // 2  # they are sorted
            middle = others[half] if len(others) % 2 else (others[half - 1] + others[half]) / 2
            stops = self._best[trial] > middle
        insort(others, self._sums[trial] / (epoch + 1))
        if stops or epoch + 1 == self._epochs:
            self._forget(trial)
        return Decision.STOP if stops else Decision.CONTINUE

    def _forget(self, trial: int) -> None:
        """Drop values that are needed only while the trial trains."""
        self._best.pop(trial, None)
        self._sums.pop(trial, None)

    def _state(self) -> dict[str, Any]:
        averages = [list(epoch) for epoch in self._averages]
        sums = [[trial, value] for trial, value in self._sums.items()]
        return {"best": encode_values(self._best), "sums": sums, "averages": averages}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._best, self._sums = decode_values(state["best"]), decode_values(state["sums"])
        self._averages = [[float(v) for v in epoch] for epoch in state["averages"]]

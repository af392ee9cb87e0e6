"""Determine whether a metric should be minimized or maximized."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Literal, cast

from cerebro.errors import InputError

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


def metric_mode(metric: str, mode: str | None = None, *, argument: str = "metric") -> Mode:
    """Return whether `metric` is minimized or maximized; raise InputError if this is unknown."""
    if mode is not None:
        if mode not in ("min", "max"):
            raise InputError(f"mode must be 'min' or 'max', not {mode!r}")
        return cast(Mode, mode)
    if not isinstance(metric, str):
        raise InputError(f"{argument} must be the name of a metric, not {metric!r}")
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

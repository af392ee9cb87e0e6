"""Find likely mistakes in outputs by comparing the loss with its expected value.

This is for models whose functions cannot be observed, because their loss is compiled, as in JAX, or
external.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cerebro.data.dtypes import Array
from cerebro.report.findings import Finding

LEAST_ROWS = 4


def check_same_outputs(outputs: Any, inputs: list[Array]) -> Iterator[Finding]:
    """Report if all rows of a batch have the same output although their inputs differ."""
    if not _is_rows(outputs) or not any(bool((x[1:] != x[:1]).any()) for x in inputs):
        return
    if len(outputs) >= LEAST_ROWS and bool(np.all(outputs == outputs[:1])):
        yield Finding(
            "same-output",
            f"all {len(outputs)} rows of a batch have the same output",
            "look for ReLUs that are always 0, weights that begin at 0, or unused inputs",
        )


def check_majority(outputs: Any, target: Array, share: float) -> Iterator[Finding]:
    """Report if a classifier predicts the same class for all rows of imbalanced data."""
    if not _is_rows(outputs) or share < 0.8 or len(np.unique(target)) < 2:
        return
    if outputs.ndim == 1 or outputs.shape[1] == 1:
        return
    if len(np.unique(outputs.argmax(1))) == 1:
        yield Finding(
            "majority-class",
            f"all rows get the same class, which gives an accuracy of {share:.0%}, the share "
            "of that class",
            "rank trials by balanced accuracy, F1 or AUC (epoch_metrics=), or weight the loss",
            "hint",
        )


def check_loss(outputs: Any, target: Array, loss: float) -> Iterator[Finding]:
    """Compare the reported loss with the losses that correct and incorrect use would give."""
    if not _is_rows(outputs) or len(outputs) != len(target) or len(outputs) < LEAST_ROWS:
        return
    values, targets = outputs.astype(np.float64), target.astype(np.float64)
    if values.shape[1:] == (1,) and targets.ndim == 1:
        yield from _check_broadcast(values, targets, loss)
        if loss == 0 and target.dtype.kind in "iu":
            yield Finding(
                "one-output",
                "cross entropy over one output is always 0",
                "give the network an output for each class, or use a binary cross entropy",
            )
    if is_cross_entropy(outputs, target, loss):
        inside = values.min() >= 0 and values.max() <= 1
        if inside and bool(np.all(np.abs(values.sum(1) - 1) < 1e-3)):
            yield Finding(
                "softmax-before-cross-entropy",
                "the outputs are probabilities, and the loss applies softmax again",
                "leave softmax out of the network: return logits",
            )


def is_cross_entropy(outputs: Any, target: Array, loss: float) -> bool:
    """Return whether a loss is the softmax cross entropy of outputs of shape (rows, classes)."""
    if not _is_rows(outputs) or outputs.ndim != 2 or outputs.shape[1] < 2:
        return False
    if target.dtype.kind not in "iu" or target.shape != outputs.shape[:1]:
        return False
    valid = (target >= 0) & (target < outputs.shape[1])
    if not valid.all():
        return False
    logits = outputs.astype(np.float64)
    logits = logits - logits.max(1, keepdims=True)
    log_sums = np.log(np.exp(logits).sum(1))
    rows = np.arange(len(logits))
    entropy = float(np.mean(log_sums - logits[rows, target]))
    with np.errstate(all="ignore"):
        likelihood = float(-np.mean(np.log(outputs[rows, target])))  # if they are probabilities
    return _is_near(entropy, loss) and not _is_near(likelihood, loss)


def _check_broadcast(outputs: Array, target: Array, loss: float) -> Iterator[Finding]:
    spread, right = outputs - target, outputs[:, 0] - target
    for norm in (np.square, np.abs):
        wrong, meant = float(norm(spread).mean()), float(norm(right).mean())
        if _is_near(wrong, loss) and not _is_near(meant, loss):
            n = len(target)
            yield Finding(
                "broadcast",
                f"shapes ({n},1) and ({n},) are compared, which gives {n} x {n} numbers",
                "make outputs and targets the same shape: outputs[:, 0], or target[:, None]",
            )
            return


def _is_rows(outputs: Any) -> bool:
    return isinstance(outputs, np.ndarray) and outputs.ndim > 0 and outputs.dtype.kind == "f"


def _is_near(left: float, right: float) -> bool:
    return abs(left - right) <= 1e-3 * max(abs(left), abs(right), 1e-6)

"""Find likely mistakes in the losses and metrics of a few steps on one batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cerebro.model import Words
from cerebro.report.findings import Finding

LEAST_STEPS = 4
GROWTH = 1000.0
"""If the loss on one batch grows by this factor, training has diverged."""
HUGE = 1e12
"""If the loss is above this value, training diverged in an earlier batch."""
LEAST_FALL = 1e-5
"""A loss has not fallen unless it falls by at least this share of its value."""

SIZES = (1, 2, 4)
"""How often a few rows are repeated, to see how the loss depends on the number of rows."""
SIZE_TOLERANCE = 0.01
SMALL = 1e-6
"""A loss of less than this says nothing about how it depends on the number of rows."""


def check_losses(losses: Sequence[float], *, opaque: bool) -> Iterator[Finding]:
    """Check the losses of training steps on one batch.

    `opaque` says whether the loss may be a share or a count, as in a model of the user's own class.
    """
    first = losses[0] if losses else 0.0
    bad = next((loss for loss in losses if not math.isfinite(loss)), None)
    if bad is not None:
        return  # `check_infinite` reports the cause
    if len(losses) < LEAST_STEPS:
        return
    if all(loss == first for loss in losses):
        yield Finding(
            "constant-loss",
            f"the loss is {first:.6g} in each of {len(losses)} training steps on one batch",
            "raise the learning rate, or check that the loss depends on the optimizer's parameters",
            "hint" if opaque or first == 0 else "matters",
        )
    elif max(losses) > HUGE or losses[-1] > GROWTH * max(abs(first), 0.1):
        yield Finding(
            "exploding-loss",
            f"the loss goes from {first:.4g} to {losses[-1]:.4g} in {len(losses)} training steps "
            "on one batch",
            "choose a smaller learning rate, scale inputs and targets, or give clip_norm",
            "hint" if opaque and max(losses) <= HUGE else "matters",
        )


def check_infinite(losses: Sequence[float], columns: str, missing: bool) -> Iterator[Finding]:
    """Report a loss that is not finite, and its cause.

    `columns` names columns with NaN or infinite values, or is empty. `missing` says whether the
    first loss was not finite.
    """
    bad = next((loss for loss in losses if not math.isfinite(loss)), None)
    if bad is None:
        return
    message = f"the loss is {bad} in the first training steps"
    cure = "look for log(0), a division by 0, or a square root of 0 in the loss"
    if not missing:
        cure = "choose a smaller learning rate, scale inputs and targets, or give clip_norm"
    if columns:  # which the model may handle
        cure = f"{columns}, which may be the cause: fill them, or drop these rows; or {cure}"
    yield Finding("loss-not-finite", message, cure)


def check_fall(
    losses: Sequence[float], before: float | None, after: float | None
) -> Iterator[Finding]:
    """Report if many steps on one batch did not lower its loss, in training or evaluation."""
    if len(losses) < 5 * LEAST_STEPS or not all(map(math.isfinite, losses)):
        return
    first, last = losses[0], sum(losses[-3:]) / 3
    if first - last > LEAST_FALL * abs(first) or all(loss == first for loss in losses):
        return
    if before is not None and after is not None and before - after > LEAST_FALL * abs(before):
        return
    if abs(last - first) <= LEAST_FALL * abs(first):
        said, cure = (
            "did not fall",
            "choose a larger learning rate, or see what the loss depends on",
        )
    else:
        said, cure = "rose", "choose a smaller learning rate, and see the sign of the loss"
    yield Finding(
        "loss-does-not-fall",
        f"{len(losses)} training steps on one batch: the loss {said}, "
        f"from {first:.4g} to {last:.4g}",
        cure,
        "hint",
    )


def check_metrics(
    before: Mapping[str, float], after: Mapping[str, float], losses: Sequence[float]
) -> Iterator[Finding]:
    """Report metrics that stay the same while the loss of the batch falls by half."""
    if len(losses) < LEAST_STEPS or not 0 <= 2 * losses[-1] < losses[0]:
        return
    for name, value in before.items():
        if name != "loss" and value == after.get(name) and value != 1:
            yield Finding(
                "constant-metric",
                f"the metric {name!r} stays at {value:.6g} while the loss falls from "
                f"{losses[0]:.4g} to {losses[-1]:.4g}",
                "check what it compares, and along which axis",
                "hint",
            )


def compare_evaluations(
    first: Mapping[str, float], second: Mapping[str, float], words: Words
) -> Iterator[Finding]:
    """Report a metric that differs between two evaluations of a batch with the same generators."""
    for name, value in first.items():
        other = second.get(name, math.nan)
        if not math.isclose(value, other, rel_tol=1e-4, abs_tol=1e-6) and value == value:
            yield Finding(
                "evaluation-changes-model",
                f"two evaluations of the same batch differ: {name!r} is {value:.6g}, then "
                f"{other:.6g}",
                f"leave out all that {words.evaluate} changes in the model, such as batch norm in "
                "training mode",
            )
            return


def repeat_rows(batch: Any) -> list[dict[str, Any]]:
    """Return batches with the same few rows of a batch, repeated as often as in `SIZES`.

    The list is empty unless the batch has only columns with one entry for each row. The largest
    batch has as many rows as `batch`, or up to four.
    """
    columns = batch if isinstance(batch, Mapping) else {}
    if not columns or not all(hasattr(column, "shape") for column in columns.values()):
        return []
    counts = {column.shape[0] if len(column.shape) else 0 for column in columns.values()}
    if len(counts) != 1 or 0 in counts:
        return []
    few = max(1, counts.pop() // SIZES[-1])
    return [
        {name: column[np.tile(np.arange(few), times)] for name, column in columns.items()}
        for times in SIZES
    ]


def check_sizes(losses: Sequence[float]) -> Iterator[Finding]:
    """Report a loss that is as many times larger as its rows are repeated.

    `losses` are of the same rows in evaluation, repeated as often as in `SIZES`.
    """
    if len(losses) != len(SIZES) or not abs(losses[0]) > SMALL:
        return
    grown = [loss / losses[0] for loss in losses]
    if all(math.isclose(*pair, rel_tol=SIZE_TOLERANCE) for pair in zip(grown, SIZES, strict=True)):
        yield Finding(
            "summed-loss",
            "the loss is a sum over the rows, so it grows with the batch size",
            "divide it by the number of rows",
        )

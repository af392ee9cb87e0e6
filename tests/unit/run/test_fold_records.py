"""What the folds of a configuration come to together."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cerebro.report import format as fmt
from cerebro.run.records import (
    EpochRecord,
    Status,
    TrialRecord,
    find_clash,
    gather_configurations,
    make_configuration,
    mean_and_std,
    mean_epoch,
    update_configuration,
)


def epoch(number: int, state_hash: str = "0", **metrics: float) -> EpochRecord:
    return EpochRecord(number, metrics, 1.5, state_hash, None)


def fold(number: int, done: int = 0, status: Status = "running", **more: Any) -> TrialRecord:
    epochs = [epoch(at, loss=number + at) for at in range(done)]
    return TrialRecord(number, {"lr": 1}, status, 4, epochs=epochs, **more)


def test_means_and_deviations() -> None:
    mean = mean_epoch(
        [epoch(2, "a", loss=1.0, only=1.0), epoch(2, "b", loss=2.0), epoch(2, "c", loss=6.0)]
    )
    assert mean.epoch == 2
    assert mean.metrics == {"loss": 3.0, "loss_std": pytest.approx(math.sqrt(14 / 3), abs=0)}
    assert mean.seconds == 4.5
    assert mean.state_file is None
    # What stands for the folds' states is theirs, in their order.
    other = mean_epoch([epoch(2, "b"), epoch(2, "a"), epoch(2, "c")])
    assert len(mean.state_hash) == 32
    assert mean.state_hash != other.state_hash


@pytest.mark.parametrize(
    ("values", "mean", "std"),
    [
        ([0.1] * 3, 0.1, 0.0),  # a naive sum would not give 0.1 again
        ([1e16, 1.0, -1e16], 1 / 3, math.sqrt(2e32 / 3)),
        ([1e308] * 4, 1e308, math.inf),
        ([1.0, math.nan], math.nan, math.nan),
        ([math.inf, 1.0], math.inf, math.nan),
        ([math.inf, -math.inf], math.nan, math.nan),
        ([5.0], 5.0, 0.0),
    ],
)
def test_means_of_odd_values(values: list[float], mean: float, std: float) -> None:
    assert mean_and_std(values) == pytest.approx((mean, std), rel=1e-15, nan_ok=True)


def test_a_configuration_has_the_epochs_of_its_slowest_fold() -> None:
    folds = [fold(6, 2), fold(7, 3), fold(8, 2)]
    whole = make_configuration(folds)
    assert (whole.number, whole.done, whole.status) == (2, 2, "running")
    assert [record.metrics["loss"] for record in whole.epochs] == [7.0, 8.0]
    assert [record.fold for record in whole.folds] == [0, 1, 2]
    folds[0].epochs.append(epoch(2, loss=0.0))
    assert update_configuration(whole) == []
    folds[2].epochs.append(epoch(2, loss=3.0))
    (new,) = update_configuration(whole)
    assert new is whole.epochs[2]
    assert new.metrics["loss"] == 4.0
    assert whole.best_epoch("loss", "min") == 2


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        (["waiting", "waiting"], "waiting"),
        (["waiting", "running"], "running"),
        (["paused", "running"], "running"),
        (["paused", "waiting"], "paused"),
        (["finished", "finished"], "finished"),
        (["finished", "stopped"], "stopped"),
        (["failed", "running"], "running"),
        (["failed", "waiting"], "waiting"),
        (["stopped", "failed"], "failed"),
        (["diverged", "stopped"], "diverged"),
    ],
)
def test_status_of_a_configuration(statuses: list[Status], status: str) -> None:
    folds = [fold(number, 1, each) for number, each in enumerate(statuses)]
    assert make_configuration(folds).status == status


def test_a_configuration_reports_the_fold_that_failed_first() -> None:
    folds = [
        fold(0, 3, "stopped"),
        fold(1, 3, "failed", error="late"),
        fold(2, 2, "diverged", error="the loss (a.py:1)", traceback="there"),
        fold(3, 2, "failed", error="second"),
    ]
    whole = make_configuration(folds)
    assert whole.status == "diverged"
    assert whole.error == "the loss (a.py:1); in fold 2"
    assert whole.traceback == "there"


def test_a_configuration_with_resumable_folds_is_open() -> None:
    folds = [fold(0, 1, "stopped", resumable=True), fold(1, 1, "stopped", resumable=True)]
    assert make_configuration(folds).is_open
    assert not make_configuration([fold(0, 1, "stopped"), fold(1, 1, "failed")]).is_open


def test_a_clone_counts_its_parents_epochs() -> None:
    folds = [
        TrialRecord(4 + n, {}, parent=n, parent_epoch=1, epochs=[epoch(2, loss=1.0)])
        for n in range(2)
    ]
    whole = make_configuration(folds)
    assert (whole.parent, whole.parent_epoch, whole.done) == (0, 1, 3)


def test_incomplete_configurations_are_left_out() -> None:
    assert [whole.number for whole in gather_configurations([fold(n) for n in range(8)], 3)] == [
        0,
        1,
    ]


def test_metrics_that_clash() -> None:
    assert find_clash(["loss", "std", "a_std"]) is None
    said = find_clash(["val_loss_std", "val_loss"])
    assert said is not None
    assert "the model reports 'val_loss' and 'val_loss_std'" in said


def test_mean_metrics_are_formatted_with_their_deviation() -> None:
    metrics = {"val_loss": 0.25, "val_loss_std": 0.0123, "loss": 0.25, "loss_std": 0.0123}
    assert fmt.mean_metric(metrics, "loss") == "0.2500 ± 0.0123"
    assert fmt.mean_metric({"loss": 1.0}, "loss") == "1.0000"
    assert fmt.full_names(metrics) == ["val_loss"]
    assert fmt.metric_columns([metrics | {"acc": 1.0, "acc_std": 0.0}], "loss") == [
        "val_loss",
        "acc",
    ]
    assert fmt.full_names(["my_std", "std"]) == ["my_std", "std"]

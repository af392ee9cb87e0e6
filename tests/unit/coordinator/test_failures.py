"""What is said of runs in which every trial failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from cerebro.coordinator.failures import explain_missing_metric, raise_if_all_failed
from cerebro.errors import RunError
from cerebro.model import Words
from cerebro.run.records import TrialRecord


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, "the only trial failed: it is bad"),
        (2, "both trials failed; the first: it is bad"),
        (3, "all three trials failed; the first: it is bad"),
        (10, "all ten trials failed; the first: it is bad"),
        (11, "all 11 trials failed; the first: it is bad"),
    ],
)
def test_an_error_is_raised_if_all_trials_failed(count: int, said: str) -> None:
    records = [TrialRecord(n, {}, "failed", error="it is bad") for n in range(count)]
    with pytest.raises(RunError) as caught:
        raise_if_all_failed(records)
    assert str(caught.value) == said
    records[0].traceback = "Traceback ..."
    with pytest.raises(RunError) as caught:
        raise_if_all_failed(records[:1], {"failed": count - 1}, Path("my runs/x"))
    command = "python -m cerebro logs 'my runs/x' --trial 0"
    assert str(caught.value) == f"{said}; its traceback: {command}"
    with pytest.raises(RunError) as caught:  # the run's folder will be removed
        raise_if_all_failed(records[:1], {"failed": count - 1})
    assert str(caught.value) == said


def test_one_successful_trial_prevents_the_error() -> None:
    records = [TrialRecord(0, {}, "failed", error="it is bad"), TrialRecord(1, {}, "finished")]
    raise_if_all_failed(records)


LOGS = Words("train", "check", "log it in train", "log it in check", by_step=True)


@pytest.mark.parametrize(
    ("name", "metrics", "words", "said"),
    [
        ("accuracy", "acc loss", Words(), "it reports acc, loss, train_acc, train_loss, val_acc, "
         "val_loss: did you mean metric='acc'?"),
        ("val_accuracy", "acc loss", Words(), "did you mean metric='val_acc'?"),
        ("auc", "roc_auc loss", Words(), "did you mean metric='roc_auc'?"),
        ("f1", "f1_score loss", Words(), "did you mean metric='f1_score'?"),
        ("mean_squared_error", "mse loss", Words(), "did you mean metric='mse'?"),
        ("acuracy", "accuracy loss", Words(), "did you mean metric='accuracy'?"),
        ("accuracy", "loss", Words(), "return it from train_batch and eval_batch, or give "
         "metric='loss'"),
        ("loss", "g_loss d_loss", Words(), "return it from train_batch and eval_batch, or give "
         "metric='d_loss'"),
        ("loss", "g_loss", LOGS, "log it in check, or give metric='g_loss'"),
        ("accuracy", "loss", Words.of_metrics("add it"), "add it, or give metric='loss'"),
        ("loss", "", Words(), "it reports none: return it from train_batch and eval_batch, or "
         "choose another metric="),
    ],
)  # fmt: skip
def test_a_missing_metric_is_explained(name: str, metrics: str, words: Words, said: str) -> None:
    prefixes = ("", "train_", "val_")
    reported = [f"{prefix}{each}" for prefix in prefixes for each in metrics.split()]
    text = explain_missing_metric(name, reported, validated=True, words=words)
    assert text is not None and text.endswith(said)
    assert text.startswith(f"the model reports no metric {name!r}; it reports ")
    assert all(explain_missing_metric(each, reported, validated=True, words=words) is None
               for each in reported)  # fmt: skip


def test_a_metric_reported_only_in_training_is_explained() -> None:
    names = ["loss", "train_loss"]
    text = explain_missing_metric("loss", names, validated=True, words=LOGS)
    assert text is not None and text.endswith(
        "in validation: log it in check, or rank by metric='train_loss'"
    )
    assert explain_missing_metric("loss", names, validated=False, words=LOGS) is None
    text = explain_missing_metric("acc", names, validated=False, words=LOGS)
    assert text is not None and text.endswith("log it in train, or give metric='loss'")

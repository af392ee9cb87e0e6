"""Which metrics are to be small and which large."""

from __future__ import annotations

import pytest

from cerebro.errors import InputError
from cerebro.searchers.metrics import metric_mode


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("loss", "min"),
        ("val_loss", "min"),
        ("train_rmse", "min"),
        ("Perplexity", "min"),
        ("log-loss", "min"),
        ("accuracy", "max"),
        ("val_roc_auc", "max"),
        ("F1", "max"),
        ("acc", "max"),
        ("auc", "max"),
        ("f1", "max"),
        ("r2", "max"),
        ("map", "max"),
    ],
)
def test_well_known_metrics(metric, mode):
    assert metric_mode(metric) == mode
    assert metric_mode(metric, "max") == "max"


def test_unknown_metrics_require_a_mode():
    assert metric_mode("revenue", "max") == "max"
    with pytest.raises(InputError, match="mode='min' or mode='max'"):
        metric_mode("revenue")
    with pytest.raises(InputError) as caught:
        metric_mode("acuracy")
    assert str(caught.value) == (
        "unknown metric 'acuracy'; did you mean 'accuracy'? For a metric of your own, pass "
        "mode='min' or mode='max'"
    )
    with pytest.raises(InputError, match=r"unknown metric 'val_Acuracy'; did you mean 'val_accu"):
        metric_mode("val_Acuracy")
    with pytest.raises(InputError, match=r"^EarlyStopping: monitor: unknown metric 'x': for"):
        metric_mode("x", argument="EarlyStopping: monitor")
    with pytest.raises(InputError, match="'min' or 'max', not 'up'"):
        metric_mode("loss", "up")
    with pytest.raises(InputError, match="name of a metric"):
        metric_mode(None)

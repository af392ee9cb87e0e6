from __future__ import annotations

import pytest

from cerebro.errors import InputError
from cerebro.searchers.metrics import EarlyStopping


def history(*values, name="loss"):
    return [{"epoch": i, "metrics": {name: v}} for i, v in enumerate(values)]


def test_patience_counts_epochs_without_improvement():
    rule = EarlyStopping("loss", patience=2)
    assert not rule.should_stop(history(3.0, 2.0, 2.5))
    assert rule.should_stop(history(3.0, 2.0, 2.5, 2.0))
    assert not rule.should_stop(history(3.0, 2.0, 2.5, 1.9))


def test_small_improvements_do_not_count():
    assert EarlyStopping("loss", patience=1, min_delta=0.5).should_stop(history(3.0, 2.6))


def test_accuracy_is_maximised():
    rule = EarlyStopping("accuracy", patience=1)
    assert not rule.should_stop(history(0.1, 0.2, name="accuracy"))
    assert rule.should_stop(history(0.2, 0.1, name="accuracy"))


def test_nan_is_no_improvement():
    assert EarlyStopping("loss", patience=1).should_stop(history(1.0, float("nan")))


def test_patience_zero_stops_at_the_first_epoch_without_improvement():
    rule = EarlyStopping("loss", patience=0)
    assert not rule.should_stop(history(3.0))
    assert not rule.should_stop(history(3.0, 2.0))
    assert rule.should_stop(history(3.0, 3.0))


@pytest.mark.parametrize("bad", [{"patience": -1}, {"min_delta": -1}, {"monitor": "quality"}])
def test_bad_arguments(bad):
    with pytest.raises(InputError):
        EarlyStopping(**bad)


def test_the_error_names_a_missing_metric():
    with pytest.raises(InputError, match="no metric 'accuracy'; it reports loss"):
        EarlyStopping("accuracy").should_stop(history(1.0))

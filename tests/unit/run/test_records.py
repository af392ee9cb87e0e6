"""`cerebro.run.records`: which epoch stands for a trial."""

from __future__ import annotations

import math

import pytest

from cerebro.coordinator.trial import LiveTrial
from cerebro.run.records import EpochRecord, Ranking, TrialRecord


def grown(values: list[float]) -> TrialRecord:
    """A record that was asked after every epoch, as a display does."""
    record = TrialRecord(0, {})
    for epoch, value in enumerate(values):
        record.epochs.append(EpochRecord(epoch, {"loss": value, "f1": -value}, 1.0, "", None))
        record.best_epoch("loss", "min")
    return record


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ([], None),
        ([math.nan], None),
        ([3.0, 2.0, 2.0, 5.0], 1),  # the earliest of equals
        ([math.inf, math.nan, 4.0], 2),
    ],
)
def test_the_best_epoch_does_not_depend_on_earlier_queries(values, best):
    record = grown(values)
    fresh = TrialRecord(0, {}, epochs=list(record.epochs))
    assert record.best_epoch("loss", "min") == fresh.best_epoch("loss", "min") == best
    assert record.best_epoch("f1", "max") == best


def test_the_selected_epoch():
    record = grown([3.0, 1.0, 2.0])
    assert [record.selected(Ranking("loss", "min", s)).epoch for s in ("best", "last")] == [1, 2]
    assert grown([math.nan, math.nan]).selected(Ranking("loss", "min", "best")).epoch == 1
    assert record.best_epoch("loss", "max") == 0


@pytest.mark.parametrize(("select", "shown", "best_at"), [("best", 1.0, 2), ("last", 2.0, None)])
def test_displays_are_given_the_selected_epoch_and_the_last_one(select, shown, best_at):
    ranking = Ranking("loss", "min", select)
    row = LiveTrial(grown([3.0, 1.0, 2.0])).row(ranking)
    assert (row.metrics["loss"], row.best_at, row.last["loss"]) == (shown, best_at, 2.0)
    nothing = LiveTrial(grown([])).row(ranking)
    assert (nothing.metrics, nothing.best_at, nothing.last) == ({}, None, {})

"""What a run remembers of its ended trials."""

from __future__ import annotations

import random

import pytest

from cerebro.coordinator.overview import KEPT_ROWS, EndedTrials
from cerebro.report.progress import TrialRow
from cerebro.run.records import EpochRecord, Ranking, TrialRecord, best_trials


def trial(number, losses=(), status="finished", error=None):
    epochs = [EpochRecord(e, {"loss": loss}, 1.0, "hash", None) for e, loss in enumerate(losses)]
    return TrialRecord(number, {}, status, len(losses), error=error, epochs=epochs)


def row(record):
    metrics = record.epochs[-1].metrics if record.epochs else {}
    return TrialRow(record.number, {}, record.status, len(record.epochs), 3, metrics)


def ended(records, mode="min", select="best"):
    found = EndedTrials(Ranking("loss", mode, select))
    for record in records:
        found.add(record, row(record))
    return found


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("select", ["best", "last"])
def test_the_leader_is_the_best_of_all(mode, select):
    rng = random.Random(0)
    records = [trial(n, [rng.randrange(40) for _ in range(3)]) for n in range(200)]
    rng.shuffle(records)
    found = ended(records, mode, select)
    assert [found.leader[1]] == best_trials(records, Ranking("loss", mode, select), 1)
    assert found.leader[1] in [r.number for r in found.list_rows()]


def test_only_the_best_rows_are_kept_once_all_were_shown():
    rng = random.Random(1)
    records = [trial(n, [rng.randrange(100)]) for n in range(500)]
    rng.shuffle(records)
    found = ended(records)
    assert [r.number for r in found.list_rows()] == list(range(500))
    found.mark_shown()
    best = sorted(records, key=lambda r: (r.epochs[-1].metrics["loss"], r.number))[:KEPT_ROWS]
    assert [r.number for r in found.list_rows()] == sorted(r.number for r in best)
    found.add(trial(500, [200.0]), row(trial(500, [200.0])))
    assert 500 in [r.number for r in found.list_rows()]
    found.mark_shown()
    assert 500 not in [r.number for r in found.list_rows()]


def test_every_trial_is_counted_and_known_by_number():
    found = ended([trial(2), trial(5, status="failed", error="boom"), trial(3, status="diverged")])
    assert dict(found.counts) == {"finished": 1, "failed": 1, "diverged": 1}
    assert [found.status_of(n) for n in range(7)] == [
        *(None, None, "finished", "diverged", None, "failed", None)
    ]
    assert 5 in found
    assert 4 not in found
    assert 7000 not in found
    assert found.leader is None
    assert dict(found.count_without(found.list_rows())) == {}
    assert dict(found.count_without([row(trial(2))])) == {"failed": 1, "diverged": 1}


def test_trials_without_a_finite_metric_are_dropped_first():
    records = [trial(n, [float("nan")]) for n in range(KEPT_ROWS)]
    records += [trial(100 + n, [1.0]) for n in range(KEPT_ROWS - 1)]
    found = ended(records)
    found.mark_shown()
    assert [r.number for r in found.list_rows()] == [0, *(100 + n for n in range(KEPT_ROWS - 1))]

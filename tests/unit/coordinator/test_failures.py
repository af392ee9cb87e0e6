"""What is said of runs in which every trial failed."""

from __future__ import annotations

import pytest

from cerebro.coordinator.failures import raise_if_all_failed
from cerebro.errors import RunError
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
def test_all_that_failed_are_counted(count: int, said: str) -> None:
    records = [TrialRecord(n, {}, "failed", error="it is bad") for n in range(count)]
    with pytest.raises(RunError) as caught:
        raise_if_all_failed(records)
    assert str(caught.value) == said
    records[0].traceback = "Traceback ..."
    with pytest.raises(RunError) as caught:
        raise_if_all_failed(records[:1], {"failed": count - 1})
    assert str(caught.value) == f"{said}; its traceback: result.trials[0].traceback"


def test_one_that_did_not_fail_is_enough() -> None:
    records = [TrialRecord(0, {}, "failed", error="it is bad"), TrialRecord(1, {}, "finished")]
    raise_if_all_failed(records)

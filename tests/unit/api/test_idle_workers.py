"""A search and its plan say which workers will have no work, and what uses them."""

from __future__ import annotations

import numpy as np
import pytest

import cerebro
from cerebro.api.settings import idle_advice
from cerebro.errors import InputError


def test_idle_workers_are_counted_with_matching_advice() -> None:
    assert idle_advice(8, 8, 1) is None
    assert idle_advice(None, 8, 1) is None
    assert idle_advice(3, 8, 1) == (
        "3 trials train at a time on 8 workers: 5 idle. threads=2 with workers=3, "
        "folds (validation=cerebro.KFold(...)) or more trials would use them"
    )
    assert idle_advice(1, 2, 4, folds=5) == (
        "1 trial trains at a time on 2 workers: 1 idle. threads=8 with workers=1 or more trials "
        "would use them"
    )
    assert idle_advice(6, 8, 1, folds=3) == (
        "6 trials train at a time on 8 workers: 2 idle. More trials would use them"
    )
    gpus = idle_advice(1, 2, 1, devices=("cuda:0", "cuda:1"))
    assert gpus is not None and "threads" not in gpus
    assert idle_advice(3, 8, 1, folds=5, elsewhere=True) == (  # nodes may have few cores
        "3 trials train at a time on 8 workers: 5 idle. More trials would use them"
    )


@pytest.fixture
def data(tmp_path):  # type: ignore[no-untyped-def]
    return cerebro.shard({"x": np.zeros((40, 2)), "y": np.zeros(40, np.int64)}, tmp_path / "d")


def test_a_plan_advises_on_idle_workers(data: cerebro.Dataset) -> None:
    space = {"lr": [0.1, 0.2, 0.3]}
    few = cerebro.plan(space, data, epochs=2, searcher="grid", workers=8)
    assert str(few).splitlines()[-1].startswith("advice      3 trials train at a time on 8 workers")
    folded = cerebro.plan(
        space, data, epochs=2, searcher="grid", workers=8, validation=cerebro.KFold(4)
    )
    assert "advice" not in str(folded)
    assert "advice" not in str(cerebro.plan(space, data, epochs=2, searcher="grid", workers=3))


def test_a_search_reports_idle_workers_when_it_starts(
    data: cerebro.Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(config: object, info: object) -> object:
        raise ValueError("no model is needed here")

    with pytest.raises((cerebro.errors.RunError, InputError)):
        cerebro.search(build, {"lr": 0.1}, data, epochs=1, n_trials=1, workers=2, progress="lines")
    shown = capsys.readouterr()
    assert "starting 2 workers (1 trial trains at a time on 2 workers: 1 idle." in (
        shown.err + shown.out
    )

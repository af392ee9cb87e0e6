"""The batches that models get: their rows in validation, and their layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro
from cerebro.api.settings import eval_rows
from cerebro.errors import InputError

pytest.importorskip("torch")

import batches_torch
from batches_torch import search

LAST = {"last": [True], "gets": [True], "fused": [False, True]}


def hashes(result: cerebro.Result) -> list[list[str]]:
    return [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    columns = {
        "x": random.integers(0, 256, (1400, 8, 7, 3), np.uint8),
        "y": random.integers(0, 4, 1400),
    }
    folder = tmp_path_factory.mktemp("data") / "set"
    cerebro.shard(columns, folder, shards=2, progress=False)
    return folder


def mean_rows(rows: list[int]) -> float:
    """The metric ``rows``: each batch reports its rows, with weight 1."""
    return sum(rows) / len(rows)


def test_validation_batches_have_256_rows_by_default(data: Path, tmp_path: Path) -> None:
    result = search(tmp_path / "run", data, {"last": [False], "gets": [False]})
    assert result.saved.settings["eval_batch_size"] == 256
    # About as many, in batches of even sizes: of 560 rows two, of 840 rows in batches of 16 52.
    assert result.best.metrics["val_rows"] == mean_rows([280, 280])
    assert result.best.metrics["train_rows"] == mean_rows([17] * 8 + [16] * 44)
    assert result.best.evaluate()["rows"] == result.best.metrics["val_rows"]
    assert cerebro.replay(result, 0).identical


def test_validation_batches_follow_eval_batch_size(data: Path, tmp_path: Path) -> None:
    result = search(tmp_path / "run", data, {"last": [False], "gets": [False]}, eval_batch_size=100)
    assert result.best.metrics["val_rows"] == mean_rows([94] * 2 + [93] * 4)


@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        ({"x": np.zeros((4, 20), np.float32), "y": np.zeros(4, np.int64)}, 256),
        ({"x": np.zeros((4, 32, 32, 3), np.uint8)}, 256),
        ({"x": np.zeros((4, 16), np.int64)}, 256),
        ({"x": np.zeros((4, 224, 224, 3), np.uint8)}, None),
        ({"x": np.zeros((4, 40000), np.float32), "z": np.zeros((4, 40000), np.float32)}, None),
        ({"x": np.zeros((4, 128), np.int64)}, None),
        ({"x": np.zeros((4, 128), np.uint16)}, None),
        ({"x": [[1, 2], [3], [], [4, 5, 6]]}, None),
    ],
)
def test_large_rows_keep_the_trials_batch_size_in_validation(
    tmp_path: Path, columns: dict[str, Any], rows: int | None
) -> None:
    assert eval_rows(cerebro.shard(columns, tmp_path / "d", shards=1, progress=False)) == rows


def test_channels_last_networks_get_channels_last_images(data: Path, tmp_path: Path) -> None:
    runs = [
        search(tmp_path / "inline", data, LAST),
        search(tmp_path / "hops", data, LAST, workers=2, live_models=1),
    ]
    assert hashes(runs[0]) == hashes(runs[1])
    assert cerebro.replay(runs[1], 1, batches_torch.build).identical
    best = runs[1].best
    assert best.evaluate() == pytest.approx(
        {name: best.metrics[f"val_{name}"] for name in ("loss", "rows")}, rel=1e-12
    )


def test_a_resumed_run_keeps_its_eval_batch_size(data: Path, tmp_path: Path) -> None:
    space = {"last": [False], "gets": [False]}
    first = search(tmp_path / "run", data, space, eval_batch_size=100, epochs=1)
    with pytest.raises(InputError, match="eval_batch_size was 100, is 256"):
        search(first.path, data, space, if_exists="resume")
    further = search(first.path, data, space, if_exists="resume", eval_batch_size=100)
    assert further.trials[0].history[1]["metrics"]["val_rows"] == mean_rows([94] * 2 + [93] * 4)

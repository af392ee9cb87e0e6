"""Dataset.with_sampling: rows drawn by weight, shard by shard, with replacement."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest

import cerebro._core as _core
import cerebro.data
from cerebro.data.sampling import Sampling
from cerebro.errors import InputError
from cerebro.transforms import RandomHorizontalFlip

ROWS = 240
SHARDS = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> cerebro.data.Dataset:
    rows = np.arange(ROWS)
    columns = {
        "row": rows,
        "x": rows.repeat(12).reshape(ROWS, 2, 2, 3).astype(np.uint8),
        "w": (rows % 4).astype(np.float32),  # weights 0, 1, 2, 3
        "y": (rows % 10 == 0).astype(np.int64),  # one row in ten is of class 1
        "none": np.where(rows < 1, 1.0, 0.0),
        "broken": np.where(rows == 7, np.nan, 1.0),
    }
    return cerebro.data.shard(columns, tmp_path_factory.mktemp("data") / "d", shards=SHARDS)


def drawn(data: Any, epoch: int = 0, **options: Any) -> list[int]:
    batches = data.batches(16, seed=3, epoch=epoch, framework="numpy", **options)
    return [int(row) for batch in batches for row in batch["row"]]


def test_each_shard_draws_its_rows_in_proportion(data: Any) -> None:
    view = data.with_sampling("w")
    for shard in range(SHARDS):
        rows = data.shard(shard)["row"]
        weights = data.shard(shard)["w"].astype(float)
        counts: Counter[int] = Counter()
        for epoch in range(60):
            epoch_rows = drawn(view, epoch, shard=shard)
            assert len(epoch_rows) == len(rows)
            assert set(epoch_rows) <= set(rows.tolist())
            counts.update(epoch_rows)
        found = np.array([counts[int(row)] for row in rows])
        expected = 60 * len(rows) * weights / weights.sum()
        assert (found[weights == 0] == 0).all()
        seen = weights > 0
        chi2 = ((found[seen] - expected[seen]) ** 2 / expected[seen]).sum()
        assert chi2 < 1.6 * seen.sum()  # about one for each degree of freedom


def test_a_pass_depends_on_seed_epoch_and_shard_alone(data: Any) -> None:
    view = data.with_sampling("w")
    whole = drawn(view)
    assert whole == drawn(view, threads=0) == drawn(view, threads=2)
    assert whole == [row for s in range(SHARDS) for row in drawn(view, shard=s)]
    assert whole[3 * 16 :] == drawn(view, start=3)  # a batch never crosses shards: 60 rows each
    assert whole != drawn(view, 1)
    assert whole == drawn(pickle.loads(pickle.dumps(view)))
    assert whole != drawn(data)
    assert sorted(drawn(data)) == list(range(ROWS))


def test_without_shuffling_each_row_comes_once(data: Any) -> None:
    view = data.with_sampling("w")
    assert drawn(view, shuffle=False) == drawn(data, shuffle=False)
    in_order = [int(row) for batch in view.in_order(16, "numpy") for row in batch["row"]]
    assert in_order == drawn(data, shuffle=False)
    assert drawn(view.with_sampling()) == drawn(data)


def test_classes_get_equal_shares(data: Any) -> None:
    view = data.with_sampling(balance="y")
    labels = [y for epoch in range(20) for y in np.array(drawn(view, epoch)) % 10 == 0]
    assert abs(np.mean(labels) - 0.5) < 0.02
    weighted = data.select(np.arange(ROWS)).with_sampling("y")  # weights 0 and 1
    assert all(row % 10 == 0 for row in drawn(weighted))


def test_weights_hold_within_a_view(data: Any) -> None:
    """A view of a sampled view draws from its own rows; rows given twice count twice."""
    train, _ = data.with_sampling("w").split(0.5, 0.5)
    rows = set(drawn(data.split(0.5, 0.5)[0], shuffle=False))
    assert len(drawn(train)) == ROWS // 2
    assert set(drawn(train)) <= rows
    chosen = data.select([3, 3, 3, 1]).with_sampling(balance="y")
    assert len(drawn(chosen)) == 4


def test_the_view_is_recorded(data: Any) -> None:
    view = data.with_sampling(balance="y")
    assert "sampling" not in data.spec()
    assert view.spec()["sampling"] == {"balance": "y"}
    again = cerebro.data.Dataset.from_spec(view.spec())
    assert again.checksum == view.checksum != data.checksum
    assert drawn(again) == drawn(view)
    assert view.with_sampling().checksum == data.checksum
    assert data._holds(view) and not view._holds(data) and view._holds(again)
    assert "rows drawn with equal classes of 'y'" in repr(view)
    assert "rows drawn by &#x27;w&#x27;" in data.with_sampling("w")._repr_html_()
    with pytest.raises(InputError, match="spec is damaged"):
        cerebro.data.Dataset.from_spec({**view.spec(), "sampling": {"luck": "y"}})


def test_a_row_is_transformed_alike_however_often_it_is_drawn(data: Any) -> None:
    view = data.with_sampling("w").with_transforms({"x": [RandomHorizontalFlip()]})
    seen: dict[int, bytes] = {}
    for batch in view.batches(8, framework="numpy"):
        for row, x in zip(batch["row"], batch["x"], strict=True):
            assert seen.setdefault(int(row), x.tobytes()) == x.tobytes()
    assert len(seen) < ROWS


def test_the_core_takes_only_sums_that_fit(data: Any) -> None:
    (reader, part), *_ = data._parts()
    plan = cerebro.transforms.compile(data.columns, {})
    good = np.arange(1, 61, dtype=np.uint64)
    _core.Loader([(reader, part, good)], plan, batch_size=4, framework="numpy")
    for sums in (good[:-1], good.astype(np.int64), good[::-1], "w"):
        with pytest.raises(TypeError, match="uint64 array, one for each row"):
            _core.Loader([(reader, part, sums)], plan, batch_size=4, framework="numpy")
    with pytest.raises(ValueError, match="all weights are 0"):
        _core.Loader([(reader, part, good * np.uint64(0))], plan, batch_size=4, framework="numpy")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": "z"}, "no column 'z'"),
        ({"weights": "x"}, "column 'x' cannot give the weights: it must have one number"),
        ({"balance": "w"}, "column 'w' cannot give the classes: it must have one integer"),
        ({"weights": "w", "balance": "y"}, "choose one"),
        ({"weights": [1.0, 2.0]}, "weights must be the name of a column, not .*: write the values"),
        ({"weights": "none"}, "all weights in shard . are 0, so none of its rows"),
        ({"weights": "broken"}, "column 'broken', shard ., row .*: nan is not a weight"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    data: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        data.with_sampling(**arguments)


def test_sums_are_whole_numbers() -> None:
    sampling = Sampling("weights", "w")
    sums = sampling.sums(np.array([0.0, 1e308, 0.0, 1e308]), 0)
    assert sums is not None and not sums.flags.writeable
    assert sums.tolist() == [0, 2**52, 2**52, 2**53]
    with pytest.raises(InputError, match=r"-1\.0 is not a weight"):
        sampling.sums(np.array([1, -1], np.int8), 0)
    assert sampling.sums(np.empty(0), 0) is None


def test_all_loaders_of_a_view_share_the_sums(data: Any) -> None:
    view = data.with_sampling("w")
    first, again = view._weight_sums(), view._weight_sums()
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert [len(sums) for sums in first] == data._shard_rows()


def test_a_view_may_leave_a_shard_without_a_weight(data: Any) -> None:
    """Its rows cannot be drawn, which is found when batches are made."""
    stored = np.concatenate([data.shard(shard)["w"] for shard in range(SHARDS)])
    keep = (stored == 0) | (np.arange(ROWS) >= 60)
    view = data.with_sampling("w").select(keep)
    with pytest.raises(InputError, match="all weights in shard 0 are 0"):
        view.batches(8, framework="numpy")

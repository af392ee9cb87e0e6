"""Datasets opened: what they tell, views, splits, statistics, travelling."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro.data import Dataset, shard
from cerebro.data.rows import Rounder, check_fractions, split_by_class, split_by_group
from cerebro.errors import InputError
from cerebro.transforms import Cast, Normalize, Scale

ROWS = 203


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    rng = np.random.default_rng(2)
    source = {
        "x": rng.integers(0, 256, (ROWS, 4, 3), np.uint8),
        "y": np.arange(ROWS),
        "kind": [("a", "b", "b", "c", "b")[i % 5] for i in range(ROWS)],
        "user": np.arange(ROWS, dtype=np.int32) // 10,
        "tokens": [list(range(i % 6)) for i in range(ROWS)],
        "loss": rng.normal(1000, 1e-3, ROWS).astype(np.float32),
    }
    return shard(source, tmp_path_factory.mktemp("views") / "d", shards=6)


def ys(view: Dataset) -> list[int]:
    return [int(y) for i in range(view.num_shards) for y in view.shard(i)["y"]]


def test_size_checksum_and_repr_describe_the_dataset(data: Dataset) -> None:
    assert (len(data), data.num_rows, data.num_shards) == (ROWS, ROWS, 6)
    assert data.view.shard_rows == [34, 34, 34, 34, 34, 33]
    assert data.shards.first_rows == [0, 34, 68, 102, 136, 170]
    tokens = sum(i % 6 for i in range(ROWS))
    assert data.nbytes == ROWS * (12 + 8 + 8 + 4 + 4) + tokens * 8 + (ROWS + 6) * 8
    assert len(data.checksum) == 32
    text = repr(data)
    assert "203 rows, 6 shards" in text
    assert "uint8 (4, 3)" in text
    assert "int64 (*)" in text
    assert "3 classes: a, b, c" in text
    html = data.select([1])._repr_html_()
    assert "1 rows (a view of 203)" in html
    assert html.count("<tr>") == 7


def test_a_wide_dataset_is_shown_in_part(tmp_path: Path) -> None:
    wide = shard({f"c{i}": [1, 2] for i in range(33)}, tmp_path / "wide")
    assert len(repr(wide).splitlines()) == 22
    assert "and 13 more columns" in repr(wide)


def test_a_shard_is_read_only(data: Dataset) -> None:
    found = data.shard(2)
    assert list(found) == ["x", "y", "kind", "user", "tokens", "loss"]
    views = [data.shard(2), data.select(np.arange(0, ROWS, 3)).shard(2)]
    for arrays in views:
        for array in [arrays["x"], arrays["tokens"].values, arrays["tokens"][1]]:
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
    assert found["tokens"][-1].tolist() == list(range(found["y"][-1] % 6))
    assert [len(row) for row in found["tokens"][2:4]] == [y % 6 for y in found["y"][2:4]]
    with pytest.raises(IndexError):
        found["tokens"][34]
    for wrong in (-1, 6, "0"):
        with pytest.raises(InputError, match="shards 0 to 5"):
            data.shard(wrong)  # type: ignore[arg-type]


def test_a_split_is_a_range_of_every_shard(data: Dataset) -> None:
    parts = data.split(0.7, 0.15, 0.15)
    assert [len(part) for part in parts] == [142, 31, 30]
    for i in range(6):
        joined = np.concatenate([part.shard(i)["y"] for part in parts])
        assert np.array_equal(joined, data.shard(i)["y"])
        tokens = [row.tolist() for part in parts for row in part.shard(i)["tokens"]]
        assert tokens == [row.tolist() for row in data.shard(i)["tokens"]]
    assert all(part.num_shards == 6 for part in parts)
    some, other = data.split(0.1, 0.2)
    assert (len(some), len(other)) == (20, 41)
    inner = some.split(0.5, 0.5)
    assert sorted(ys(inner[0]) + ys(inner[1])) == sorted(ys(some))
    (all_of_it,) = data.split(1.0)
    assert all_of_it.checksum == data.checksum


@pytest.mark.parametrize(
    ("fractions", "options", "message"),
    [
        ((), {}, "needs fractions"),
        ((0.8, 0.3), {}, "sum to 1.1"),
        ((0.5, 0), {}, "must be greater than 0"),
        ((-0.5,), {}, "must be greater than 0"),
        ((float("nan"),), {}, "must be greater than 0"),
        (("a",), {}, "is not a fraction"),
        ((0.999, 0.001), {}, r"part 2 \(fraction 0.001\) gets none of 203 rows"),
        ((0.5, 0.5), {"stratify": "nothing"}, "no column 'nothing'"),
        ((0.5, 0.5), {"stratify": "loss"}, "'loss' cannot define classes"),
        ((0.5, 0.5), {"stratify": "x"}, "'x' cannot define classes"),
        ((0.5, 0.5), {"groups": "tokens"}, "'tokens' cannot define classes"),
        ((0.5, 0.5), {"groups": "kind", "stratify": "kind"}, "not both"),
        ((0.25,) * 4, {"groups": "kind"}, "3 groups cannot be split into 4"),
    ],
)
def test_bad_splits(
    data: Dataset, fractions: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        data.split(*fractions, **options)


def test_a_view_that_repeats_rows_is_not_split(data: Dataset) -> None:
    again = data.select(np.repeat(np.arange(40), 3))
    for options in ({}, {"stratify": "kind"}):
        with pytest.raises(InputError) as caught:
            again.split(0.8, 0.2, **options)
        assert str(caught.value) == (
            "split: this view repeats rows, and the same row could be in several parts: split "
            "first, then repeat rows of the training part, or give groups="
        )
    (part,) = again.split(0.5)  # a single part shares its rows with no other
    assert len(part) == 60
    # Rows with the same value of a column are in one part, so that repeated ones are as well.
    first, second = again.split(0.5, 0.5, groups="user")
    assert not {*ys(first)} & {*ys(second)}
    assert sorted(ys(first) + ys(second)) == sorted(ys(again))
    # Without repeats, the order of the rows does not matter.
    mixed = data.select(np.random.default_rng(0).permutation(ROWS))
    assert sorted(y for part in mixed.split(0.5, 0.5) for y in ys(part)) == list(range(ROWS))
    train, _ = data.split(0.8, 0.2, stratify="kind")
    assert len(train.select(np.repeat(np.arange(len(train)), 2))) == 2 * len(train)


def test_a_stratified_split_keeps_proportions(data: Dataset) -> None:
    parts = data.split(0.5, 0.3, 0.2, stratify="kind")
    assert sorted(y for part in parts for y in ys(part)) == list(range(ROWS))
    whole = data.stats("kind").counts
    assert whole is not None
    for fraction, part in zip((0.5, 0.3, 0.2), parts, strict=True):
        counts = part.stats("kind").counts
        assert counts is not None
        for name, count in whole.items():
            assert abs(counts[name] - fraction * count) <= 1
        rows = part.view.shard_rows
        assert max(rows) - min(rows) <= 5
    again = data.split(0.5, 0.3, 0.2, stratify="kind")
    assert [part.checksum for part in again] == [part.checksum for part in parts]
    other = data.split(0.5, 0.3, 0.2, stratify="kind", seed=1)
    assert other[0].checksum != parts[0].checksum


def test_a_grouped_split_keeps_groups_together(data: Dataset) -> None:
    parts = data.split(0.6, 0.2, 0.2, groups="user")
    assert sorted(y for part in parts for y in ys(part)) == list(range(ROWS))
    users = [{y // 10 for y in ys(part)} for part in parts]
    assert all(not a & b for a in users for b in users if a is not b)
    for fraction, part in zip((0.6, 0.2, 0.2), parts, strict=True):
        assert abs(len(part) - fraction * ROWS) <= 10
    assert data.split(0.5, groups="user", seed=1)[0].checksum != (
        data.split(0.5, groups="user", seed=2)[0].checksum
    )


def test_a_shard_without_rows_in_the_view(data: Dataset) -> None:
    view = data.select([0, 1, 2, 69])
    assert view.view.shard_rows == [3, 0, 1, 0, 0, 0]
    assert view.num_shards == 6
    empty = view.shard(1)
    assert empty["x"].shape == (0, 4, 3)
    assert len(empty["tokens"]) == 0
    assert view.stats("y").rows == 4
    a, b = view.split(0.5, 0.5)
    assert len(a) == len(b) == 2
    assert view.split(0.5, stratify="kind")[0].num_rows == 2
    assert pickle.loads(pickle.dumps(view)).checksum == view.checksum


def test_select(data: Dataset) -> None:
    every = ys(data)
    assert ys(data.select(slice(30, 110))) == every[30:110]
    assert ys(data.select(slice(-5, None))) == every[-5:]
    assert ys(data.select(slice(None, None, 7))) == every[::7]
    mask = np.arange(ROWS) % 3 == 0
    assert ys(data.select(mask)) == every[::3]
    assert ys(data.select([40, 33, 2, 2])) == [every[33], every[2], every[2], every[40]]
    twice = data.select(slice(10, 190)).select(np.arange(100, 150))
    assert ys(twice) == every[110:160]
    assert twice.view.parts[3] == range(8, 34)
    lists = data.select(mask).select(slice(5, 60))
    assert ys(lists) == every[::3][5:60]
    rows = data.select([5, 3]).view.parts[0]
    assert isinstance(rows, np.ndarray)
    assert rows.dtype == np.uint32
    for wrong, message in [
        ([ROWS], "no row 203"), ([-1], "no row -1"), ([], "no row"), (slice(3, 3), "no row"),
        (mask[1:], "the mask has 202 values"), ([0.5], "row numbers"), ([[1]], "row numbers"),
        (np.zeros(ROWS, bool), "no row"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=message):
            data.select(wrong)  # type: ignore[arg-type]


def test_stats(data: Dataset) -> None:
    x = np.concatenate([data.shard(i)["x"] for i in range(6)]).astype(np.float64)
    stats = data.stats("x")
    assert (stats.rows, stats.values, stats.counts) == (ROWS, ROWS * 12, None)
    assert stats.mean == pytest.approx(x.mean(), rel=1e-14)
    assert stats.std == pytest.approx(x.std(), rel=1e-14)
    assert (stats.min, stats["max"]) == (x.min(), x.max())
    by_channel = data.stats("x", axis=-1)
    assert by_channel.mean == pytest.approx(x.mean(axis=(0, 1)), rel=1e-14)
    assert by_channel.std == pytest.approx(x.std(axis=(0, 1)), rel=1e-14)
    assert by_channel.max.tolist() == x.max(axis=(0, 1)).tolist()
    assert data.stats("x", axis=0).min.tolist() == x.min(axis=(0, 2)).tolist()
    loss = np.concatenate([data.shard(i)["loss"] for i in range(6)]).astype(np.float64)
    assert data.stats("loss").std == pytest.approx(loss.std(), rel=1e-9)
    assert data.stats("kind").counts == {"a": 41, "b": 122, "c": 40}
    assert data.select([0]).stats("kind").counts.keys() == {"a", "b", "c"}  # type: ignore[union-attr]
    counts = data.stats("user").counts
    assert counts is not None
    assert list(counts) == list(range(21))
    tokens = data.stats("tokens")
    assert (tokens.max, tokens.values) == (4.0, sum(i % 6 for i in range(ROWS)))
    with pytest.raises(InputError, match="no axis 2"):
        data.stats("x", axis=2)
    with pytest.raises(InputError, match="no column 'z'"):
        data.stats("z")
    with pytest.raises(KeyError):
        stats["median"]


def test_stats_in_pieces_and_special_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Dataset
) -> None:
    expected = data.stats("x", axis=1)
    monkeypatch.setattr("cerebro.data.stats.PIECE_BYTES", 100)
    monkeypatch.setattr("cerebro.data.stats.MOST_COUNTS", 50)
    monkeypatch.setattr("cerebro.data.view._PIECE_ROWS", 7)
    assert data.stats("x", axis=1).std == pytest.approx(expected.std, rel=1e-13)
    order = np.random.default_rng(0).permutation(ROWS)
    assert data.select(order).stats("loss").max == data.stats("loss").max
    assert data.stats("y").counts is None
    special = shard(
        {
            "n": [1.0, np.nan], "i": [1.0, np.inf], "b": [True, False], "e": [[], []],
            "c": np.zeros(2, np.complex64), "h": np.array([1, 3], np.float16),
        },
        tmp_path / "s",
        dtypes={"h": "bfloat16"},
    )  # fmt: skip
    assert np.isnan(special.stats("n").mean)
    assert special.stats("i").max == np.inf
    assert special.stats("b").counts == {False: 1, True: 1}
    assert special.stats("h").mean == 2.0
    with pytest.raises(InputError, match="all its rows are empty"):
        special.stats("e")
    with pytest.raises(InputError, match="is complex"):
        special.stats("c")


def test_num_classes(tmp_path: Path) -> None:
    source = {
        "y": np.array([0, 2, 1, 0, 0, 4], np.uint8),
        "sick": np.array([True, True, True, True, True, True]),
        "kind": ["b", "a", "b", "c", "a", "b"],
        "x": np.zeros(6, np.float32),
        "below": np.arange(-1, 5),
        "large": np.arange(6) * 100_000,
        "pixels": np.zeros((6, 2), np.uint8),
    }
    data = shard(source, tmp_path / "d", shards=2, shuffle=False)
    for view in (data, data.select([0, 1]), data.split(0.5, 0.5)[0]):  # of all rows
        assert view.num_classes() == view.num_classes("y") == 5
        assert (view.num_classes("kind"), view.num_classes("sick")) == (3, 2)
    for name, message in (
        ("x", "column 'x' is float32, not class labels: .*dtypes={'x': 'int64'}"),
        ("below", "column 'below' has labels from -1 to 4: number the classes from 0"),
        ("large", "column 'large' has labels from 0 to 500000"),
        ("pixels", "column 'pixels' cannot define classes"),
        ("z", "no column 'z'"),
    ):
        with pytest.raises(InputError, match=message):
            data.num_classes(name)


def test_num_classes_of_info(data: Dataset) -> None:
    from cerebro.data.order import Cut, make_order
    from cerebro.worker.models import make_info

    view = data.select(range(3))
    info = make_info(view, make_order(view, "rows", 0), trial=0, epochs=1, cut=Cut(2))
    assert info.num_classes("kind") == len(info.classes["kind"]) == 3
    assert (info.num_classes(), info.num_classes("user")) == (ROWS, ROWS // 10 + 1)
    with pytest.raises(InputError, match="'loss' is float32"):
        info.num_classes("loss")


def test_views_survive_spec_and_pickle_round_trips(data: Dataset) -> None:
    train, _ = data.split(0.8, 0.2, stratify="kind")
    view = train.select(slice(5, 100))
    spec = json.loads(json.dumps(view.spec()))
    assert spec["path"] == str(data.path)
    assert [list(operation) for operation in spec["operations"]] == [["split"], ["select"]]
    for copy in (Dataset.from_spec(spec), pickle.loads(pickle.dumps(view))):
        assert ys(copy) == ys(view)
        assert copy.checksum == view.checksum
        assert copy.spec() == view.spec()
    checksums = {d.checksum for d in (data, train, view, data.select([1]), data.select([2]))}
    assert len(checksums) == 5


def test_a_spec_that_does_not_fit(data: Dataset, tmp_path: Path) -> None:
    other = shard({"y": np.arange(ROWS)}, tmp_path / "other", shards=6)
    spec = data.select([1, 7, 3]).spec()
    with pytest.raises(InputError, match="checksum differs"):
        Dataset.from_spec({**spec, "path": str(other.path)})
    with pytest.raises(InputError, match="its shards differ"):
        Dataset.from_spec({**spec, "rows": spec["rows"][1:]})
    for wrong in ([0, 99], [3, 2], "????", "QUFB", 7, [None, 1]):
        with pytest.raises(InputError, match="spec does not fit"):
            Dataset.from_spec({**spec, "rows": [wrong, *spec["rows"][1:]]})


def test_batches_of_a_view(data: Dataset) -> None:
    view = data.select([200, 3, 1, 40, 3])
    for rows in (data, view, data.split(0.1, 0.2, groups="user")[1]):
        given = list(rows.batches(7, framework="numpy", shuffle=False))
        assert [int(y) for batch in given for y in batch["y"]] == ys(rows)
        for batch in given:
            assert batch["tokens_length"].tolist() == [y % 6 for y in batch["y"]]
    shuffled = data.batches(5, framework="numpy", seed=1, shard=2)
    one, two = ([int(y) for batch in shuffled for y in batch["y"]] for _ in range(2))
    assert one != two
    assert sorted(one) == sorted(two) == sorted(data.shard(2)["y"].tolist())


def test_transforms_belong_to_the_view(data: Dataset) -> None:
    stats = data.stats("x", axis=-1)
    chain = [Scale(1 / 255), Normalize(stats.mean / 255, stats.std / 255)]
    view = data.with_transforms({"x": chain, "y": Cast("float32")}).select([4, 2])
    batch = next(iter(view.batches(4, framework="numpy", shuffle=False)))
    assert batch["x"].shape == (2, 4, 3)
    assert batch["x"].dtype == np.float32
    assert batch["y"].dtype == np.float32
    assert view.transforms == {"x": tuple(chain), "y": (Cast("float32"),)}
    assert "uint8 (4, 3) -> Scale -> Normalize" in repr(view)
    copy = pickle.loads(pickle.dumps(view))
    assert copy.transforms == view.transforms
    assert copy.checksum == view.checksum != data.select([4, 2]).checksum
    without = view.with_transforms({"x": [], "y": []})
    assert without.transforms == {}
    assert without.checksum == data.select([4, 2]).checksum


def test_invalid_transforms_are_refused(data: Dataset) -> None:
    with pytest.raises(InputError, match="column 'z'"):
        data.with_transforms({"z": []})
    with pytest.raises(InputError, match="is not a transform"):
        data.with_transforms({"x": [len]})  # type: ignore[list-item]


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30),
    st.lists(st.floats(0.001, 1), min_size=1, max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_rounding_is_right_over_all_shards(counts: list[int], shares: list[float]) -> None:
    fractions = [share / (sum(shares) * 1.0000001) for share in shares]
    bounds = check_fractions([*fractions])
    rounder = Rounder(bounds)
    cuts = [rounder.cut(count) for count in counts]
    rows = sum(counts)
    for count, cut in zip(counts, cuts, strict=True):
        assert cut[0] == 0
        assert cut == sorted(cut)
        assert cut[-1] <= count
    # A shard of one row can serve one part only, so each further part may wait for another shard.
    most = max(0.5, len(bounds) - 1.5) + 1e-3
    for part, bound in enumerate(bounds):
        assert abs(sum(cut[part + 1] for cut in cuts) - bound * rows) <= most


@given(
    st.lists(st.lists(st.integers(0, 4), max_size=12), min_size=1, max_size=5),
    st.integers(0, 5),
)
@settings(max_examples=100, deadline=None)
def test_label_splits_lose_and_repeat_nothing(labels: list[list[int]], seed: int) -> None:
    arrays = [np.array(of_shard, np.int64) for of_shard in labels]
    bounds = check_fractions([0.5, 0.5])
    every = np.concatenate(arrays)
    if len(every) == 0:
        return
    ways = [split_by_class, split_by_group] if len(set(every.tolist())) > 1 else [split_by_class]
    for way in ways:
        parts = way(arrays, bounds, seed)
        for shard_index, of_shard in enumerate(labels):
            rows = np.concatenate([part[shard_index] for part in parts])
            assert sorted(rows.tolist()) == list(range(len(of_shard)))

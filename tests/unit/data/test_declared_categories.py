"""A type that declares categories keeps them all, in their order, from any source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro
from cerebro import InputError, shard

pd = pytest.importorskip("pandas")
pa = pytest.importorskip("pyarrow")

NAMES = ["low", "mid", "high", "extreme"]  # of which no row has the last
CODES = [0, 2, 1, 0]


def categorical(ordered: bool = True) -> Any:
    return pd.Categorical.from_codes(CODES, NAMES, ordered=ordered)


def dictionary(ordered: bool = False) -> Any:
    codes = pa.array(CODES, pa.int8())
    return pa.DictionaryArray.from_arrays(codes, NAMES, ordered=ordered)


def parquet(folder: Path) -> Any:
    pd.DataFrame({"y": categorical()}).to_parquet(folder / "a.parquet", row_group_size=2)
    return folder / "a.parquet"


def feather(folder: Path) -> Any:
    pd.DataFrame({"y": categorical(ordered=False)}).to_feather(folder / "a.feather")
    return folder / "a.feather"


def reader(_: Path) -> Any:
    table = pa.table({"y": dictionary()})
    return pa.RecordBatchReader.from_batches(table.schema, table.to_batches(2))


def class_label(_: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"y": datasets.ClassLabel(names=NAMES)})
    return datasets.Dataset.from_dict({"y": CODES}, features=features)


SOURCES = [
    lambda _: pd.DataFrame({"y": categorical()}),
    lambda _: pd.DataFrame({"y": categorical(ordered=False)}),
    lambda _: {"y": categorical()},
    lambda _: {"y": pd.Series(categorical())},
    lambda _: pa.table({"y": dictionary()}),
    lambda _: pa.table({"y": dictionary(ordered=True)}),
    lambda _: {"y": dictionary()},
    lambda _: pd.DataFrame({"y": pd.Series(dictionary(), dtype=pd.ArrowDtype(dictionary().type))}),
    parquet,
    feather,
    reader,
    class_label,
]


@pytest.mark.parametrize("source", SOURCES)
def test_order_and_unused_members_are_kept(tmp_path: Path, source: Callable[[Path], Any]) -> None:
    data = shard(source(tmp_path), tmp_path / "d", shards=1, shuffle=False)
    assert data.classes["y"] == NAMES
    assert data.shard(0)["y"].tolist() == CODES
    assert data.num_classes("y") == 4
    assert data.stats("y").counts == {"low": 2, "mid": 1, "high": 1, "extreme": 0}


def test_declared_categories_can_be_stacked_with_numbers(tmp_path: Path) -> None:
    frame = pd.DataFrame({"size": categorical(), "v": [0.5, 1.5, 2.5, 3.5]})
    data = shard(frame, tmp_path / "d", shards=1, shuffle=False, columns={"x": ["size", "v"]},
                 dtypes={"x": "float32"})  # fmt: skip
    assert data.shard(0)["x"].tolist() == [[0, 0.5], [2, 1.5], [1, 2.5], [0, 3.5]]


def test_a_frame_of_categories_can_be_one_column(tmp_path: Path) -> None:
    same = pd.DataFrame({"a": categorical(), "b": categorical()})
    data = shard({"x": same}, tmp_path / "d", shards=1, shuffle=False)
    assert data.classes["x"] == NAMES
    assert data.shard(0)["x"].tolist() == [[code, code] for code in CODES]
    other = same.assign(b=pd.Categorical(["p", "q", "p", "q"], ["q", "p"], ordered=True))
    with pytest.raises(InputError, match="'a' has ordered categories of its own: give the frame"):
        shard({"x": other}, tmp_path / "e")


def test_arrow_chunks_and_lists_of_categories_are_stored(tmp_path: Path) -> None:
    chunks = [pa.DictionaryArray.from_arrays(pa.array(codes, pa.int8()), names)
              for codes, names in (([0, 1], ["a", "z"]), ([1, 0], ["a", "b"]))]  # fmt: skip
    table = pa.table({"y": pa.chunked_array(chunks)})
    data = shard(table, tmp_path / "a", shards=1, shuffle=False)
    assert (data.classes["y"], data.shard(0)["y"].tolist()) == (["a", "z", "b"], [0, 1, 2, 0])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 4]), dictionary())
    data = shard(pa.table({"y": lists}), tmp_path / "b", shards=1, shuffle=False)
    assert data.classes["y"] == NAMES
    assert data.shard(0)["y"].values.tolist() == CODES


def test_a_dictionary_can_have_null_or_duplicate_names(tmp_path: Path) -> None:
    codes = pa.array([0, 3, 2], pa.int8())
    odd = pa.DictionaryArray.from_arrays(codes, pa.array(["z", None, "a", "z"]))
    data = shard(pa.table({"y": odd}), tmp_path / "a", shards=1, shuffle=False)
    assert (data.classes["y"], data.shard(0)["y"].tolist()) == (["z", "a"], [0, 0, 1])
    null = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array(["z", None]))
    with pytest.raises(InputError, match="'y' has a missing value in row 1"):
        shard(pa.table({"y": null}), tmp_path / "b")


def test_validation_rows_get_the_codes_of_training(tmp_path: Path) -> None:
    """Also if their type declares the same names in another order, and more of them."""
    from cerebro.data.given_rows import write

    train = write(pd.DataFrame({"y": categorical()}), tmp_path / "a")
    rows = pd.DataFrame({"y": pd.Categorical(["high", "low"], ["none", "high", "low"])})
    made = write(rows, tmp_path / "b", train, what="validation", shards=1, shuffle=False)
    assert made.classes["y"] == NAMES
    assert made.shard(0)["y"].tolist() == [2, 0]
    kept = [cerebro.Dataset(tmp_path / name).classes for name in "ab"]
    assert kept[0] == kept[1]


def test_text_is_still_sorted(tmp_path: Path) -> None:
    names = ["mid", "low", "high"]
    for number, source in enumerate([{"y": names}, pa.table({"y": names})]):
        data = shard(source, tmp_path / f"{number}", shards=1, shuffle=False)
        assert data.classes["y"] == sorted(names)
        assert np.array(data.classes["y"])[data.shard(0)["y"]].tolist() == names

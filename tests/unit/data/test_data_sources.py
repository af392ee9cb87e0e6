"""Every kind of source: the same rows give the same bits, and what is wrong is named."""

from __future__ import annotations

import array
import collections
import datetime
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cerebro.data import Dataset, given_rows, images, shard
from cerebro.data.columns import ColumnData, concatenate
from cerebro.data.sources import open_source
from cerebro.data.sources.base import Source, Table
from cerebro.data.sources.row_by_row import row_chunks
from cerebro.errors import InputError

ROWS = 53
RNG = np.random.default_rng(1)
INTS = RNG.integers(-1000, 1000, ROWS)
FLOATS = RNG.normal(size=ROWS)
FLAGS = INTS > 0
NAMES = [("dog", "cat", "ant", "Émile")[i % 4] for i in range(ROWS)]
VECTORS = RNG.normal(size=(ROWS, 3)).astype(np.float32)
TOKENS = [INTS[: i % 5].tolist() for i in range(ROWS)]


def scalars() -> dict[str, Any]:
    return {"i": INTS, "f": FLOATS, "b": FLAGS, "s": NAMES}


def everything() -> dict[str, Any]:
    return scalars() | {"v": VECTORS, "t": TOKENS}


def frame() -> Any:
    return pytest.importorskip("pandas").DataFrame(scalars())


def arrow() -> Any:
    pa = pytest.importorskip("pyarrow")
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(VECTORS.ravel()), 3)
    return pa.table(scalars() | {"v": vectors, "t": pa.array(TOKENS, pa.list_(pa.int64()))})


def rows(columns: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for row in range(ROWS):
        yield {
            name: values[row].item() if isinstance(values[row], np.generic) else values[row]
            for name, values in columns.items()
        }


def _from_npz(folder: Path) -> Any:
    np.savez_compressed(folder / "a.npz", **scalars())
    return folder / "a.npz"


def _from_csv(folder: Path) -> Any:
    frame().to_csv(folder / "a.csv", index=False)
    return str(folder / "a.csv")


def _from_parquet(folder: Path) -> Any:
    frame().to_parquet(folder / "a.parquet", row_group_size=20)
    return folder / "a.parquet"


def _from_parts(folder: Path) -> Any:
    """As engines write them: numbered parts, and files of their own beside them."""
    parts = folder / "parts"
    parts.mkdir()
    for number, begin in enumerate(range(0, ROWS, 20)):
        frame()[begin : begin + 20].to_parquet(parts / f"part-{number:05d}-c000.snappy.parquet")
    (parts / "_SUCCESS").touch()
    (parts / "._SUCCESS.crc").write_bytes(b"crc")
    (parts / "_metadata.parquet").write_bytes(b"not a part")
    return parts


def _torch_dataset(folder: Path) -> Any:
    torch = pytest.importorskip("torch")

    class Rows(torch.utils.data.Dataset):  # type: ignore[name-defined,misc]
        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, row: int) -> dict[str, Any]:
            return {"i": torch.tensor(INTS[row]), "f": FLOATS[row], "b": bool(FLAGS[row]),
                    "s": NAMES[row]}  # fmt: skip

    return Rows()


def _huggingface(folder: Path) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict(scalars())


SCALAR_SOURCES: dict[str, Callable[[Path], Any]] = {
    "arrays": lambda _: scalars(),
    "strings as an array": lambda _: scalars() | {"s": np.array(NAMES)},
    "lists": lambda _: {k: list(v) for k, v in scalars().items()},
    "big-endian": lambda _: scalars() | {"i": INTS.astype(">i8"), "f": FLOATS.astype(">f8")},
    "npz": _from_npz,
    "csv": _from_csv,
    "parquet": _from_parquet,
    "folder of Parquet parts": _from_parts,
    "pandas": lambda _: frame(),
    "pandas objects": lambda _: frame().astype({"s": object}),
    "pandas categories": lambda _: frame().astype({"s": "category"}),
    "pandas nullable": lambda _: frame().astype({"i": "Int64", "b": "boolean", "f": "Float64"}),
    "pandas Arrow": lambda _: frame().convert_dtypes(dtype_backend="pyarrow"),
    "pandas columns": lambda _: {name: frame()[name] for name in "ifbs"},
    "Arrow table": lambda _: arrow().select(["i", "f", "b", "s"]),
    "Arrow columns": lambda _: {name: arrow()[name] for name in "ifbs"},
    "Arrow reader": lambda _: arrow().select(["i", "f", "b", "s"]).to_reader(max_chunksize=7),
    "torch dataset": _torch_dataset,
    "Hugging Face": _huggingface,
    "Hugging Face stream": lambda folder: _huggingface(folder).to_iterable_dataset(),
    "generator": lambda _: rows(scalars()),
    "list of rows": lambda _: list(rows(scalars())),
    "structured array": lambda _: np.array(
        list(zip(INTS, FLOATS, FLAGS, NAMES, strict=True)),
        [("i", "i8"), ("f", "f8"), ("b", "?"), ("s", "U9")],
    ),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return shard(scalars(), tmp_path_factory.mktemp("expected") / "d", shards=4, seed=7)


@pytest.mark.parametrize("kind", SCALAR_SOURCES)
def test_the_same_rows_are_the_same_bits_from_any_source(
    kind: str, tmp_path: Path, expected: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cerebro.data.sources.row_by_row.CHUNK_ROWS", 10)
    monkeypatch.setattr("cerebro.data.sources.files.CHUNK_ROWS", 10)
    monkeypatch.setattr("cerebro.data.sources.files.CHUNK_BYTES", 100)
    monkeypatch.setattr("cerebro.data.sources.arrow_tables.BATCH_ROWS", 10)
    source = SCALAR_SOURCES[kind](tmp_path)
    data = shard(source, tmp_path / "d", shards=4, seed=7)
    assert data.columns == expected.columns
    assert data.checksum == expected.checksum
    assert data.classes["s"] == ["ant", "cat", "dog", "Émile"]
    assert [c.dtype for c in data.columns.values()] == ["int64", "float64", "bool", "int64"]


def test_vectors_and_ragged_columns_are_the_same_from_any_source(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    torch = pytest.importorskip("torch")
    pq = pytest.importorskip("pyarrow.parquet")
    feather = pytest.importorskip("pyarrow.feather")
    pa = pytest.importorskip("pyarrow")
    pq.write_table(arrow(), tmp_path / "a.parquet")
    feather.write_feather(arrow(), tmp_path / "a.arrow", compression="lz4")
    with pa.ipc.new_stream(tmp_path / "b.arrow", arrow().schema) as stream:
        stream.write_table(arrow(), max_chunksize=9)
    tensors = everything() | {
        "v": torch.from_numpy(VECTORS),
        "t": [torch.tensor(row, dtype=torch.int64) for row in TOKENS],
    }
    sources = [
        everything(), tensors, rows(everything()), rows(tensors), list(rows(tensors)), arrow(),
        tmp_path / "a.parquet", tmp_path / "a.arrow", tmp_path / "b.arrow",
        datasets.Dataset(arrow()), pa.dataset.dataset(arrow()),
    ]  # fmt: skip
    checksums = {
        shard(source, tmp_path / str(number), shards=3).checksum
        for number, source in enumerate(sources)
    }
    assert len(checksums) == 1
    data = Dataset(tmp_path / "3")
    assert (data.columns["v"].shape, data.columns["v"].dtype) == ((3,), "float32")
    assert (data.columns["t"].ragged, data.columns["t"].dtype) == (True, "int64")


def test_a_changed_folder_of_parts_is_a_different_source(tmp_path: Path) -> None:
    parts = _from_parts(tmp_path)
    first = shard(parts, tmp_path / "d")
    assert shard(str(parts), tmp_path / "d", exist_ok=True).checksum == first.checksum
    frame()[:1].to_parquet(parts / "part-00003-c000.snappy.parquet")
    with pytest.raises(InputError, match="was made from other data"):
        shard(parts, tmp_path / "d", exist_ok=True)
    (parts / "day=1").mkdir()
    with pytest.raises(InputError, match=r"'day=1': partitions are not read; give pyarrow"):
        shard(parts, tmp_path / "e")
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    with pytest.raises(InputError, match=r"without class folders of images: see cerebro.images"):
        shard(tmp_path / "empty", tmp_path / "e")


@pytest.mark.parametrize("kind", ["binary", "large_binary", "binary_view", "fixed"])
def test_dtypes_set_type_and_shape_of_fixed_length_binary_values(kind: str, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    arrow_type = pa.binary(12) if kind == "fixed" else getattr(pa, kind)()
    column = pa.array([row.tobytes() for row in VECTORS], arrow_type)
    expected = shard({"v": VECTORS.reshape(ROWS, 3, 1)}, tmp_path / "expected", seed=2)
    table = pa.table({"v": column})
    dtypes = {"v": ("float32", (3, 1))}
    for number, source in enumerate([table, table.to_reader(7), table[1:].slice(0)]):
        data = shard(source, tmp_path / f"d{number}", dtypes=dtypes, seed=2)
        assert data.columns["v"] == expected.columns["v"]
        assert (data.checksum == expected.checksum) == (number < 2)
    assert shard(table, tmp_path / "d0", dtypes=dtypes, seed=2, exist_ok=True)
    renamed = {"columns": {"x": "v"}, "dtypes": {"x": ["float32", 3]}}
    assert shard(table, tmp_path / "x", **renamed).columns["x"].shape == (3,)
    with pytest.raises(InputError, match=r"'v' has Arrow's type .*binary.*: say what the bytes"):
        shard(table, tmp_path / "bytes")
    if kind in ("binary", "large_binary"):
        hub = pytest.importorskip("datasets").Dataset(table)
        for number, source in enumerate([hub, hub.to_iterable_dataset()]):
            data = shard(source, tmp_path / f"hub{number}", dtypes=dtypes, seed=2)
            assert data.checksum == expected.checksum


def test_dtypes_set_the_shape_of_fixed_length_lists(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    lists = pa.table({"v": pa.array(VECTORS.tolist(), pa.list_(pa.float64()))})
    expected = shard({"v": VECTORS}, tmp_path / "expected")
    given = {"v": ("float32", (3,))}
    for number, source in enumerate([lists, lists.to_reader(7), {"v": VECTORS.tolist()}]):
        data = shard(source, tmp_path / f"d{number}", dtypes=given)
        assert (data.columns["v"], data.checksum) == (expected.columns["v"], expected.checksum)
    assert shard(lists, tmp_path / "ragged").columns["v"].ragged
    uneven = {"v": TOKENS}
    with pytest.raises(InputError, match="'v' has rows of differing length"):
        shard(uneven, tmp_path / "d", dtypes=given)
    with pytest.raises(InputError, match=r"'v' has rows of shape \(3,\), which cannot become"):
        shard(lists, tmp_path / "d", dtypes={"v": ("float32", (4,))})


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_uint8_rows_are_read_as_numbers_not_as_bytes(tmp_path: Path, dtype: str) -> None:
    pa = pytest.importorskip("pyarrow")
    pixels = RNG.integers(0, 256, (ROWS, 12)).astype(np.uint8)
    expected = shard({"v": pixels.reshape(ROWS, 3, 4).astype(dtype)}, tmp_path / "expected")
    lists = pa.table({"v": pa.array(pixels.tolist(), pa.list_(pa.uint8()))})
    sources = [{"v": pixels}, {"v": list(pixels)}, lists, lists.to_reader(7), rows({"v": pixels})]
    for number, source in enumerate(sources):
        data = shard(source, tmp_path / str(number), dtypes={"v": (dtype, (3, 4))})
        assert (data.columns["v"], data.checksum) == (expected.columns["v"], expected.checksum)
    with pytest.raises(
        InputError, match=r"rows of shape \(12,\), which cannot become shape \(3,\)"
    ):
        shard(lists, tmp_path / "d", dtypes={"v": (dtype, (3,))})
    # Batches of binary values stay bytes when they are joined, spooled and made fixed.
    values = pa.table({"v": pa.array([row.tobytes() for row in pixels])})
    floats = shard({"v": pixels.view("<f4")}, tmp_path / "floats")
    joined = pa.concat_tables([values[:20], values[20:]])
    for number, source in enumerate([joined, joined.to_reader(7)]):
        data = shard(source, tmp_path / f"bytes{number}", dtypes={"v": ("float32", (3,))})
        assert data.checksum == floats.checksum


def test_the_error_names_binary_values_that_do_not_fit(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    even = pa.table({"v": pa.array([b"12345678"] * 3), "y": [1, 2, 3]})
    uneven = pa.table({"v": pa.array([b"12345678", b"1234"])})
    for table, dtypes, match in [
        (even, {"v": ("float32", (3,))}, r"'v' has 8 bytes in each row, but .* needs 12"),
        (even.select(["y"]), {"y": ("int64", 2)}, r"'y' has rows of shape \(\), which cannot"),
        (
            uneven,
            {"v": ("float32", (2,))},
            r"'v' has rows of differing length \(8 in row 0, 4 in row 1",
        ),
        (even, {"v": ("float32", ())}, "is not a type and a shape"),
        (even, {"v": ("float32", (2, -1))}, "is not a type and a shape"),
        (even, {"v": ("float31", (2,))}, "unknown dtype 'float31'"),
    ]:
        with pytest.raises(InputError, match=match):
            shard(table, tmp_path / "d", dtypes=dtypes)
    with pytest.raises(InputError, match="'x' a shape, but it is a stack"):
        shard(even, tmp_path / "d", columns={"x": ["y"]}, dtypes={"x": ("float32", (1,))})


def test_tuples_of_a_torch_dataset_are_x_and_y(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    x, y = torch.from_numpy(VECTORS), torch.from_numpy(INTS)

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[name-defined,misc]
        def __iter__(self) -> Iterator[Any]:
            return iter([Pair(a, b) for a, b in zip(x, y, strict=True)])

    Pair = collections.namedtuple("Pair", "x y")
    tensors = torch.utils.data.TensorDataset(x, y)
    every = [
        shard(source, tmp_path / str(number)).checksum
        for number, source in enumerate(
            [
                {"x": VECTORS, "y": INTS},
                tensors,
                torch.utils.data.Subset(tensors, range(ROWS)),
                Stream(),
            ]
        )
    ]
    assert len(set(every)) == 1
    three = torch.utils.data.TensorDataset(x, y, y)
    assert list(shard(three, tmp_path / "three").columns) == ["x", "y", "column2"]
    single = torch.utils.data.TensorDataset(x)
    assert list(shard(single, tmp_path / "one").columns) == ["x"]


def test_a_torch_dataset_without_a_length_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Endless(torch.utils.data.Dataset):  # type: ignore[name-defined,misc]
        def __getitem__(self, index: int) -> Any:
            return index, 0

    with pytest.raises(InputError, match=r"Endless has no length: give it the method __len__"):
        shard(Endless(), tmp_path / "d")


def test_bfloat16_from_torch_and_dlpack(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(VECTORS).to(torch.bfloat16)

    class OnlyDlpack:
        def __dlpack__(self, **keywords: Any) -> Any:
            return tensor.__dlpack__(**keywords)

        def __dlpack_device__(self) -> tuple[int, int]:
            return tensor.__dlpack_device__()

    bits = tensor.view(torch.int16).numpy().view(np.uint16)
    expected = shard({"x": VECTORS}, tmp_path / "e", dtypes={"x": torch.bfloat16})
    for number, source in enumerate(
        [{"x": tensor}, {"x": OnlyDlpack()}, ({"x": row} for row in tensor)]
    ):
        data = shard(source, tmp_path / str(number), shuffle=False)
        assert data.columns["x"].dtype == "bfloat16"
        stored = np.concatenate([data.shard(i)["x"] for i in range(8)])
        assert np.array_equal(stored, bits)
    assert shard({"x": tensor}, tmp_path / "s").checksum == expected.checksum
    scalars_only = shard(({"x": row[0]} for row in tensor), tmp_path / "z", shuffle=False)
    assert scalars_only.shard(0)["x"].tolist() == bits[:7, 0].tolist()


def test_dlpack_and_buffers(tmp_path: Path) -> None:
    class OnlyDlpack:
        def __dlpack__(self, **keywords: Any) -> Any:
            return VECTORS.__dlpack__(**keywords)

        def __dlpack_device__(self) -> tuple[int, int]:
            return VECTORS.__dlpack_device__()

    plain = shard({"x": VECTORS, "y": FLOATS}, tmp_path / "a")
    other = shard({"x": OnlyDlpack(), "y": array.array("d", FLOATS)}, tmp_path / "b")
    assert plain.checksum == other.checksum


def test_a_memory_mapped_array_is_read_in_place(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", VECTORS)
    mapped = np.load(tmp_path / "v.npy", mmap_mode="r")
    a, b = shard({"x": VECTORS}, tmp_path / "a"), shard({"x": mapped}, tmp_path / "b")
    assert a.checksum == b.checksum


def test_column_types_of_a_stream_widen_between_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: list[Any] = [1, 2, 3, 4.5, 5, True]
    lists: list[list[Any]] = [[], [], [1], [2.5, 3], [], [4]]
    arrays = [np.zeros(2), np.ones(2), np.ones(2), np.ones(3), np.ones(0), np.ones(2)]
    source = [
        {"v": v, "l": row, "a": a, "s": [f"w{len(row)}"] * len(row)}
        for v, row, a in zip(values, lists, arrays, strict=True)
    ]
    whole = shard(source, tmp_path / "whole", shards=2)
    for chunk_rows in (1, 2, 4):
        monkeypatch.setattr("cerebro.data.sources.row_by_row.CHUNK_ROWS", chunk_rows)
        stream = shard(iter(source), tmp_path / str(chunk_rows), shards=2)
        assert stream.columns == whole.columns
        assert stream.checksum == whole.checksum
    assert {name: (c.dtype, c.ragged) for name, c in whole.columns.items()} == {
        "v": ("float64", False), "l": ("float64", True), "a": ("float64", True),
        "s": ("int64", True),
    }  # fmt: skip
    assert whole.classes["s"] == ["w1", "w2"]


def test_lists_of_images_are_stacked(tmp_path: Path) -> None:
    pictures = [np.full((4, 5), i, np.uint8) for i in range(9)]
    data = shard({"x": pictures}, tmp_path / "a")
    assert (data.columns["x"].shape, data.columns["x"].ragged) == ((4, 5), False)
    longer = [*pictures, np.zeros((6, 5), np.uint8)]
    ragged = shard({"x": longer}, tmp_path / "b").columns["x"]
    assert (ragged.shape, ragged.ragged) == ((5,), True)
    same_length = shard({"x": [[1, 2], [3, 4]]}, tmp_path / "c").columns["x"]
    assert same_length.ragged


def test_a_generator_may_reuse_its_buffers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pil = pytest.importorskip("PIL.Image")

    class OnlyDlpack:
        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

        def __dlpack__(self, **keywords: Any) -> Any:
            return self.tensor.__dlpack__(**keywords)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.tensor.__dlpack_device__()

    array, flag = np.zeros(3, np.float32), np.zeros((), np.bool_)
    tensor, half = torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)
    tokens: list[int] = []
    image = pil.new("L", (4, 3))

    def reused() -> Iterator[dict[str, Any]]:
        for row in range(ROWS):
            array[:], flag[...] = VECTORS[row], FLAGS[row]
            tensor.copy_(torch.from_numpy(VECTORS[row]))
            half.copy_(tensor)
            tokens[:] = TOKENS[row]
            image.paste(row, (0, 0, 4, 3))
            yield {
                "a": array, "b": flag, "t": tensor, "d": OnlyDlpack(array), "h": half,
                "hd": OnlyDlpack(half), "l": tokens, "n": [array, tensor], "i": image,
            }  # fmt: skip

    pictures = np.arange(ROWS, dtype=np.uint8)[:, None, None].repeat(3, 1).repeat(4, 2)
    halves = torch.from_numpy(VECTORS).to(torch.bfloat16)
    pairs = [[row, row] for row in VECTORS]
    expected = shard(
        {"a": VECTORS, "b": FLAGS, "t": VECTORS, "d": VECTORS, "h": halves, "hd": halves,
         "l": TOKENS, "n": pairs, "i": pictures},
        tmp_path / "expected",
    )  # fmt: skip
    data = shard(reused(), tmp_path / "d")
    assert data.columns == expected.columns
    assert data.checksum == expected.checksum

    class Samples(torch.utils.data.Dataset):  # type: ignore[name-defined,misc]
        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, row: int) -> Any:
            return {"v": tensor.copy_(torch.from_numpy(VECTORS[row]))}

    vectors = shard({"v": VECTORS}, tmp_path / "vectors")
    assert shard(Samples(), tmp_path / "samples").checksum == vectors.checksum


def test_chunks_of_large_images_have_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pil = pytest.importorskip("PIL.Image")
    monkeypatch.setattr("cerebro.data.sources.row_by_row.CHUNK_BYTES", 3 * 4 * 5 * 2)
    pictures = ({"x": pil.new("RGB", (4, 5), (row, 0, 0))} for row in range(5))
    tables = list(row_chunks(pictures, None))
    assert [table["x"].rows for table in tables] == [2, 2, 1]
    red = np.concatenate([table["x"].values[:, 0, 0, 0] for table in tables])
    assert red.tolist() == [0, 1, 2, 3, 4]


def test_class_labels_keep_their_codes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"x": datasets.Value("int32"), "y": datasets.ClassLabel(names=["no", "maybe", "absent"])}
    )
    found = datasets.Dataset.from_dict({"x": [1, 2, 3], "y": [1, 0, 1]}, features=features)
    data = shard(found, tmp_path / "d", shuffle=False, shards=1)
    assert data.classes["y"] == ["no", "maybe", "absent"]
    assert data.shard(0)["y"].tolist() == [1, 0, 1]
    assert data.columns["x"].dtype == "int32"
    assert shard(found, tmp_path / "d", shuffle=False, shards=1, exist_ok=True)
    with pytest.raises(
        InputError, match="none of which is 'train': give one of them, such as data"
    ):
        shard(datasets.DatasetDict(other=found), tmp_path / "e")


def _labelled(codes: list[int], names: list[str], image: bool = False) -> Any:
    """A Hugging Face dataset, also with codes that its encoder refuses."""
    datasets, pa = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    features = {"y": datasets.ClassLabel(names=names)}
    table = pa.table({"y": codes})
    if image:
        picture = {"bytes": None, "path": None}
        features["image"] = datasets.Image()
        pil = pytest.importorskip("PIL.Image")
        encoded = datasets.Image().encode_example(pil.new("L", (2, 2)))
        table = table.append_column("image", pa.array([picture | encoded] * len(codes)))
    info = datasets.DatasetInfo(features=datasets.Features(features))
    return datasets.Dataset(table.cast(info.features.arrow_schema), info=info)


@pytest.mark.parametrize("stream", [False, True])
def test_features_of_hugging_face_keep_their_types_beside_images(
    tmp_path: Path, stream: bool
) -> None:
    """A dataset with a feature that must be decoded is read row by row, as Python's numbers."""
    datasets = pytest.importorskip("datasets")
    pil = pytest.importorskip("PIL.Image")
    grid = np.arange(24, dtype="f4").reshape(3, 4, 2)
    features = {
        "grid": datasets.Array2D((4, 2), "float32"),
        "pixels": datasets.Array3D((1, 4, 2), "uint8"),
        "pair": datasets.Sequence(datasets.Value("float32"), length=2),
        "tokens": datasets.Sequence(datasets.Value("int32")),  # here of one length by chance
        "one": datasets.Value("float32"),
        "flag": datasets.Value("bool"),
        "y": datasets.ClassLabel(names=["no", "yes"]),
        "image": datasets.Image(),
    }
    values = {
        "grid": grid.tolist(),
        "pixels": grid[:, None].astype("u1").tolist(),
        "pair": grid[:, 0].tolist(),
        "tokens": [[1, 2], [3, 4], [5, 6]],
        "one": grid[:, 0, 0].tolist(),
        "flag": [True, False, True],
        "y": [0, 1, 0],
        "image": [pil.new("L", (2, 2))] * 3,
    }
    found = datasets.Dataset.from_dict(values, features=datasets.Features(features))
    found = found.to_iterable_dataset() if stream else found
    data = shard(found, tmp_path / "d", shards=1, shuffle=False)
    assert {name: (column.dtype, column.shape) for name, column in data.columns.items()} == {
        "grid": ("float32", (4, 2)),
        "pixels": ("uint8", (1, 4, 2)),
        "pair": ("float32", (2,)),
        "tokens": ("int32", ()),
        "one": ("float32", ()),
        "flag": ("bool", ()),
        "y": ("int64", ()),
        "image": ("uint8", (2, 2)),
    }
    assert [name for name, column in data.columns.items() if column.ragged] == ["tokens"]
    np.testing.assert_array_equal(data.shard(0)["grid"], grid)


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_the_error_names_a_label_without_a_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: bool, stream: bool
) -> None:
    monkeypatch.setattr("cerebro.data.sources.row_by_row.CHUNK_ROWS", 2)
    for codes, message in [
        ([0, 1, 2, -1], "column 'y' has a missing value in row 3: fill it"),
        ([0, 1, 2, 3], "column 'y' has the class 3 in row 3, but the 3 class names are for 0 to 2"),
    ]:
        found = _labelled(codes, ["no", "maybe", "yes"], image)
        found = found.to_iterable_dataset() if stream else found
        with pytest.raises(InputError) as caught:
            shard(found, tmp_path / "d")
        assert str(caught.value).startswith(message)
        with pytest.raises(InputError) as caught:  # before any writer sees the codes
            list(open_source(found).chunks(None))
        assert str(caught.value).startswith(message)
    assert list(tmp_path.iterdir()) == []
    unlabelled = _labelled([-1] * 4, ["no", "yes"], image=True)
    assert list(shard(unlabelled, tmp_path / "d", columns=["image"]).columns) == ["image"]


@pytest.mark.parametrize(
    ("code", "message"),
    [(-1, "column 'y' has a missing value in row 3"), (2, "column 'y' has the class 2 in row 3")],
)
def test_class_codes_without_a_name_are_refused(tmp_path: Path, code: int, message: str) -> None:
    def column(codes: list[int], offsets: list[int] | None = None) -> ColumnData:
        ends = None if offsets is None else np.array(offsets)
        return ColumnData(np.array(codes), "int64", ends, ["a", "b"], ordered=True)

    class Codes(Source):  # of another package, which does not check them
        def chunks(self, wanted: Any) -> Iterator[Table]:
            return iter([{"y": column([0, 1])}, {"y": column([1, code])}])

    train = shard({"y": ["a", "b"]}, tmp_path / "train")
    with pytest.raises(InputError, match=message):
        shard(Codes(), tmp_path / "d")
    with pytest.raises(InputError, match=message):
        concatenate("y", [column([0, 1]), column([1, code])])
    with pytest.raises(InputError, match=message):
        concatenate("y", [column([0, 1, 0], [0, 1, 3]), column([1, 0, code], [0, 1, 3])])
    with pytest.raises(InputError, match=message.replace("row 3", "row 1")):  # of its chunk
        given_rows.write(Codes(), tmp_path / "e", train)
    assert [path.name for path in tmp_path.iterdir()] == ["train"]


def test_a_transform_of_a_hugging_face_dataset_is_not_ignored(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    found = datasets.Dataset.from_dict({"x": [1, 2, 3]})
    found.set_transform(lambda batch: {"x": [10 * x for x in batch["x"]]})
    with pytest.raises(InputError, match=r"has a transform \(set_transform\), .* dataset\.map"):
        shard(found, tmp_path / "d")
    found.reset_format()
    plain = shard(found, tmp_path / "plain")
    assert shard(found.with_format("numpy"), tmp_path / "d").checksum == plain.checksum


def test_hugging_face_images_are_decoded(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    pil = pytest.importorskip("PIL.Image")
    pictures = [pil.fromarray(np.full((3, 4, 3), 9 * i, np.uint8)) for i in range(5)]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
    )
    found = datasets.Dataset.from_dict(
        {"image": pictures, "label": [0, 1, 0, 1, 1]}, features=features
    )
    data = shard(
        found, tmp_path / "d", shuffle=False, shards=1, columns={"x": "image", "y": "label"}
    )
    assert data.shard(0)["x"].shape == (5, 3, 4, 3)
    assert data.shard(0)["x"][:, 0, 0, 0].tolist() == [0, 9, 18, 27, 36]
    assert data.classes["y"] == ["a", "b"]


@pytest.fixture
def picture_folder(tmp_path: Path) -> Path:
    pil = pytest.importorskip("PIL.Image")
    for number, name in enumerate(["dog", "cat", "dog", "ant", "cat"]):
        folder = tmp_path / "pictures" / name / ("deep" if number == 4 else "")
        folder.mkdir(parents=True, exist_ok=True)
        pil.fromarray(np.full((6, 4, 3), 10 * number, np.uint8)).save(folder / f"{number}.png")
    (tmp_path / "pictures" / "notes.txt").write_text("no class")
    (tmp_path / "pictures" / "empty").mkdir()
    return tmp_path / "pictures"


def test_image_folders(picture_folder: Path, tmp_path: Path) -> None:
    data = shard(images(picture_folder), tmp_path / "d", shuffle=False, shards=1)
    assert data.shard(0)["x"].shape == (5, 6, 4, 3)
    assert data.shard(0)["x"][:, 0, 0, 0].tolist() == [30, 10, 40, 0, 20]
    assert data.shard(0)["y"].tolist() == [0, 1, 1, 2, 2]
    assert data.classes["y"] == ["ant", "cat", "dog"]
    grey = shard(images(picture_folder, size=(2, 3), mode="L"), tmp_path / "g")
    assert grey.columns["x"].shape == (2, 3, 1)
    again = shard(images(picture_folder), tmp_path / "d", shuffle=False, shards=1, exist_ok=True)
    assert again.checksum == data.checksum
    with pytest.raises(InputError, match="made from other data"):
        shard(images(picture_folder, 8), tmp_path / "d", shuffle=False, shards=1, exist_ok=True)


def test_bad_image_folders(picture_folder: Path, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (9, 9)).save(picture_folder / "dog" / "z.png")
    with pytest.raises(InputError, match=r"z\.png' has 9 x 9 pixels, .*6 x 4.*size="):
        shard(images(picture_folder), tmp_path / "d")
    (picture_folder / "dog" / "z.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    with pytest.raises(InputError, match=r"z\.png' is not an image or is damaged"):
        shard(images(picture_folder, size=4), tmp_path / "d")
    with pytest.raises(InputError, match="no class folders"):
        images(picture_folder / "empty")
    with pytest.raises(InputError, match="no folder"):
        images(picture_folder / "nowhere")
    with pytest.raises(InputError, match="mode is 'CMYK'"):
        images(picture_folder, mode="CMYK")
    with pytest.raises(InputError, match="size is 0"):
        images(picture_folder, size=0)
    with pytest.raises(InputError, match=r"z\.png' is not an image.*errors=\"skip\""):
        shard(picture_folder, tmp_path / "d")


@pytest.mark.parametrize(
    ("dtype", "suffix", "mode"),
    [("uint16", "png", "I;16"), ("uint16", "tif", "I;16"), ("int32", "tif", "I"),
     ("float32", "tif", "F"), ("uint16", "pgm", "I")],
)  # fmt: skip
def test_images_of_more_than_8_bits_are_refused(
    picture_folder: Path, tmp_path: Path, dtype: str, suffix: str, mode: str
) -> None:
    from PIL import Image

    path = picture_folder / "dog" / f"z.{suffix}"
    deep = np.full((6, 4), 1000, dtype)
    if suffix == "pgm":
        path.write_bytes(b"P5 4 6 65535\n" + deep.astype(">u2").tobytes())
    else:
        Image.fromarray(deep).save(path)
    with Image.open(path) as image:
        assert image.mode.startswith(mode)
    match = rf"^'{path}' has pixels of more than 8 bits \(.*\), .*: convert the images to 8 bits"
    for wanted in ("L", "RGB"):
        with pytest.raises(InputError, match=match):
            shard(images(picture_folder, mode=wanted), tmp_path / "d")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a,b\n", "no rows"),
        ("a,b\n1\n", "line 2 has 1 cells, but the header has 2"),
        ("a,a\n1,2\n", "two columns named 'a'"),
        ("a,b\n1,\n", "column 'b' has a missing value in row 0"),
        ("a,b\n1,2\n3,\n", "column 'b' has a missing value in row 1"),
        ('a,b\n1,"2\n', "line 2: unexpected end of data"),
        ("a\n99999999999999999999\n", "too large for int64"),
        ("a,\n1,2\n", "is empty: rename it"),
    ],
)
def test_bad_csv(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InputError) as caught:
        shard(tmp_path / "a.csv", tmp_path / "d")
    assert message in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["a.csv"]  # noqa: PTH208


def test_csv_column_types_come_from_all_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cerebro.data.sources.files.CHUNK_ROWS", 2)
    (tmp_path / "a.csv").write_text(
        "\ufeffi,f,late,b,text,mixed,digits\n"
        "1,1,1,true,1_0,true,007\n"
        "2,2.5,2,False,20,false,1\n"
        "-3,nan,y,TRUE,p,true,1\n"
        "4,1e3,x,true,q,1,1\n"
        '5,inf,z,true,"a,b",true,2\n',
        encoding="utf-8",
    )
    data = shard(tmp_path / "a.csv", tmp_path / "d", shards=1, shuffle=False)
    kinds = {name: column.dtype for name, column in data.columns.items()}
    assert kinds == {
        "i": "int64", "f": "float64", "late": "int64", "b": "bool", "text": "int64",
        "mixed": "int64", "digits": "int64",
    }  # fmt: skip
    assert data.classes["late"] == ["1", "2", "x", "y", "z"]
    assert data.classes["text"] == ["1_0", "20", "a,b", "p", "q"]
    assert data.classes["mixed"] == ["1", "false", "true"]
    assert data.classes["digits"] is None
    assert data.shard(0)["f"].tolist()[3:] == [1000.0, np.inf]
    (tmp_path / "t.tsv").write_text("a\tb\n1\tx\n")
    assert shard(tmp_path / "t.tsv", tmp_path / "t").classes["b"] == ["x"]


@pytest.mark.parametrize(
    ("cells", "kind", "classes"),
    [
        (["true", "false", "1", "2"], "int64", ["1", "2", "false", "true"]),
        (["true", "false", "0.5", "2"], "int64", ["0.5", "2", "false", "true"]),
        (["true", "false", "x", "y"], "int64", ["false", "true", "x", "y"]),
        (["1", "2", "true", "false"], "int64", ["1", "2", "false", "true"]),
        (["", "", "0.5", "1"], "float64", None),
        (["0.5", "1", "", ""], "float64", None),
        (["true", "false", "true", "true"], "bool", None),
    ],
)
def test_csv_columns_whose_kind_changes_between_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cells: list[str], kind: str, classes: Any
) -> None:
    monkeypatch.setattr("cerebro.data.sources.files.CHUNK_ROWS", 2)
    lines = [f"{number},{cell}" for number, cell in enumerate(cells)]
    (tmp_path / "a.csv").write_text("\n".join(["n,c", *lines]) + "\n")
    data = shard(tmp_path / "a.csv", tmp_path / "d", shards=1, shuffle=False)
    assert (data.columns["c"].dtype, data.classes["c"]) == (kind, classes)
    stored = data.shard(0)["c"]
    if classes is not None:
        assert [classes[code] for code in stored] == cells
    elif kind == "float64":
        expected = [float(cell or "nan") for cell in cells]
        assert np.array_equal(stored, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("cells", "row"),
    [
        (["", "", "", ""], 0),
        (["", "", "true", "false"], 0),
        (["true", "false", "", ""], 2),
        (["", "", "1", "2"], 0),
    ],
)
def test_empty_csv_cells_are_reported_as_missing_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cells: list[str], row: int
) -> None:
    monkeypatch.setattr("cerebro.data.sources.files.CHUNK_ROWS", 2)
    (tmp_path / "a.csv").write_text("n,c\n" + "".join(f"1,{cell}\n" for cell in cells))
    with pytest.raises(InputError, match=f"column 'c' has a missing value in row {row}"):
        shard(tmp_path / "a.csv", tmp_path / "d")


def test_bad_arrow(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    now = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
    for column, message in [
        ([1, None, 3], "missing value in row 1"),
        (["a", "b", None], "missing value in row 2"),
        ([[1], None, []], "missing value in row 1"),
        ([now] * 3, "Arrow's type timestamp"),
        ([b"1"] * 3, "Arrow's type binary"),
        ([{"a": 1}] * 3, "Arrow's type struct"),
        ([[[1], [2, 3]]] * 3, "ragged in more than one dimension"),
        ([None] * 3, "missing value in row 0"),
    ]:
        with pytest.raises(InputError) as caught:
            shard(pa.table({"c": column}), tmp_path / "d")
        assert message in str(caught.value)
        assert "column 'c'" in str(caught.value)
        with pytest.raises(InputError, match="column 'c'"):
            shard(pa.table({"c": column}).to_reader(1), tmp_path / "d")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(InputError, match="not a Parquet file"):
        shard(tmp_path / "a.parquet", tmp_path / "d")
    (tmp_path / "a.arrow").write_bytes(b"ARROW1 nothing")
    with pytest.raises(InputError, match="not an Arrow file"):
        shard(tmp_path / "a.arrow", tmp_path / "d")
    with pytest.raises(InputError, match="two columns named 'a'"):
        shard(pa.table([[1], [2]], names=["a", "a"]), tmp_path / "d")
    with pytest.raises(InputError, match="no column 'z'"):
        shard(pa.table({"a": [1]}), tmp_path / "d", columns=["z"])


BOXES = [[[1.0, 2.0], [3.0, 4.0]], [], [[5.0, None]], [[7.0, 8.0], [9.0, 0.5], [1.5, 2.5]]]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_lists_of_lists_of_one_length_are_stored(tmp_path: Path, size: int) -> None:
    pa = pytest.importorskip("pyarrow")
    listed = shard({"c": BOXES}, tmp_path / "lists", shards=1, shuffle=False)
    table = pa.Table.from_batches(pa.table({"c": BOXES}).to_batches(size))
    for name, source in (("table", table), ("reader", table.to_reader())):
        data = shard(source, tmp_path / name, shards=1, shuffle=False)
        assert data.columns["c"] == listed.columns["c"]
        for row, stored in zip(BOXES, data.shard(0)["c"], strict=True):
            np.testing.assert_array_equal(stored, np.array(row, float).reshape(-1, 2))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[[1], [2]], [[3], [4, 5]]], "row 1 has parts of other lengths"),
        ([[[1], [2]], [], [[3], []]], "row 2 has parts of other lengths"),
        ([[[1], [2]], [[3], [4]], [[5], [None]]], "missing value in row 2"),
        ([[[[1], [2]]], [[[3], [4]], [[5]]]], "row 1 has parts of other lengths"),
        ([[["a"], ["b"]], [["c"], ["d", "e"]]], "row 1 has parts of other lengths"),
        ([[[1], [2]], [[3, 4], [5, 6]]], "row 1 has parts of other lengths"),
    ],
)
@pytest.mark.parametrize("outer", ["list_", "large_list"])
def test_the_error_names_the_row_of_lists_that_cannot_be_stored(
    tmp_path: Path, rows: list[list[object]], message: str, outer: str
) -> None:
    pa = pytest.importorskip("pyarrow")
    inner = pa.array(rows).type.value_type
    kinds = [getattr(pa, outer)(inner)]
    if {len(row) for row in rows} == {2}:
        kinds.append(pa.list_(inner, 2))
    for kind in kinds:
        table = pa.table({"c": pa.array(rows, kind)})
        for source in (table, table.to_reader()):
            with pytest.raises(InputError, match=f"column 'c' .*{message}"):
                shard(source, tmp_path / "d")


def test_list_chunks_with_different_inner_lengths_are_refused(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"c": pa.chunked_array([[[[1]], []], [[], [[1, 2]]]])})
    for source in (table, table.to_reader()):
        with pytest.raises(InputError, match=r"column 'c': .* after row 2 .* different shape"):
            shard(source, tmp_path / "d")


def test_pairs_and_bunches(tmp_path: Path) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_iris(return_X_y=True)
    pair = shard((x, y), tmp_path / "pair")
    assert pair.checksum == shard({"x": x, "y": y}, tmp_path / "mapping").checksum
    data = shard(datasets.load_iris(), tmp_path / "iris")
    assert data.classes == {"x": None, "y": ["setosa", "versicolor", "virginica"]}
    frame = shard(datasets.load_iris(as_frame=True), tmp_path / "frame")
    assert frame.checksum == data.checksum
    for made in (pair, data):
        assert np.array_equal(np.concatenate([made.shard(i)["y"] for i in range(8)]),
                              np.concatenate([pair.shard(i)["y"] for i in range(8)]))  # fmt: skip
    assert shard(datasets.load_digits(), tmp_path / "digits").classes["y"] is None
    linnerud = shard(datasets.load_linnerud(), tmp_path / "l")
    assert (linnerud.columns["y"].shape, linnerud.classes["y"]) == ((3,), None)
    with pytest.raises(InputError, match="the Bunch has images, but not data and target: name"):
        shard(pytest.importorskip("sklearn.utils").Bunch(images=x), tmp_path / "d")


def test_a_frame_in_a_pair_or_mapping_becomes_one_array(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    count = 0

    def stored(x: Any) -> tuple[str, Any]:
        nonlocal count
        count += 1
        pair = shard((x, FLAGS[: len(x)]), tmp_path / f"p{count}", shards=1, shuffle=False)
        named = shard({"x": x, "y": FLAGS[: len(x)]}, tmp_path / f"m{count}", shards=1,
                      shuffle=False)  # fmt: skip
        assert named.checksum == pair.checksum
        column = pair.columns["x"]
        assert (column.shape, column.ragged) == ((x.shape[1],), False)
        return column.dtype, pair.shard(0)["x"].tolist()

    dummies = pd.get_dummies(pd.DataFrame({"f": [0.5, 2.0], "s": ["a", "b"]}))
    assert stored(dummies) == ("float64", [[0.5, 1.0, 0.0], [2.0, 0.0, 1.0]])
    sparse = pd.get_dummies(pd.DataFrame({"f": [0.5, 2.0], "s": ["a", "b"]}), sparse=True)
    assert stored(sparse) == ("float64", [[0.5, 1.0, 0.0], [2.0, 0.0, 1.0]])
    flags = pd.DataFrame({0: np.array([1, 2], np.int16), 1: [True, False]})
    assert stored(flags) == ("int16", [[1, 1], [2, 0]])
    nullable = pd.DataFrame({"i": [1, 2], "b": [True, False]}).astype(
        {"i": "Int32", "b": "boolean"}
    )
    assert stored(nullable) == ("int32", [[1, 1], [2, 0]])
    arrow = flags.convert_dtypes(dtype_backend="pyarrow")
    assert stored(arrow) == ("int16", [[1, 1], [2, 0]])
    objects = pd.DataFrame({"f": [0.5, 2.0], "o": pd.Series([1, True], dtype=object)})
    assert stored(objects) == ("float64", [[0.5, 1.0], [2.0, 1.0]])
    plain = pd.DataFrame({"i": np.array([1, 2]), "f": np.array([0.5, 2.0], np.float32)})
    assert stored(plain) == ("float64", plain.to_numpy().tolist())
    texts = pd.DataFrame({"s": ["b", "a"], "t": ["c", "b"]})
    assert stored(texts) == ("int64", [[1, 2], [0, 1]])
    gaps = pd.DataFrame({"f": pd.array([1.5, None], dtype="Float32"), "b": [True, False]})
    data = shard((gaps, [0, 1]), tmp_path / "gaps", shards=1, shuffle=False)
    assert data.columns["x"].dtype == "float32"
    assert np.array_equal(data.shard(0)["x"], [[1.5, 1], [np.nan, 0]], equal_nan=True)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ({"b": "Int64"}, "the frame's column 'b' has a missing value in row 1: fill it, drop"),
        ({"a": "Int64", "b": "Int64"}, "the frame's column 'b' has a missing value in row 1"),
        ({"b": "boolean"}, "the frame's column 'b' has a missing value in row 1"),
        ({"b": object}, "the frame's column 'b' has a missing value in row 1"),
        ({"b": "string"}, "the frame's column 'b' has a missing value in row 1"),
        ({"b": "category"}, "the frame's column 'b' has a missing value in row 1"),
    ],
)
def test_the_error_names_a_missing_value_in_a_frame(
    tmp_path: Path, kinds: dict[str, Any], message: str
) -> None:
    pd = pytest.importorskip("pandas")
    columns = {"a": pd.Series([2, 3]), "b": pd.Series([1, None], dtype=object)}
    frame = pd.DataFrame({name: columns[name].astype(kinds.get(name)) if name in kinds
                          else columns[name] for name in ("a", "b")})  # fmt: skip
    for source in ((frame, [0, 1]), {"x": frame, "y": [0, 1]}, (frame[["b"]], [0, 1])):
        with pytest.raises(InputError) as caught:
            shard(source, tmp_path / "d")
        assert str(caught.value).startswith(f"column 'x': {message}")
        assert "columns=" not in str(caught.value)  # which does not know the frame's columns


def test_a_frame_of_mixed_types_is_refused_as_an_array(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    utils = pytest.importorskip("sklearn.utils")
    for column, found in [(["a", "b"], "text"), ([[1], [2, 3]], "sequences")]:
        mixed = pd.DataFrame({"f": [0.5, 1.5], "c": column})
        with pytest.raises(InputError, match=f"frame's column 'c' has {found}: convert it"):
            shard((mixed, [0, 1]), tmp_path / "d")
    times = pd.DataFrame({"f": [0.5], "c": pd.to_datetime(["2020-01-01"])})
    with pytest.raises(InputError, match="'x': the frame's column 'c' is datetime64"):
        shard((times, [0]), tmp_path / "d")
    # A Bunch with a frame of several kinds is that frame, as before.
    flags = pd.DataFrame({"f": [0.5, 1.5], "b": [True, False]})
    bunch = utils.Bunch(data=flags, target=pd.Series([0, 1]), frame=flags.assign(y=[0, 1]))
    assert list(shard(bunch, tmp_path / "bunch").columns) == ["f", "b", "y"]


@pytest.mark.parametrize("chunk_rows", [1, 100])
def test_object_arrays_of_rows_have_a_fixed_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_rows: int
) -> None:
    monkeypatch.setattr("cerebro.data.sources.row_by_row.CHUNK_ROWS", chunk_rows)

    def stored(name: str, source: Any) -> tuple[Any, ...]:
        data = shard(source, tmp_path / name, shards=1, shuffle=False)
        column = data.columns["x"]
        return column.dtype, column.shape, column.ragged, data.shard(0)["x"].tolist()

    numbers = np.array([[1, 0.5], [True, 3]], object)
    assert stored("n", {"x": numbers}) == ("float64", (2,), False, [[1, 0.5], [1, 3]])
    row_arrays = [{"x": row} for row in numbers]
    assert stored("r", row_arrays) == ("float64", (2,), False, [[1, 0.5], [1, 3]])
    cube = np.array([[["b"], ["a"]], [["a"], ["c"]]], object)
    assert stored("c", {"x": cube}) == ("int64", (2, 1), False, [[[1], [0]], [[0], [2]]])
    gap = shard({"x": np.array([[1, 0.5], [None, 3]], object)}, tmp_path / "g", shuffle=False)
    assert np.isnan(gap.shard(1)["x"]).tolist() == [[True, False]]
    for values, message in [
        ([[1, 2], [3, None]], "'x' has a missing value in row 1"),
        ([[True, False], [True, None]], "'x' has a missing value in row 1"),
        ([["a", "b"], ["c", None]], "'x' has a missing value in row 1"),
        ([["a", "b"], ["c", np.nan]], "'x' has a missing value in row 1"),
        ([["a", "b"], ["c", 1]], "'x', row 1 is int, but others are strings"),
        ([[1, 2], [3, "c"]], "'x', row 1 is str, but others are numbers"),
        ([[{}, {}], [{}, {}]], "'x' has values of type dict"),
    ]:
        array = np.array(values, object)
        sources: list[Any] = [{"x": array}, [{"x": row} for row in array]]
        if "missing" in message:  # a row of other values, in another chunk, gets other words
            sources.append({"x": row} for row in array)
        for source in sources:
            with pytest.raises(InputError, match=message):
                shard(source, tmp_path / "d")
    lists = np.empty((1, 2), object)
    lists[0, 0], lists[0, 1] = [1], [2, 3]
    with pytest.raises(InputError, match="'x' is an array of list: give a list of rows"):
        shard({"x": lists}, tmp_path / "d")


GAPS = {"f": [1.5, None, -2.0, None, 3.0], "h": [None, None, 0.5, 1.0, 2.0], "i": [1, 2, 3, 4, 5]}


def _gap_sources(folder: Path, columns: dict[str, list[Any]]) -> dict[str, Any]:
    """The same rows from everything that can lack a value."""
    pa, pd = pytest.importorskip("pyarrow"), pytest.importorskip("pandas")
    import pyarrow.feather
    import pyarrow.parquet

    table, size = pa.table(columns), len(next(iter(columns.values())))
    rows = [{name: values[i] for name, values in columns.items()} for i in range(size)]
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    pyarrow.feather.write_feather(table, folder / "a.arrow")
    shown = [",".join("" if v is None else str(v) for v in row.values()) for row in rows]
    (folder / "a.csv").write_text("\n".join([",".join(columns), *shown]) + "\n")
    sources = {
        "lists": columns,
        "rows": rows,
        "generator": iter(rows),
        "table": table,
        "reader": table.to_reader(2),
        "dictionaries": pa.table({k: pa.array(v).dictionary_encode() for k, v in columns.items()}),
        "parquet": folder / "a.parquet",
        "arrow": folder / "a.arrow",
        "csv": folder / "a.csv",
        "nullable pandas": pd.DataFrame(columns).convert_dtypes(),
        "arrow pandas": table.to_pandas(types_mapper=pd.ArrowDtype),
    }  # fmt: skip
    try:
        import datasets
    except ImportError:
        return sources
    return {**sources, "huggingface": datasets.Dataset.from_dict(columns)}


def test_a_missing_float_is_nan_from_any_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cerebro.data.sources.files.CHUNK_ROWS", 2)
    monkeypatch.setattr("cerebro.data.sources.row_by_row.CHUNK_ROWS", 2)
    pd = pytest.importorskip("pandas")
    expected = shard(pd.DataFrame(GAPS), tmp_path / "expected", shards=2)
    nan = np.isnan(np.concatenate([expected.shard(i)["f"] for i in range(2)]))
    assert (expected.columns["f"].dtype, nan.sum()) == ("float64", 2)
    masked = {k: np.ma.masked_invalid(np.array(v, float)) for k, v in GAPS.items() if k != "i"}
    sources = _gap_sources(tmp_path, GAPS) | {"masked": {**masked, "i": np.array(GAPS["i"])}}
    for name, source in sources.items():
        data = shard(source, tmp_path / name, shards=2)
        assert data.checksum == expected.checksum, name


@pytest.mark.parametrize(
    "values",
    [[1, 2, 3, None, 5], [None, 2, 3, None, 5], [True, False, None, True, True],
     ["a", "b", "a", None, "b"], [None, "b", "a", "a", "b"], [None] * 5],
)  # fmt: skip
def test_any_source_refuses_missing_values_that_are_not_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[Any]
) -> None:
    monkeypatch.setattr("cerebro.data.sources.files.CHUNK_ROWS", 2)
    monkeypatch.setattr("cerebro.data.sources.row_by_row.CHUNK_ROWS", 2)
    message = (
        f"column 'c' has a missing value in row {values.index(None)}: fill it, drop the row, or "
        "leave the column out with columns=[...] (only a column of floats keeps it, as NaN)"
    )
    for name, source in _gap_sources(tmp_path, {"k": [0.5] * 5, "c": values}).items():
        if name == "dictionaries" and values == [None] * 5:
            continue  # Arrow has no dictionary of nothing
        with pytest.raises(InputError) as caught:
            shard(source, tmp_path / "d")
        assert str(caught.value) == message, name


def test_a_missing_value_in_a_sequence(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    for source in ({"t": [[1.5, None], [2.5]]}, pa.table({"t": [[1.5, None], [2.5]]})):
        rows = shard(source, tmp_path / type(source).__name__, shards=1, shuffle=False).shard(0)
        assert np.array_equal(rows["t"][0], [1.5, np.nan], equal_nan=True)
    fixed = pa.array([[1, 2], [3, None]], pa.list_(pa.int64(), 2))
    NA = pytest.importorskip("pandas").NA
    columns: list[Any] = [
        [[1, 2], [3, None]], pa.array([[1, 2, 4], [None]]), fixed, [["a"], ["b", None]],
        [[1, 2], [3, NA]], [[True, False], [True, NA]], [["a", "c"], ["b", NA]],
        [np.array([1, 2]), [3, 4, NA]], [np.array([1, 2]), [3, 4, None]], [[1, 2], [NA]],
        [[[1, 2], [3, 4]], [[5, 6], [7, NA]]],
    ]  # fmt: skip
    for column in columns:
        with pytest.raises(InputError, match="column 't' has a missing value in row 1"):
            shard({"t": column}, tmp_path / "d")
    for last in ([3, NA], [None, 3], [NA]):
        with pytest.raises(InputError, match="column 't' has a missing value in row 1"):
            shard(iter([{"t": [1, 2]}, {"t": last}]), tmp_path / "d")
    gaps = {"t": [[1, NA], [2.5]], "n": [[[1.5, NA], [2, 3]], [[4, 5]]]}
    floats = shard(gaps, tmp_path / "floats", shards=1, shuffle=False)
    assert floats.columns["n"].shape == (2,)
    assert np.array_equal(floats.shard(0)["t"][0], [1, np.nan], equal_nan=True)
    assert np.array_equal(floats.shard(0)["n"][0], [[1.5, np.nan], [2, 3]], equal_nan=True)


def test_bad_pandas(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    for column, message in [
        (["a", None], "missing value in row 1"),
        (pd.array([1, None], dtype="Int64"), "missing value in row 1"),
        (pd.to_datetime(["2020-01-01"] * 2), "convert times to numbers"),
        (pd.Series([object(), object()]), "dtype object"),
        (pd.Series([1, "a"], dtype=object), "dtype object"),
        (pd.Series(["a", 1], dtype=object), "row 1 is int, but others are strings"),
    ]:
        with pytest.raises(InputError, match="column 'c'") as caught:
            shard(pd.DataFrame({"c": column}), tmp_path / "d")
        assert message in str(caught.value)
    with pytest.raises(InputError, match="column name 0 is not a string"):
        shard(pd.DataFrame([[1, 2]]), tmp_path / "d")
    lists = pd.DataFrame({"c": [[1, 2], [3]]})
    assert shard(lists, tmp_path / "lists").columns["c"].ragged


def _arrays(*values: list[float]) -> list[Any]:
    return [np.array(value, np.float32) for value in values]


def test_parts_of_different_lengths_are_not_one_column(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pd = pytest.importorskip("pandas")
    alike = _arrays([0, 1], [2, 3])
    unlike = _arrays([0, 1, 2], [3])
    nested = np.empty(2, object)
    nested[:] = unlike

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[name-defined,misc]
        def __iter__(self) -> Iterator[Any]:
            for parts in (alike, unlike):
                yield tuple(map(torch.from_numpy, parts)), 0

    rows = [{"x": parts} for parts in (alike, unlike)]
    for source in (
        rows,
        iter(rows),
        Stream(),
        {"x": [alike, unlike]},
        {"x": [alike, [[0, 1, 2], [3]]]},
        {"x": [alike[0], unlike]},
        {"x": [np.zeros((2, 2)), nested]},
        {"x": [tuple(alike[:1]), tuple(unlike[:1])]},
        pd.DataFrame({"x": [alike, unlike]}),
    ):
        with pytest.raises(InputError, match=r"'x' is ragged in more than .* row 1 has parts of"):
            shard(source, tmp_path / "d")


def test_parts_of_equal_length_are_one_column(tmp_path: Path) -> None:
    one, other = _arrays([0, 1], [2, 3])
    for number, row in enumerate([(one, other), [one, [2.0, 3.0]], ([0.0, 1.0], other)]):
        data = shard([{"x": row}] * 2, tmp_path / str(number), shards=1)
        stored = data.shard(0)["x"]
        assert [stored[place].tolist() for place in range(2)] == [[[0, 1], [2, 3]]] * 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([1, 2], "row 0 is int: an iterable must give mappings"),
        ((VECTORS, VECTORS, INTS), "give whole columns as a mapping of names, or as a pair (x, y)"),
        ([], "no rows"),
        ([{"a": 1}, {"b": 1}], "row 1 has the columns b, but rows before it have a"),
        ([{"a": 1}, {"a": None}], "column 'a' has a missing value in row 1"),
        ([{"a": 1}, {"a": "x"}], "column 'a', row 1 is str"),
        ([{"a": np.zeros((2, 2))}, {"a": np.zeros((2, 3))}], "column 'a': rows may differ only"),
        ([{"a": np.zeros(2)}, {"a": 1.0}], "column 'a'"),
        ([{"a": 1.0}, {"a": np.zeros(2)}], "column 'a'"),
        ([{"a": datetime.date(2020, 1, 1)}] * 2, "column 'a' has values of type date"),
        ([{"a": b"x"}] * 2, "column 'a'"),
        ([{"a": 2**70}] * 2, "column 'a' has integers too large"),
        ([{"a": {}}] * 2, "column 'a' has values of type dict"),
    ],
)
@pytest.mark.parametrize("chunk_rows", [1, 100])
def test_bad_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Any], message: str, chunk_rows: int
) -> None:
    monkeypatch.setattr("cerebro.data.sources.row_by_row.CHUNK_ROWS", chunk_rows)
    for source in (rows,) if isinstance(rows, tuple) else (rows, iter(rows)):
        with pytest.raises(InputError) as caught:
            shard(source, tmp_path / "d")
        first, _, _ = message.partition(", row 1 is")  # in another chunk other words are used
        assert first in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_bad_npz(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([{}, {}], object))
    with pytest.raises(InputError, match="column 'x' has dtype object"):
        shard(tmp_path / "a.npz", tmp_path / "d")
    np.savez(tmp_path / "b.npz", x=np.zeros(3), y=np.zeros(4))
    with pytest.raises(InputError, match="differ in length: 'x' has 3, 'y' has 4"):
        shard(tmp_path / "b.npz", tmp_path / "d")
    content = (tmp_path / "b.npz").read_bytes()
    (tmp_path / "c.npz").write_bytes(content[:-40])
    with pytest.raises(InputError, match="not an npz file or is damaged"):
        shard(tmp_path / "c.npz", tmp_path / "d")
    np.savez(tmp_path / "f.npz", x=np.asfortranarray(VECTORS))
    a = shard(tmp_path / "f.npz", tmp_path / "f", columns=["x"])
    assert a.checksum == shard({"x": VECTORS}, tmp_path / "v").checksum


def test_unsupported_sources_are_refused(tmp_path: Path) -> None:
    for source, message in [
        (np.zeros(3), "single array: name it"),
        (3, "cannot shard a int: give a mapping"),
        (tmp_path / "a.txt", "unsupported file type"),
        (tmp_path / "a.csv", "no file"),
    ]:
        with pytest.raises(InputError, match=message):
            shard(source, tmp_path / "d")


def test_a_series_is_no_table() -> None:
    with pytest.raises(InputError, match="single array: name it"):
        open_source(frame()["f"])


def test_files_are_known_by_their_content(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a\n1\n2\n")
    first = open_source(path).fingerprint()
    os.utime(path, (0, 0))
    assert open_source(path).fingerprint() == first
    shard(path, tmp_path / "d")
    shard(path, tmp_path / "d", exist_ok=True)
    path.write_text("a\n1\n3\n")
    with pytest.raises(InputError, match="made from other data"):
        shard(path, tmp_path / "d", exist_ok=True)


# --- random datasets -----------------------------------------------------------


def _images(transform: Any, rows: int = 40) -> Any:
    torch = pytest.importorskip("torch")

    class Images(torch.utils.data.Dataset):  # type: ignore[name-defined,misc]
        def __len__(self) -> int:
            return rows

        def __getitem__(self, row: int) -> Any:
            return transform(torch.arange(row, row + 8.0)), row, "name"

    return Images()


@pytest.mark.parametrize("rows", [3, 40, 1000])
def test_a_random_transform_of_a_torch_dataset_warns(tmp_path: Path, rows: int) -> None:
    torch = pytest.importorskip("torch")

    def flip(x: Any) -> Any:
        return x.flip(0) if torch.rand(()) < 0.5 else x

    def stored(name: str) -> Any:
        torch.manual_seed(0)
        return shard(_images(flip, rows), tmp_path / name, shuffle=False, progress=False)

    with pytest.warns(UserWarning) as shown:
        data = stored("data")
    (text,) = [str(warning.message) for warning in shown]
    assert "(column 'x')" in text
    for cure in ("cerebro.transforms.RandomCrop", "RandomHorizontalFlip", "augment="):
        assert cure in text
    # What is stored, and what the program draws next, is what it was without a second look.
    following = torch.rand(())
    torch.manual_seed(0)
    expected = torch.stack([flip(torch.arange(row, row + 8.0)) for row in range(rows)])
    assert torch.equal(following, torch.rand(()))
    assert np.array_equal(np.concatenate([s["x"] for s in _shards(data)]), expected)


def _shards(data: Any) -> list[Any]:
    return list(data.batches(10**6, shuffle=False, framework="numpy"))


def test_a_random_column_that_is_left_out_does_not_warn(tmp_path: Path, recwarn: Any) -> None:
    torch = pytest.importorskip("torch")
    images = _images(lambda x: x + torch.rand(8))
    shard(images, tmp_path / "data", columns=["y", "column2"], progress=False)
    assert list(recwarn) == []


def test_datasets_readable_only_once_are_read_once(tmp_path: Path, recwarn: Any) -> None:
    torch = pytest.importorskip("torch")
    rows = iter(range(40))
    images = _images(lambda x: x.fill_(next(rows)))  # raises StopIteration at the 41st reading
    data = shard(images, tmp_path / "data", shuffle=False, progress=False)
    stored = np.concatenate([shard["x"] for shard in _shards(data)])
    assert stored[:, 0].tolist() == list(range(40))
    shard(_images(torch.neg), tmp_path / "plain", progress=False)
    assert list(recwarn) == []


# --- rows given in place of a dataset -------------------------------------------


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 100])
def test_float64_to_float32_does_not_depend_on_chunk_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_rows: int
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("cerebro.data.sources.row_by_row.CHUNK_ROWS", chunk_rows)
    large = 2**24 + 1  # not a float32; the next two round differently by way of float64
    odd, wide = 2**54 + 2**30 + 1, 2**62 + 2**38 + 1
    columns: dict[str, list[Any]] = {
        "ints first": [1, large, odd, wide, 0.1, 0.2],
        "floats first": [0.1, 0.2, 1, large, odd, wide],
        "between": [1, 0.1, large, odd, wide, 2],
        "narrow": [1, large, 3, *np.array([0.1, 0.2, 0.3], np.float32)],
        "ints": [1, large, odd, wide, 2, 3],
        "lists": [[], [1, odd], [0.1], [], [0.2, 3.5], [wide]],
        "arrays": [np.array([1, odd])] * 3 + [np.array([0.1, 0.2])] * 3,
    }

    class Samples(torch.utils.data.Dataset):  # type: ignore[name-defined,misc]
        def __len__(self) -> int:
            return 6

        def __getitem__(self, row: int) -> dict[str, Any]:
            return {name: values[row] for name, values in columns.items()}

    listed = [Samples()[row] for row in range(6)]
    expected = given_rows.write(listed, tmp_path / "expected")
    assert {name: column.dtype for name, column in expected.columns.items()} == {
        name: "int64" if name == "ints" else "float32" for name in columns
    }
    for number, source in enumerate([Samples(), iter(listed)]):
        data = given_rows.write(source, tmp_path / str(number))
        assert data.columns == expected.columns
        assert data.checksum == expected.checksum
    stored = shard(iter(listed), tmp_path / "wide")  # `shard` keeps float64
    assert {column.dtype for column in stored.columns.values()} == {"int64", "float64"}

"""ShardReader and NpyWriter, through the binding."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import cerebro._core as _core
from cerebro.errors import CorruptDataError

# Every dtype of csrc/core/dtype.h with the NumPy type that files have.
DTYPES = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8")
} | {"bfloat16": np.dtype("uint16")}


def write(path: Path, array: np.ndarray, dtype: str | None = None) -> int:
    """Write one column's file and return its size."""
    writer = _core.NpyWriter(path, dtype or array.dtype.name, array.shape[1:], len(array))
    writer.write(array)
    return writer.close()[0]


def column(path: Path, name: str, array: np.ndarray, dtype: str | None = None) -> tuple:
    """Write a column and return its tuple for ShardReader."""
    size = write(path / f"{name}.npy", array, dtype)
    return (name, dtype or array.dtype.name, array.shape[1:], False, {f"{name}.npy": size})


def ragged(path: Path, name: str, values: np.ndarray, offsets: list[int]) -> tuple:
    sizes = {
        f"{name}.values.npy": write(path / f"{name}.values.npy", values),
        f"{name}.offsets.npy": write(path / f"{name}.offsets.npy", np.array(offsets)),
    }
    return (name, values.dtype.name, values.shape[1:], True, sizes)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let files grow to `size` bytes: in the place of a disk that fills."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)


# --- the writer ------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3,), (0,), (2, 4), (0, 39), (5, 0, 7), (1, 1, 1), (1000, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_files_are_those_of_numpy(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    numbers = np.random.default_rng(0).integers(0, 2, shape)
    array = numbers.astype(DTYPES[dtype])
    writer = _core.NpyWriter(str(tmp_path / "a.npy"), dtype, shape[1:], shape[0])
    writer.write(array)
    size, digest = writer.close()
    np.save(tmp_path / "b.npy", array, allow_pickle=False)
    content = (tmp_path / "a.npy").read_bytes()
    assert content == (tmp_path / "b.npy").read_bytes()
    assert size == len(content)
    assert digest == _core.xxh3_64(content)
    reader = _core.ShardReader(
        str(tmp_path), shape[0], [("a", dtype, shape[1:], False, {"a.npy": size})]
    )
    view = reader.column("a")
    assert view.dtype == DTYPES[dtype]
    np.testing.assert_array_equal(view, np.load(tmp_path / "a.npy"))


def test_the_documented_file(tmp_path: Path) -> None:
    """The example of docs/design/data-format.md: version 1 of the format never changes."""
    document = Path(__file__).parents[2] / "docs" / "design" / "data-format.md"
    dump = re.findall(r"^    [0-9a-f]{8}  (.{48})  ?\|", document.read_text(), re.MULTILINE)
    writer = _core.NpyWriter(tmp_path / "y.npy", "int64", (), 3)
    writer.write(np.array([1, 0, 2]))
    assert writer.close() == (152, "466d8a6b69a7a89e")
    assert (tmp_path / "y.npy").read_bytes() == bytes.fromhex("".join(dump))


def test_rows_in_pieces_and_from_other_layouts(tmp_path: Path) -> None:
    array = np.arange(60, dtype=np.float32).reshape(10, 6)
    writer = _core.NpyWriter(tmp_path / "a.npy", "float32", (3,), 10)
    writer.write(array[:0, ::2])
    writer.write(array[:4, ::2])  # strided
    writer.write(np.asfortranarray(array[4:9, ::2]))
    writer.write(memoryview(np.ascontiguousarray(array[9:, ::2])))
    writer.close()
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), array[:, ::2])


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((2, 3), np.float64),
        np.zeros((2, 3), ">f4"),
        np.zeros((2, 4), np.float32),
        np.zeros((2, 3, 1), np.float32),
        np.zeros(3, np.float32),
        np.float32(1),
        [[1.0, 2.0, 3.0]],
        np.array([[None] * 3]),
    ],
)
def test_rows_of_another_kind_are_refused(tmp_path: Path, rows: object) -> None:
    writer = _core.NpyWriter(tmp_path / "a.npy", "float32", (3,), 2)
    with pytest.raises(ValueError, match=r"a\.npy: rows have a different dtype"):
        writer.write(rows)
    writer.write(np.ones((2, 3), np.float32))  # and the writer goes on
    writer.close()
    assert np.load(tmp_path / "a.npy").sum() == 6


def test_rows_are_counted(tmp_path: Path) -> None:
    writer = _core.NpyWriter(tmp_path / "a.npy", "uint8", (), 3)
    writer.write(np.zeros(2, np.uint8))
    with pytest.raises(ValueError, match="only 2 of 3 rows"):
        writer.close()
    with pytest.raises(ValueError, match="more than the 3 announced"):
        writer.write(np.zeros(2, np.uint8))
    writer.write(np.zeros(1, np.uint8))
    assert writer.close()[0] == 131
    for use in (lambda: writer.write(np.zeros(0, np.uint8)), writer.close):
        with pytest.raises(ValueError, match=r"a\.npy: the writer is closed"):
            use()
    writer.abort()  # nothing any more
    assert (tmp_path / "a.npy").stat().st_size == 131


def test_unclosed_files_are_removed(tmp_path: Path) -> None:
    aborted = _core.NpyWriter(tmp_path / "a.npy", "uint8", (), 3)
    aborted.abort()
    aborted.abort()
    forgotten = _core.NpyWriter(tmp_path / "b.npy", "uint8", (), 3)
    assert [p.name for p in tmp_path.iterdir()] == ["b.npy"]
    del forgotten
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_text("mine")
    with pytest.raises(FileExistsError, match=r"cannot create .*a\.npy"):
        _core.NpyWriter(tmp_path / "a.npy", "uint8", (), 3)
    assert (tmp_path / "a.npy").read_text() == "mine"
    with pytest.raises(FileNotFoundError):
        _core.NpyWriter(tmp_path / "none" / "a.npy", "uint8", (), 3)


def test_a_disk_that_fills(tmp_path: Path) -> None:
    (tmp_path / "other.npy").write_text("mine")
    writer = _core.NpyWriter(tmp_path / "a.npy", "float64", (1000,), 1000)
    late = _core.NpyWriter(tmp_path / "b.npy", "float64", (), 1000)
    with largest_file(1 << 12):
        with pytest.raises(OSError, match=r"cannot write .*a\.npy") as caught:
            writer.write(np.zeros((1000, 1000)))
        late.write(np.zeros(1000))  # still in the writer's buffer
        with pytest.raises(OSError, match=r"cannot write .*b\.npy"):
            late.close()
    assert caught.value.errno == errno.EFBIG
    assert [p.name for p in tmp_path.iterdir()] == ["other.npy"]


@pytest.mark.parametrize(
    ("dtype", "shape", "rows", "message"),
    [
        ("object", (), 1, "dtype 'object'"),
        ("float", (), 1, "dtype 'float'"),
        ("uint8", (), -1, "-1 rows"),
        ("uint8", (-1,), 1, "a size of -1"),
        ("uint8", (2,) * 9, 1, "at most 8"),
        ("uint8", (2**40, 2**40), 1, "larger than any file"),
    ],
)
def test_impossible_files(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], rows: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _core.NpyWriter(tmp_path / "a.npy", dtype, shape, rows)
    assert not list(tmp_path.iterdir())


def test_threads_that_share_a_writer_never_tear_rows(tmp_path: Path) -> None:
    """Threads that share a writer get an error or their rows in, never a torn row."""
    writer = _core.NpyWriter(tmp_path / "a.npy", "int64", (4096,), 400)
    written: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            try:
                writer.write(np.full((1, 4096), number))
            except ValueError as error:
                assert "another thread" in str(error)
            else:
                written.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.write(np.zeros((400 - len(written), 4096), np.int64))
    writer.close()
    rows = np.load(tmp_path / "a.npy")
    assert (rows == rows[:, :1]).all()
    assert sorted(rows[: len(written), 0]) == sorted(written)


# --- the reader ------------------------------------------------------------------


def test_columns_are_read_only_views_that_outlive_the_reader(tmp_path: Path) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    columns = [column(tmp_path, "x", x), column(tmp_path, "größe", np.arange(3))]
    reader = _core.ShardReader(tmp_path, 3, columns)
    assert reader.rows == 3
    assert reader.directory == str(tmp_path)
    assert reader.column_names == ("x", "größe")
    view = reader.column("x")
    assert view.ctypes.data == reader.column("x").ctypes.data  # no copy
    assert view.ctypes.data % 64 == 0
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.setflags(write=True)
    part = view[1:]
    del reader, view
    gc.collect()
    (tmp_path / "x.npy").unlink()  # the mapping keeps the bytes
    np.testing.assert_array_equal(part, x[1:])


def test_ragged_columns(tmp_path: Path) -> None:
    values = np.arange(10, dtype=np.int32).reshape(5, 2)
    reader = _core.ShardReader(tmp_path, 3, [ragged(tmp_path, "t", values, [0, 2, 2, 5])])
    got, offsets = reader.ragged("t")
    np.testing.assert_array_equal(got, values)
    np.testing.assert_array_equal(offsets, [0, 2, 2, 5])
    assert offsets.dtype == np.int64
    assert not got.flags.writeable
    assert not offsets.flags.writeable
    with pytest.raises(ValueError, match=r"t is ragged: use ragged"):
        reader.column("t")


def test_files_that_change_while_they_are_read(tmp_path: Path) -> None:
    class Clears:
        def __fspath__(self) -> str:
            files.clear()
            return "a.npy"

    np.save(tmp_path / "a.npy", np.zeros(300))
    files = {Clears(): (tmp_path / "a.npy").stat().st_size}  # nobody else has the number
    with pytest.raises(ValueError, match="must have one file"):
        _core.ShardReader(tmp_path, 300, [("a", "float64", (), False, files)])


def test_unknown_columns_and_kinds(tmp_path: Path) -> None:
    reader = _core.ShardReader(tmp_path, 2, [column(tmp_path, "x", np.zeros(2))])
    with pytest.raises(KeyError, match="no column z"):
        reader.column("z")
    with pytest.raises(ValueError, match=r"x is not ragged: use column"):
        reader.ragged("x")
    with pytest.raises(TypeError):
        reader.column(3)


def test_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    columns = [
        column(tmp_path, "x", np.arange(300000.0)),
        ragged(tmp_path, "t", np.arange(5), [0] * 300000 + [5]),
    ]
    reader = _core.ShardReader(tmp_path, 300000, columns)
    expected = {p.name: _core.xxh3_64(p.read_bytes()) for p in tmp_path.iterdir()}
    assert reader.hashes() == expected
    with (tmp_path / "x.npy").open("r+b") as file:  # one bit flipped
        file.seek(2000)
        byte = file.read(1)[0]
        file.seek(2000)
        file.write(bytes([byte ^ 1]))
    changed = reader.hashes()
    assert [name for name in expected if changed[name] != expected[name]] == ["x.npy"]
    os.truncate(tmp_path / "x.npy", 100)
    with pytest.raises(CorruptDataError, match=r"x\.npy: has 100 bytes; it had 2400128"):
        reader.hashes()


@pytest.fixture
def good(tmp_path: Path) -> tuple[Path, list[tuple]]:
    columns = [
        column(tmp_path, "x", np.arange(6, dtype=np.float32).reshape(3, 2)),
        ragged(tmp_path, "t", np.arange(5, dtype=np.int32), [0, 2, 2, 5]),
    ]
    return tmp_path, columns


def test_missing_files(good: tuple[Path, list[tuple]]) -> None:
    path, columns = good
    for name in ("x.npy", "t.values.npy", "t.offsets.npy"):
        (path / name).rename(path / "away")
        with pytest.raises(FileNotFoundError, match=f"cannot open .*{name}"):
            _core.ShardReader(path, 3, columns)
        (path / "away").rename(path / name)
    with pytest.raises(FileNotFoundError):
        _core.ShardReader(path / "none", 3, columns)
    _core.ShardReader(path, 3, columns)


def test_truncation_at_every_byte(good: tuple[Path, list[tuple]]) -> None:
    path, columns = good
    whole = (path / "t.offsets.npy").read_bytes()
    for cut in range(len(whole)):
        (path / "t.offsets.npy").write_bytes(whole[:cut])
        with pytest.raises(CorruptDataError, match=r"t\.offsets\.npy"):
            _core.ShardReader(path, 3, columns)
        columns[1][4]["t.offsets.npy"] = cut  # the manifest agrees: the header does not
        with pytest.raises(CorruptDataError, match=r"t\.offsets\.npy"):
            _core.ShardReader(path, 3, columns)
        columns[1][4]["t.offsets.npy"] = len(whole)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 2), np.int32), "holds int32 where the manifest says float32"),
        (np.zeros((4, 2), np.float32), r"its shape \(4, 2\)"),
        (np.zeros((3, 3), np.float32), r"its shape \(3, 3\)"),
        (np.zeros(6, np.float32), r"its shape \(6\)"),
        (np.zeros((3, 2), ">f4"), "big-endian"),
        (np.zeros((3, 2), np.float32, order="F"), "Fortran order"),
        (np.array([None] * 6), "pickled Python objects"),
        (np.zeros(6, "M8[s]"), "'<M8"),
        (np.zeros(6, [("a", "f4")]), "structure"),
        (np.zeros((1,) * 10, np.float32), "more dimensions"),
    ],
)
def test_swapped_files(good: tuple[Path, list[tuple]], array: np.ndarray, message: str) -> None:
    path, columns = good
    np.save(path / "x.npy", array, allow_pickle=True)
    columns[0][4]["x.npy"] = (path / "x.npy").stat().st_size
    with pytest.raises(CorruptDataError, match=rf"x\.npy: .*{message}"):
        _core.ShardReader(path, 3, columns)


def test_files_of_other_writers_are_read(good: tuple[Path, list[tuple]]) -> None:
    """Versions 2.0 and 3.0, and data that does not begin at a multiple of 64."""
    path, columns = good
    array = np.arange(6, dtype=np.float32).reshape(3, 2)
    for version in ((1, 0), (2, 0), (3, 0)):
        with (path / "x.npy").open("wb") as file:
            np.lib.format.write_array(file, array, version=version)
        columns[0][4]["x.npy"] = (path / "x.npy").stat().st_size
        np.testing.assert_array_equal(_core.ShardReader(path, 3, columns).column("x"), array)
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), }"
    text += b" " * (80 - 10 - len(text) - 1) + b"\n"
    (path / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + bytes([70, 0]) + text + array.tobytes())
    columns[0][4]["x.npy"] = 80 + 24
    np.testing.assert_array_equal(_core.ShardReader(path, 3, columns).column("x"), array)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 2, 2, 5], "first offset is 1"),
        ([0, 3, 2, 5], "1 rows end before they begin"),
        ([0, 2, 2, 4], "end at value 4, but there are 5 values"),
        ([0, 2, 2, 2**62], "but there are 5 values"),
    ],
)
def test_offsets_out_of_order(
    good: tuple[Path, list[tuple]], offsets: list[int], message: str
) -> None:
    path, columns = good
    np.save(path / "t.offsets.npy", np.array(offsets))
    with pytest.raises(CorruptDataError, match=rf"t\.offsets\.npy: .*{message}"):
        _core.ShardReader(path, 3, columns)


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ([], ValueError, "without columns"),
        ([("x",)], TypeError, "a column must be"),
        ([3], TypeError, "int"),
        ([("x", "float", (), False, {"x.npy": 1})], ValueError, "unknown dtype 'float'"),
        ([("x", "int8", (-1,), False, {"x.npy": 1})], ValueError, "x: a size of -1"),
        ([("x", "int8", (1,) * 9, False, {"x.npy": 1})], ValueError, "at most 8"),
        ([("x", "int8", (2**70,), False, {"x.npy": 1})], OverflowError, "int"),
        ([("x", "int8", ("a",), False, {"x.npy": 1})], TypeError, "integer"),
        ([("x", "int8", (), False, {})], ValueError, "x: must have one file"),
        ([("x", "int8", (), False, {"a": 1, "b": 1})], ValueError, "x: must have one file"),
        ([("x", "int8", (), True, {"x.values.npy": 1})], ValueError, "x: a ragged column"),
        ([("x", "int8", (), True, {"a.npy": 1, "b.npy": 1})], ValueError, "x: a ragged column"),
        ([("x", "int8", (), False, {"x.npy": -1})], OverflowError, "int"),
        ([("x", "int8", (), False, {"x.npy": "1"})], TypeError, "int"),
        ([("x", "int8", (), False, {"a\0b": 1})], ValueError, "null"),
        ([("x", "int8", (), False, {"../x.npy": 1})], ValueError, "leads out"),
        ([("x", "int8", (), False, ["x.npy"])], TypeError, "a column must be"),
    ],
)
def test_impossible_columns(
    tmp_path: Path, columns: list, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _core.ShardReader(tmp_path, 3, columns)


def test_many_open_shards_hold_no_descriptors(good: tuple[Path, list[tuple]]) -> None:
    path, columns = good
    descriptors = Path("/dev/fd")
    before = len(list(descriptors.iterdir()))
    readers = [_core.ShardReader(path, 3, columns) for _ in range(500)]
    assert len(list(descriptors.iterdir())) == before
    assert len(readers) == 500


def test_error_messages_survive_any_file_name(tmp_path: Path) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")
    with pytest.raises(FileNotFoundError):
        _core.ShardReader(odd, 1, [("x", "int8", (), False, {"x.npy": 1})])
    name = "ü" * 400  # the message is cut within a character
    with pytest.raises((CorruptDataError, OSError)):
        _core.ShardReader(tmp_path, 1, [("x", "int8", (), False, {name: 1})])


# --- a full disk -----------------------------------------------------------------


def test_a_real_disk_that_fills() -> None:
    """ENOSPC itself, on a small tmpfs; needs the right to mount one."""
    script = """
import errno, sys
import numpy as np
from cerebro import _core; from cerebro.machine import durable
writer = _core.NpyWriter("/mnt/a.npy", "float64", (), 10**6)
try:
    writer.write(np.zeros(10**6))
except OSError as error:
    assert error.errno == errno.ENOSPC and "/mnt/a.npy" in str(error), error
else:
    sys.exit("written")
import os
assert os.listdir("/mnt") == []
durable.replace_file("/mnt/note", b"old")
try:
    durable.replace_file("/mnt/note", bytes(10**6))
except OSError as error:
    assert error.errno == errno.ENOSPC, error
assert os.listdir("/mnt") == ["note"] and open("/mnt/note", "rb").read() == b"old"
"""
    shell = 'mount -t tmpfs -o size=64k tmpfs /mnt || exit 77; exec "$0" -c "$1"'
    command = ["unshare", "-rm", "sh", "-c", shell, sys.executable, script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no right to mount a tmpfs here")
    assert done.returncode == 0, done.stderr

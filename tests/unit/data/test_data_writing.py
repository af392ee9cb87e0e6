"""Arrays to shards: which row goes where, the files, the arguments, what is left behind."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import cerebro._core as _core
from cerebro.data import Dataset, shard
from cerebro.data.layout import lay_out
from cerebro.data.sources import open_source
from cerebro.data.unfinished import ByteProgress, temporary_folder
from cerebro.data.writer import default_shards, write_shards
from cerebro.errors import CerebroError, CorruptDataError, InputError


def rows_of(data: Dataset, name: str) -> np.ndarray:
    return np.concatenate([data.shard(i)[name] for i in range(data.num_shards)])


def table(rows: int = 101) -> dict[str, object]:
    rng = np.random.default_rng(5)
    return {
        "x": rng.normal(size=(rows, 3, 2)).astype(np.float32),
        "y": np.arange(rows),
        "tokens": [list(range(i % 7)) for i in range(rows)],
        "name": [f"n{i % 3}" for i in range(rows)],
    }


def names_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_row_i_of_a_shard_is_the_permuted_row_of_the_source(tmp_path: Path) -> None:
    source = table()
    data = shard(source, tmp_path / "d", shards=7, seed=3)
    order = _core.permutation(101, 3, "write")
    assert [len(data.shard(i)["y"]) for i in range(7)] == [15, 15, 15, 14, 14, 14, 14]
    assert np.array_equal(rows_of(data, "y"), order)
    assert np.array_equal(rows_of(data, "x"), source["x"][order])  # type: ignore[index]
    assert [len(row) for i in range(7) for row in data.shard(i)["tokens"]] == [
        int(row) % 7 for row in order
    ]
    assert np.array_equal(rows_of(data, "name"), order % 3)
    assert data.classes == {"x": None, "y": None, "tokens": None, "name": ["n0", "n1", "n2"]}


def test_without_shuffle_rows_keep_their_order(tmp_path: Path) -> None:
    data = shard(table(), tmp_path / "d", shards=4, shuffle=False)
    assert np.array_equal(rows_of(data, "y"), np.arange(101))
    rows = [row.tolist() for i in range(4) for row in data.shard(i)["tokens"]]
    assert rows == table()["tokens"]


def test_every_file_opens_with_plain_numpy(tmp_path: Path) -> None:
    data = shard(table(), tmp_path / "d", shards=3)
    files = sorted((tmp_path / "d").rglob("*.npy"))
    assert len(files) == 3 * 5
    for file in files:
        np.load(file, allow_pickle=False)
        np.load(file, mmap_mode="r")
    loaded = np.load(tmp_path / "d" / "shard-00001" / "x.npy")
    assert np.array_equal(loaded, data.shard(1)["x"])
    values = np.load(tmp_path / "d" / "shard-00001" / "tokens.values.npy")
    assert np.array_equal(values, data.shard(1)["tokens"].values)
    assert names_below(tmp_path / "d") == [
        "manifest.json", "shard-00000", "shard-00001", "shard-00002",
    ]  # fmt: skip
    assert names_below(tmp_path) == ["d"]


def test_the_same_rows_and_seed_give_the_same_files(tmp_path: Path) -> None:
    one = shard(table(), tmp_path / "a")
    two = shard(table(), tmp_path / "b")
    other = shard(table(), tmp_path / "c", seed=1)
    assert one.checksum == two.checksum != other.checksum
    assert (tmp_path / "a/manifest.json").read_bytes() == (
        tmp_path / "b/manifest.json"
    ).read_bytes()
    assert one.num_shards == 8


def test_reading_a_source_larger_than_memory_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = table()
    np.save(tmp_path / "x.npy", source["x"])  # only what is mapped is dealt
    source["x"] = np.load(tmp_path / "x.npy", mmap_mode="r")
    (whole,) = open_source(source).chunks(None)
    whole["name"] = replace(whole["name"], ordered=True)  # text is not stacked with numbers
    outputs = lay_out(whole, {"x": "x", "xy": ["y", "name", "x"], "t": "tokens"}, {"x": "float64"})
    order = _core.permutation(101, 0, "write")
    entries = []
    for name, memory in (("direct", 1 << 40), ("dealt", 0)):
        (tmp_path / name).mkdir()
        monkeypatch.setattr("cerebro.data.writer.total_memory", lambda memory=memory: memory)
        entries.append(write_shards(outputs, 5, order, tmp_path / name, ByteProgress(False)))
        assert names_below(tmp_path / name) == [f"shard-{i:05d}" for i in range(5)]
    assert entries[0] == entries[1]
    assert [entry.rows for entry in entries[0]] == [21, 20, 20, 20, 20]


def test_long_columns_are_written_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = shard(table(), tmp_path / "a").checksum
    monkeypatch.setattr("cerebro.data.writer.CHUNK_BYTES", 20)
    assert shard(table(), tmp_path / "b").checksum == expected
    first = shard(table(), tmp_path / "c", shuffle=False).checksum
    monkeypatch.undo()
    assert shard(table(), tmp_path / "d", shuffle=False).checksum == first


def test_default_shards() -> None:
    assert default_shards(1000, 3) == 3
    assert default_shards(1000, 8) == 8
    assert default_shards(8 * 255_999_999, 10**6) == 8
    assert default_shards(8 * 256_000_000, 10**6) == 9
    assert default_shards(4_000_000_000, 10**9) == 16
    # Of larger data, four shards are read together.
    assert default_shards(4_000_000_001, 10**9) == 63
    assert default_shards(25_600_000_000, 10**9) == 401


def test_choosing_renaming_and_stacking(tmp_path: Path) -> None:
    source = {
        "age": np.array([1, 2, 3, 4]),
        "fare": np.array([0.5, 1.5, 2.5, 3.5], np.float32),
        "pair": np.arange(8, dtype=np.int8).reshape(4, 2),
        "list": [[1, 2], [3, 4], [5, 6], [7, 8]],
        "label": ["b", "a", "b", "a"],
    }
    data = shard(
        source,
        tmp_path / "d",
        shards=2,
        shuffle=False,
        columns={"x": ["age", "fare", "pair", "list"], "one": ["age"], "y": "label"},
        dtypes={"y": "uint8"},
    )
    assert {name: (c.dtype, c.shape) for name, c in data.columns.items()} == {
        "x": ("float64", (6,)), "one": ("int64", (1,)), "y": ("uint8", ()),
    }  # fmt: skip
    assert rows_of(data, "x")[1].tolist() == [2, 1.5, 2, 3, 3, 4]
    assert rows_of(data, "y").tolist() == [1, 0, 1, 0]
    assert data.classes["y"] == ["a", "b"]
    chosen = shard(source, tmp_path / "e", columns=["label", "age"])
    assert list(chosen.columns) == ["label", "age"]


def test_dtypes_convert_or_refuse(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")

    x = np.array([1.0, 2.5, np.nan, 1e-40, 65_535.0, np.inf])
    data = shard({"x": x}, tmp_path / "a", shuffle=False, shards=1, dtypes={"x": "bfloat16"})
    expected = x.astype(np.float32).astype(ml_dtypes.bfloat16)
    assert data.columns["x"].dtype == "bfloat16"
    assert np.array_equal(data.shard(0)["x"], expected.view(np.uint16))
    same = shard({"x": expected}, tmp_path / "b", shuffle=False, shards=1)
    assert same.checksum == data.checksum
    wide = shard({"x": expected}, tmp_path / "c", shuffle=False, shards=1, dtypes={"x": np.float64})
    assert np.array_equal(wide.shard(0)["x"], expected.astype(np.float64), equal_nan=True)
    for values, dtype in [
        ([1.5], "int64"), ([300], "uint8"), ([-1], "uint64"), ([2**63 - 1], "int32"),
        ([1e300], "float32"), ([np.nan], "int32"), ([2], "bool"), ([1j], "float32"),
    ]:  # fmt: skip
        array = np.array(values)
        array = array.astype(np.complex64) if array.dtype.kind == "c" else array
        with pytest.raises(InputError, match="column 'x'"):
            shard({"x": array}, tmp_path / "bad", dtypes={"x": dtype})
    assert names_below(tmp_path) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ({"x": [1, 2], "y": [1]}, {}, "differ in length: 'x' has 2, 'y' has 1"),
        ({}, {}, "no columns"),
        ({"x": []}, {}, "no rows"),
        ({"x": np.zeros((0, 3))}, {}, "no rows"),
        ({"x": [1, 2]}, {"shards": 3}, "3 shards are more than the 2 rows"),
        ({"x": [1, 2]}, {"shards": 0}, "at least 1"),
        ({"x": [1, 2]}, {"shards": -1}, "at least 1"),
        ({"x": [1, 2]}, {"shards": 1.5}, "whole number"),
        ({"x": [1, 2]}, {"seed": -1}, "seed must be a whole number from 0"),
        ({"x": np.array([1, None], object)}, {}, "column 'x' has dtype object"),
        ({"x": np.array([{}, {}], object)}, {}, "column 'x' has dtype object"),
        ({"x": np.array(["2020-01-01"], "datetime64[D]")}, {}, "convert times to numbers"),
        ({"x": np.zeros(2, np.complex128)}, {}, "complex64"),
        ({"x": [1, None]}, {}, "missing value in row 1"),
        ({"x": ["a", None]}, {}, "missing value in row 1"),
        ({"x": [[1], [2, None]]}, {}, "missing value in row 1"),
        ({"x": ["a", 1]}, {}, "row 1 is int, but others are strings"),
        ({"x": [1, "a"]}, {}, "row 1 is str, but others are numbers"),
        ({"x": [[1], 2]}, {}, "row 1 is int, but others are sequences"),
        ({"x": [[[1], [1, 2]], [[1]]]}, {}, "more than one dimension"),
        ({"x": 3}, {}, "single value (int)"),
        ({"x": [2**63, 1]}, {}, "too large for int64"),
        ({"x": [b"a"]}, {}, "row 0 is bytes: decode it"),
        ({"x": "text"}, {}, "give an array or a list"),
        ({"x": [1, 2]}, {"columns": ["z"]}, "no column 'z' in the source: it has x"),
        ({"x": [1, 2]}, {"columns": {"a": ["x", "z"]}}, "no column 'z'"),
        ({"x": [1, 2]}, {"columns": []}, "columns is empty"),
        ({"x": [1, 2]}, {"columns": "x"}, "give a list of names"),
        ({"x": [1, 2]}, {"columns": {"a": []}}, "an empty stack"),
        ({"x": [1, 2]}, {"columns": ["x", "x"]}, "twice"),
        ({"x": [[1], [2, 3]]}, {"columns": {"a": ["x"]}}, "length (1 in row 0, 2 in row 1)"),
        ({"x": [1, 2]}, {"dtypes": {"z": "int8"}}, "dtypes has the unknown column 'z'"),
        ({"x": [1, 2]}, {"dtypes": {"x": "int7"}}, "unknown dtype 'int7'"),
        ({"x": [1, 2]}, {"dtypes": "int8"}, "give a mapping"),
        ({"x": ["a", "b"]}, {"dtypes": {"x": "float32"}}, "holds categories"),
        ({"a/b": [1, 2]}, {}, "contains '/'"),
        ({".a": [1, 2]}, {}, "begins with a dot"),
        ({"": [1, 2]}, {}, "is empty"),
        ({"a\0b": [1, 2]}, {}, "control character"),
        ({"c": [[1], [2]], "c_mask": [1, 2]}, {}, "would both need the name 'c_mask'"),
        ({"c": [[1], [2]], "c.values": [1, 2]}, {}, "would both need the name"),
        ({1: [1, 2]}, {}, "is not a string"),
        (3, {}, "cannot shard a int"),
        ({"x": np.ma.masked_array([1, 2], [True, False])}, {}, "missing value in row 0"),
        ({"x": [1, 2]}, {"progress": "loud"}, "progress must be"),
    ],
)  # fmt: skip
def test_bad_input_gives_a_one_line_error_and_leaves_no_files(
    tmp_path: Path, source: object, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        shard(source, tmp_path / "d", **options)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert names_below(tmp_path) == []


def test_an_existing_path_is_refused_or_reused(tmp_path: Path) -> None:
    path = tmp_path / "d"
    first = shard(table(), path, shards=3)
    inode = (path / "manifest.json").stat().st_ino
    with pytest.raises(InputError, match="exists: pass exist_ok=True to use it if"):
        shard(table(), path, shards=3)
    with pytest.raises(InputError, match=r"exists, was made with dtypes=None, .*: .*remove the"):
        shard(table(), path, shards=3, dtypes={"y": "int32"})  # which exist_ok would not help
    again = shard(table(), path, shards=3, exist_ok=True)
    assert again.checksum == first.checksum
    assert (path / "manifest.json").stat().st_ino == inode
    with pytest.raises(InputError, match="was made with shards=3, not 4"):
        shard(table(), path, shards=4, exist_ok=True)
    with pytest.raises(InputError, match="was made with seed=0, not 1"):
        shard(table(), path, shards=3, seed=1, exist_ok=True)
    other = table()
    other["y"] = np.arange(101)[::-1]
    with pytest.raises(InputError, match="made from other data"):
        shard(other, path, shards=3, exist_ok=True)
    Dataset(path).verify()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="exists, and is not a dataset: choose another path"):
        shard(table(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_an_empty_folder_is_taken_and_parents_are_made(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    shard(table(), tmp_path / "d")
    shard(table(), tmp_path / "deep" / "er" / "d").verify()


def test_a_link_to_an_empty_folder_is_kept(tmp_path: Path) -> None:
    """As on a machine with a small disk at home and a large one for data."""
    scratch, link = tmp_path / "scratch", tmp_path / "home" / "data"
    (scratch / "mine").mkdir(parents=True)
    link.parent.mkdir()
    link.symlink_to(scratch / "mine")
    seen: list[list[str]] = []

    def rows() -> Iterator[dict[str, int]]:
        seen.extend(names_below(folder) for folder in (scratch, link.parent))
        yield from ({"x": i} for i in range(9))

    data = shard(rows(), link)
    assert link.is_symlink() and data.path == link
    (beside, mine), home = seen  # it is made on the disk that the link leads to
    assert (beside.startswith(".mine.tmp-"), mine, home) == (True, "mine", ["data"])
    Dataset(scratch / "mine").verify()
    assert names_below(scratch) == ["mine"]
    assert shard({"x": np.arange(9)}, tmp_path / "plain").checksum == data.checksum
    with pytest.raises(InputError, match=f"'{link}' exists: pass exist_ok=True"):
        shard(rows(), link)
    assert shard(rows(), link, exist_ok=True).path == link


def test_paths_that_cannot_be_replaced_are_refused_before_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unread = iter([{"x": 1}])
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError) as caught:
        shard(unread, tmp_path / "link")
    assert str(caught.value) == (
        f"'{tmp_path}/link' is a link to '{tmp_path}/gone', which does not exist: make that "
        "folder, or choose another path"
    )
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "disk")
    with pytest.raises(InputError) as caught:
        shard(unread, tmp_path / "disk")
    assert str(caught.value) == (
        f"'{tmp_path}/disk' is a mount point, which a dataset cannot replace: give a folder in "
        f"it, such as '{tmp_path}/disk/data'"
    )
    assert next(unread) == {"x": 1}
    shard({"x": [1]}, tmp_path / "disk" / "data").verify()
    assert names_below(tmp_path) == ["disk", "link"]


def test_a_folder_that_is_mounted_twice_is_refused_at_once(tmp_path: Path) -> None:
    for name in ("from", "to"):
        (tmp_path / name).mkdir()
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    bind = f"mount --bind '{tmp_path}/from' '{tmp_path}/to'"
    if shutil.which("unshare") is None or subprocess.run([*mount, bind]).returncode:
        pytest.skip("this process cannot mount a folder")
    program = 'import cerebro, sys; cerebro.shard(iter([{"x": 1}]), sys.argv[1])'
    run = f"{bind} && exec '{sys.executable}' -c '{program}' '{tmp_path}/to'"
    ended = subprocess.run([*mount, run], capture_output=True, text=True)
    assert f"'{tmp_path}/to' is a mount point, which a dataset cannot replace" in ended.stderr


def test_a_relative_path_survives_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = shard(table(), "d")
    monkeypatch.chdir("/")
    data.verify()
    assert data.path == tmp_path / "d"


def test_a_source_may_change_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[dict[str, int]]:
        monkeypatch.chdir("/")
        yield from ({"x": row} for row in range(5))

    monkeypatch.chdir(tmp_path)
    data = shard(rows(), "d", shards=1)
    assert data.path == tmp_path / "d" and data.num_rows == 5


def test_a_full_disk_leaves_existing_data_intact(tmp_path: Path) -> None:
    """The file size limit of a child process stands for a full disk."""
    shard(table(), tmp_path / "old")
    code = (
        "import resource, signal, sys, numpy as np\n"
        "from cerebro.data import shard\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        "    shard({'small': np.zeros(9000), 'x': np.zeros((9000, 40))}, sys.argv[1], shards=3)\n"
        "except OSError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "new")],
        capture_output=True, text=True, check=True, timeout=60, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert "shard-00000/x.npy" in done.stdout
    assert done.stderr == ""
    assert names_below(tmp_path) == ["old"]
    Dataset(tmp_path / "old").verify()


def test_a_full_disk_is_reported_while_a_stream_is_read(tmp_path: Path) -> None:
    """For values, a type that widens, and the lengths of rows that are ragged at last."""
    code = (
        "import resource, signal, sys, numpy as np\n"
        "from cerebro.data import shard\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "long, last = [1.0] * 40, 20_000\n"
        "for rows in (\n"
        "    ({'x': long} for i in range(9000)),\n"
        "    ({'x': i > last and 0.5} for i in range(30_000)),\n"
        "    ({'x': np.zeros(1 + (i == last), np.uint8)} for i in range(last + 1)),\n"
        "):\n"
        "    try:\n"
        "        shard(rows, sys.argv[1])\n"
        "    except OSError as error:\n"
        "        print(error.errno, error.strerror)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "new")],
        capture_output=True, text=True, check=True, timeout=60, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    reason = os.strerror(errno.EFBIG)
    shown = re.sub(r"tmp-[0-9a-f]{16}/", "tmp-0/", done.stdout).splitlines()
    assert shown == [
        f"{errno.EFBIG} cannot write {tmp_path}/.new.tmp-0/.spool/{name}, a temporary copy of a "
        f"column: {reason}: free some space there, choose another path, or leave columns out"
        for name in ("00000", "00000.wider", "00000.lengths")
    ]
    assert done.stderr == ""
    assert names_below(tmp_path) == []


def test_only_temporary_folders_of_dead_processes_are_removed(
    tmp_path: Path,
) -> None:
    code = (
        "import os, sys\n"
        "from cerebro.data import sharding\n"
        "sharding._commit = lambda *rest: os.kill(os.getpid(), 9)\n"
        "sharding.shard({'x': [1, 2, 3]}, sys.argv[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "d")],
        timeout=60, check=False, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == -9
    (stale,) = names_below(tmp_path)
    assert stale.startswith(".d.tmp-")
    other = tmp_path / ".e.tmp-0"
    other.mkdir()
    with temporary_folder(tmp_path / "d") as living:
        assert not (tmp_path / stale).exists()
        shard({"x": [1, 2, 3]}, tmp_path / "d")
        assert living.exists()
    assert names_below(tmp_path) == [".e.tmp-0", "d"]


def test_the_progress_meter_is_shown_only_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for progress in ("auto", False):
        with ByteProgress(progress) as meter:
            meter.begin("writing", 10**12)
            meter.advance(10**11)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    with ByteProgress(True) as meter:
        meter.begin("reading rows")
        meter.advance(1)
        meter.begin("writing shards", 2)
        meter.advance(2)
    assert "writing shards" in capsys.readouterr().err


@pytest.mark.parametrize("progress", ["auto", True])
@pytest.mark.parametrize("is_closed", [True, False])
def test_data_can_be_written_without_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: str | bool, is_closed: bool
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed if is_closed else None)  # as in a daemon
    assert len(shard({"x": [1, 2, 3]}, tmp_path / "d", progress=progress)) == 3


@pytest.mark.parametrize("leaves", ["exits", "raises", "returns", "goes on"])
def test_a_process_that_the_source_forks_leaves_the_files_alone(
    tmp_path: Path, leaves: str
) -> None:
    children = []

    def rows() -> Iterator[dict[str, int]]:
        yield {"x": 0}
        child = os.fork()
        if child:
            children.append(os.waitpid(child, 0)[1])
        elif leaves == "exits":
            sys.exit()
        elif leaves == "raises":
            raise RuntimeError
        elif leaves == "returns":
            return
        yield {"x": 1}

    parent = os.getpid()
    try:
        data = shard(rows(), tmp_path / "d", shards=1, shuffle=False)
    except BaseException as error:
        if os.getpid() != parent:
            os._exit(7 if "forked this process" in str(error) else 5)
        raise
    finally:
        if os.getpid() != parent:
            os._exit(1)
    assert children == [(5 if leaves in ("exits", "raises") else 7) << 8]
    assert data.shard(0)["x"].tolist() == [0, 1]
    assert names_below(tmp_path) == ["d"]


def test_opening_a_missing_dataset_raises_a_cerebro_error(tmp_path: Path) -> None:
    with pytest.raises(CerebroError):
        Dataset(tmp_path / "nothing")
    with pytest.raises(CorruptDataError, match=r"manifest\.json is missing"):
        Dataset(tmp_path)
    assert names_below(tmp_path) == []


def test_the_error_for_sparse_matrices_suggests_toarray(tmp_path: Path) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    for make in (sparse.csr_matrix, sparse.coo_array):
        for source in ((make(np.eye(3)), [0, 1, 2]), {"x": make(np.eye(3))}):
            with pytest.raises(InputError, match=r"'x' is sparse .*: give its \.toarray\(\)"):
                shard(source, tmp_path / "d")

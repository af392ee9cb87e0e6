"""The loader from Python: what it gives, what it refuses, and what it costs in memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import cerebro._core as _core

ROWS = (23, 40, 1)


@pytest.fixture
def parts(tmp_path: Path) -> list[tuple[_core.ShardReader, tuple[int, int]]]:
    """Three shards: id is the row's number, t has id % 4 values."""
    made: list[tuple[_core.ShardReader, tuple[int, int]]] = []
    first = 0
    for number, rows in enumerate(ROWS):
        folder = tmp_path / str(number)
        folder.mkdir()
        ids = np.arange(first, first + rows)
        np.save(folder / "id.npy", ids)
        np.save(folder / "t.values.npy", np.repeat(ids, ids % 4).astype(np.int32))
        np.save(folder / "t.offsets.npy", np.concatenate([[0], np.cumsum(ids % 4)]))
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        id_files = {"id.npy": sizes.pop("id.npy")}
        columns = [("id", "int64", (), False, id_files), ("t", "int32", (), True, sizes)]
        made.append((_core.ShardReader(folder, rows, columns), (0, rows)))
        first += rows
    return made


IDS = [{"name": "id", "ops": []}]
BOTH = [*IDS, {"name": "t", "ops": []}]


def loader(parts: Any, plan: Any = BOTH, **options: Any) -> _core.Loader:
    options = {"batch_size": 4, "framework": "numpy"} | options
    return _core.Loader(parts, plan, **options)


def ids_of(made: _core.Loader) -> list[int]:
    return [int(i) for batch in made for i in batch["id"]]


@pytest.mark.parametrize("threads", [0, 1, 2, 3])
def test_a_pass(parts: Any, threads: int) -> None:
    made = loader(parts, seed=9, threads=threads)
    for epoch in range(3):
        made.begin([1, 2, 0], epoch)
        assert (len(made), made.rows) == (10 + 1 + 6, 64)
        expected: list[int] = []
        for shard, first in ((1, 23), (2, 63), (0, 0)):
            order = _core.permutation(ROWS[shard], 9, "rows", epoch, shard)
            expected += (order + np.uint32(first)).tolist()
        seen = []
        for batch in made:
            assert list(batch) == ["id", "t", "t_mask", "t_length"]
            ids = batch["id"]
            assert made.last_rows == len(ids)
            assert batch["t"].dtype == np.int32 and batch["t_mask"].dtype == np.bool_
            np.testing.assert_array_equal(batch["t_length"], ids % 4)
            width = int((ids % 4).max())
            mask = np.arange(width) < (ids % 4)[:, None]
            np.testing.assert_array_equal(batch["t_mask"], mask)
            np.testing.assert_array_equal(batch["t"], np.where(mask, ids[:, None], 0))
            seen += ids.tolist()
        assert seen == expected
        assert next(made, None) is None


def test_start_skips_batches(parts: Any) -> None:
    made = loader(parts, IDS, seed=1, threads=1)
    made.begin([0, 1], 2)
    whole = [batch["id"].tolist() for batch in made]
    for start in range(len(whole) + 2):
        made.begin([0, 1], 2, start)
        assert len(made) == max(len(whole) - start, 0)
        assert [batch["id"].tolist() for batch in made] == whole[start:]


def test_row_lists(parts: Any) -> None:
    rows = np.array([5, 0, 0, 22], np.uint32)
    made = loader([(parts[0][0], rows), (parts[1][0], (38, 40))], IDS, shuffle=False)
    made.begin([1, 0], 0)
    assert ids_of(made) == [61, 62, 5, 0, 0, 22]
    del rows
    made.begin([0], 0)
    assert ids_of(made) == [5, 0, 0, 22]


def test_rows_that_are_changed_later_are_those_that_were_checked(parts: Any) -> None:
    rows = np.array([5, 0, 0, 22], np.uint32)
    frozen = rows.view()
    frozen.setflags(write=False)  # its base can still be written
    views = [rows, frozen, np.frombuffer(bytearray(rows.tobytes()), np.uint32)]
    made = [loader([(parts[0][0], view)], IDS, shuffle=False) for view in views]
    rows[:] = 2**32 - 1
    views[2][:] = 2**32 - 1
    for one in made:
        one.begin([0], 0)
        assert ids_of(one) == [5, 0, 0, 22]


def test_rows_that_nobody_can_change_are_not_copied(parts: Any) -> None:
    rows = np.zeros(10, np.uint32)
    rows.setflags(write=False)
    bits = np.frombuffer(bytes(40), np.uint32)
    before = sys.getrefcount(rows), sys.getrefcount(bits)
    made = [loader([(parts[0][0], array)], IDS) for array in (rows, bits)]
    assert (sys.getrefcount(rows), sys.getrefcount(bits)) == (before[0] + 1, before[1] + 1)
    del made


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("threads", [0, 2])
def test_a_loader_may_be_looked_at_while_another_thread_closes_it(
    parts: Any, threads: int, on_device: bool
) -> None:
    depot = _core.Depot(_core.Device("cpu")) if on_device else None
    for _ in range(200):
        made = loader(parts, threads=threads, depot=depot)
        made.begin([0, 1], 0)
        next(made)
        closing = threading.Thread(target=made.close)
        closing.start()
        while closing.is_alive():
            assert len(made) in (0, 16)
            assert made.rows in (0, 63)
            assert made.buffers >= 0
        closing.join()
        assert (len(made), made.rows, made.buffers) == (0, 0, 0)


@pytest.mark.parametrize("residence", ["streamed", "auto", "resident"])
@pytest.mark.parametrize("threads", [0, 2])
def test_batches_of_no_bytes_on_a_device(tmp_path: Path, residence: str, threads: int) -> None:
    np.save(tmp_path / "x.npy", np.zeros((10, 0), np.float32))
    files = {"x.npy": (tmp_path / "x.npy").stat().st_size}
    shard = _core.ShardReader(tmp_path, 10, [("x", "float32", (0,), False, files)])
    made = loader(
        [(shard, (0, 10))],
        [{"name": "x", "ops": []}],
        depot=_core.Depot(_core.Device("cpu")),
        residence=residence,
        threads=threads,
    )
    for epoch in range(2):
        made.begin([0], epoch)
        assert [batch["x"].shape for batch in made] == [(4, 0), (4, 0), (2, 0)]


@pytest.mark.parametrize("ops", [[("scale", 0.013)], [("scale", 0.013), ("cast", "float16")]])
@pytest.mark.parametrize("threads", [0, 1])
def test_flushed_denormals_of_the_caller_are_not_a_batchs(
    tmp_path: Path, ops: list[tuple[Any, ...]], threads: int
) -> None:
    torch = pytest.importorskip("torch")
    np.save(tmp_path / "x.npy", np.full((200, 5), 3e-38, np.float32))
    files = {"x.npy": (tmp_path / "x.npy").stat().st_size}
    shard = _core.ShardReader(tmp_path, 200, [("x", "float32", (5,), False, files)])

    def batches(flush: bool) -> list[bytes]:
        made = loader([(shard, (0, 200))], [{"name": "x", "ops": ops}], threads=threads)
        made.begin([0], 0)
        if not torch.set_flush_denormal(flush):
            pytest.skip("this processor does not flush denormal numbers")
        try:
            return [batch["x"].tobytes() for batch in made]
        finally:
            torch.set_flush_denormal(False)

    plain = batches(False)
    assert (any(plain[0]), len(plain)) == (len(ops) == 1, 50)
    assert batches(True) == plain


def test_first_rows_key_random_transforms(parts: Any, tmp_path: Path) -> None:
    x = np.arange(64 * 6, dtype=np.float32).reshape(64, 1, 6)
    np.save(tmp_path / "x.npy", x)
    size = (tmp_path / "x.npy").stat().st_size
    shard = _core.ShardReader(tmp_path, 64, [("x", "float32", (1, 6), False, {"x.npy": size})])
    plan = [{"name": "x", "ops": [("flip", 0.5)]}]

    def flipped(split: list[tuple[int, int]], first_rows: list[int]) -> list[bool]:
        made = loader([(shard, rows) for rows in split], plan, first_rows=first_rows, shuffle=False)
        made.begin(range(len(split)), 3)
        return [bool(row[0, 0] > row[0, 1]) for batch in made for row in batch["x"]]

    whole = flipped([(0, 64)], [])
    assert 15 < sum(whole) < 50
    assert flipped([(0, 10), (10, 64)], [0, 0]) == whole
    assert flipped([(0, 64)], [1]) != whole


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be 1 or more"),
        ({"threads": 65}, ValueError, "threads from 0 to 64"),
        ({"framework": "mxnet"}, ValueError, "unknown framework 'mxnet'"),
        ({"first_rows": [0]}, ValueError, "1 first_rows for 3 parts"),
        ({"plan": [{"name": "z", "ops": []}]}, ValueError, "no column z"),
        ({"plan": [{"name": "id", "ops": [("turn", 1)]}]}, ValueError, "unknown operation"),
        ({"plan": [{"name": "id", "ops": [("cast", "object")]}]}, ValueError, "unknown dtype"),
        ({"plan": [{"name": "id", "ops": [("crop", (1, 1), (0, -1), True)]}]}, ValueError, "neg"),
        (
            {"plan": [{"name": "id", "ops": [("normalize", [1], [1, 2])]}]},
            ValueError,
            "differ in number",
        ),
        ({"plan": [{"name": "id", "ops": [("to_chw",)]}]}, ValueError, "column id: image"),
        ({"plan": [{"name": "t", "ops": [("pad", 0.0, 0, 0)]}]}, ValueError, "multiple_of"),
        ({"plan": [{"name": "id"}]}, ValueError, "a plan needs a dict per column"),
        ({"plan": []}, ValueError, "needs columns"),
        ({"parts": []}, ValueError, "needs shards"),
        ({"parts": [1]}, TypeError, r"a part must be \(ShardReader, rows\)"),
        ({"parts": [(1, (0, 1))]}, TypeError, "expected a ShardReader"),
    ],
)
def test_bad_arguments(parts: Any, arguments: Any, error: type, message: str) -> None:
    arguments = {"parts": parts, "plan": BOTH} | arguments
    with pytest.raises(error, match=message):
        loader(arguments.pop("parts"), arguments.pop("plan"), **arguments)


class Emptying:
    """A number whose conversion empties a list and a dict."""

    def __init__(self, ops: list[object], column: dict[str, object]) -> None:
        self._ops, self._column = ops, column

    def __float__(self) -> float:
        self._ops.clear()
        self._column.clear()
        return 2.0


@pytest.mark.parametrize("kind", ["scale", "normalize"])
def test_steps_that_shrink_while_they_are_read_are_taken_as_they_were(
    parts: Any, kind: str
) -> None:
    ops: list[object] = []
    column: dict[str, object] = {"name": "".join(["i", "d"]), "ops": ops}
    number = Emptying(ops, column)
    first = ("scale", number) if kind == "scale" else ("normalize", [number], [0.5])
    ops += [("cast", "float64"), first, *(("scale", 1.0 + i) for i in range(9))]
    del first
    made = loader(parts, [column])
    assert ops == [] and column == {}
    made.begin([2], 0)  # one row, whose id is 63
    value = 63 * 2.0 if kind == "scale" else (63 - 2.0) / 0.5
    assert [b["id"].tolist() for b in made] == [[value * 362880]]  # 9!


@pytest.mark.parametrize("rows", [(5, 4), (-1, 2), (0, 24), [1, 2], np.array([1, 2]), (1,)])
def test_bad_rows(parts: Any, rows: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        loader([(parts[0][0], rows)])
    with pytest.raises(ValueError, match="no row 23 of 23"):
        loader([(parts[0][0], np.array([23], np.uint32))])


def test_bad_passes(parts: Any) -> None:
    made = loader(parts)
    for shards in ([3], [-1]):
        with pytest.raises(ValueError, match="no shard"):
            made.begin(shards, 0)
    with pytest.raises(ValueError, match="start must be 0 or more"):
        made.begin([0], 0, -1)
    assert list(made) == []
    made.begin([], 0)
    assert list(made) == [] and len(made) == 0
    made.close()
    made.close()
    with pytest.raises(ValueError, match="the loader is closed"):
        made.begin([0], 0)
    assert list(made) == []


def test_attributes(parts: Any) -> None:
    made = loader(parts, batch_size=7, framework="dlpack")
    assert (made.batch_size, made.framework, made.last_rows, len(made)) == (7, "dlpack", 0, 0)
    assert _core.batch_count(15, 7, False) == 2
    assert _core.batch_count(15, 7, True) == 2
    assert _core.batch_count(16, 7, False) == 3
    with pytest.raises(ValueError, match="0"):
        _core.batch_count(1, 0, False)


def test_two_threads_cannot_use_one_loader_at_once(parts: Any) -> None:
    """Whoever comes second is told; nothing is corrupted."""
    made = loader(parts, batch_size=1, threads=1)
    seen: list[int] = []
    refused: list[BaseException] = []

    def drain() -> None:
        while True:
            try:
                batch = next(made)
            except StopIteration:
                return
            except RuntimeError as error:
                refused.append(error)
            else:
                seen.append(int(batch["id"][0]))

    for epoch in range(20):
        made.begin([0, 1, 2], epoch)
        threads = [threading.Thread(target=drain) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(seen) == list(range(64))
        seen.clear()


def test_memory_stays_flat(parts: Any) -> None:
    """200,000 batches through NumPy and PyTorch, with and without threads."""
    pytest.importorskip("torch")
    process = psutil.Process()
    many = [(reader, np.tile(np.arange(rows[1], dtype=np.uint32), 700)) for reader, rows in parts]
    for framework in ("numpy", "torch"):
        for threads in (0, 1):
            made = loader(many, IDS, batch_size=1, threads=threads, framework=framework)
            made.begin([0], 0)
            for _ in made:
                pass
            before = process.memory_info().rss
            made.begin([0, 1, 2], 1)
            assert len(made) == 700 * 64
            for _ in made:
                pass
            assert made.buffers <= 12
            assert process.memory_info().rss - before < 2_000_000


PRELUDE = """
import os, signal, sys
import numpy as np
from cerebro import _core
np.save("x.npy", np.arange(100))
size = os.stat("x.npy").st_size
shard = _core.ShardReader(".", 100, [("x", "int64", (), False, {"x.npy": size})])
made = _core.Loader([(shard, (0, 100))], [{"name": "x", "ops": []}], batch_size=2,
                    framework="numpy", threads=2)
made.begin([0], 0)
"""


def run_python(folder: Path, code: str) -> str:
    """In a process of its own; what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(_core.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_forked_child_is_told(tmp_path: Path) -> None:
    code = """
batch = next(made)
child = os.fork()
if child == 0:
    try:
        next(made)
    except ValueError as error:
        del batch, made
        os._exit(0 if "after a fork" in str(error) else 2)
    os._exit(1)
print(os.waitpid(child, 0)[1], len(list(made)))
"""
    assert run_python(tmp_path, code) == "0 49\n"


def test_interrupted_by_a_signal_in_the_main_thread(tmp_path: Path) -> None:
    """The loader's threads leave Ctrl-C to the main thread."""
    code = """
try:
    for batch in made:
        os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted", len(list(made)) > 0)
"""
    assert run_python(tmp_path, code) == "interrupted True\n"

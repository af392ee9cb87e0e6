"""The loader from Python: what it gives, what it refuses, and what it costs in memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cerebro._core as _core
from cerebro.data.dtypes import freeze_array

ROWS = (23, 40, 1)


def write_shard(folder: Path, first: int, rows: int) -> _core.ShardReader:
    ids = np.arange(first, first + rows)
    np.save(folder / "id.npy", ids)
    np.save(folder / "t.values.npy", np.repeat(ids, ids % 4).astype(np.int32))
    np.save(folder / "t.offsets.npy", np.concatenate([[0], np.cumsum(ids % 4)]))
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    id_files = {"id.npy": sizes.pop("id.npy")}
    columns = [("id", "int64", (), False, id_files), ("t", "int32", (), True, sizes)]
    return _core.ShardReader(folder, rows, columns)


@pytest.fixture
def parts(tmp_path: Path) -> list[tuple[_core.ShardReader, tuple[int, int]]]:
    """Three shards: id is the row's number, t has id % 4 values."""
    made: list[tuple[_core.ShardReader, tuple[int, int]]] = []
    first = 0
    for number, rows in enumerate(ROWS):
        folder = tmp_path / str(number)
        folder.mkdir()
        made.append((write_shard(folder, first, rows), (0, rows)))
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
def test_a_pass_yields_every_row_in_order(parts: Any, threads: int) -> None:
    made = loader(parts, seed=9, threads=threads)
    for epoch in range(3):
        made.begin([[1], [2], [0]], epoch)
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


@pytest.mark.parametrize("mixes", [[[0], [1]], [[0, 1, 2]], [[0, 2], [1]]])
def test_slices_of_a_pass(parts: Any, mixes: list[list[int]]) -> None:
    made = loader(parts, IDS, seed=1, threads=1)
    made.begin(mixes, 2)
    whole = [batch["id"].tolist() for batch in made]
    for start in range(len(whole) + 2):
        for count in (None, 0, 1, 5):
            made.begin(mixes, 2, start, count)
            wanted = whole[start:] if count is None else whole[start : start + count]
            assert (len(made), made.rows) == (len(wanted), sum(map(len, wanted)))
            assert [batch["id"].tolist() for batch in made] == wanted


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    batch_size=st.integers(1, 70),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    threads=st.integers(0, 3),
    epoch=st.integers(0, 2**64 - 1),
    data=st.data(),
)
def test_mixes_follow_their_definition(
    sizes: list[int],
    batch_size: int,
    drop_last: bool,
    shuffle: bool,
    threads: int,
    epoch: int,
    data: st.DataObject,
) -> None:
    """Of any shards, mixes, cuts and slices; the orders are shared with another loader."""
    shards = range(len(sizes))
    mix = st.lists(st.sampled_from(shards), unique=True).map(sorted)
    mixes = data.draw(st.lists(mix, max_size=4), "mixes")
    start = data.draw(st.integers(0, 20), "start")
    count = data.draw(st.none() | st.integers(0, 20), "count")
    first = np.cumsum([0, *sizes]).tolist()
    reader = shard_of(128)
    views = [(reader, (first[i] % 64, first[i] % 64 + sizes[i])) for i in shards]
    numbers = [first[i] - first[i] % 64 for i in shards]  # id + number is the row

    wanted: list[list[tuple[int, int]]] = []
    for one in mixes:
        rows = [(i, views[i][1][0] + k) for i in one for k in range(sizes[i])]
        order = list(range(len(rows)))
        if shuffle and rows:
            # the mix is named by its first shard that has rows
            order = _core.permutation(len(rows), 5, "rows", epoch, rows[0][0]).tolist()
        batches = _core.batch_count(len(rows), batch_size, drop_last)
        if not drop_last:
            assert batches == (max(1, round(len(rows) / batch_size)) if rows else 0)
        for batch in range(batches):
            ends = [
                _core.batch_start(len(rows), batch_size, drop_last, b) for b in (batch, batch + 1)
            ]
            picked = [rows[i] for i in order[ends[0] : ends[1]]]
            wanted.append(sorted(picked, key=lambda row: row[0]))  # by shard, else as they are
    wanted = wanted[start:] if count is None else wanted[start : start + count]

    orders = _core.Orders()
    for n in (threads, 0):
        made = loader(
            views,
            BOTH,
            batch_size=batch_size,
            seed=5,
            shuffle=shuffle,
            drop_last=drop_last,
            threads=n,
            first_rows=numbers,
            orders=orders,
        )
        made.begin(mixes, epoch, start, count)
        assert (len(made), made.rows) == (len(wanted), sum(map(len, wanted)))
        for batch, rows in zip(made, wanted, strict=True):
            ids = np.array([row for _, row in rows])
            np.testing.assert_array_equal(batch["id"], ids)
            np.testing.assert_array_equal(batch["t_length"], ids % 4)
            mask = np.arange((ids % 4).max()) < (ids % 4)[:, None]
            np.testing.assert_array_equal(batch["t"], np.where(mask, ids[:, None], 0))


@cache
def shard_of(rows: int) -> _core.ShardReader:
    """A shard as those of `parts`, whose files are already deleted."""
    with tempfile.TemporaryDirectory() as folder:
        return write_shard(Path(folder), 0, rows)


def test_rows_are_drawn_from_each_shard_or_from_all(parts: Any) -> None:
    """Half of the weight is on the first shard's 23 rows, and none on odd rows of the others."""
    weights = np.array([41] * 23 + [46 * (i % 2 == 0) for i in range(23, 64)], np.uint64)
    ends = np.cumsum(ROWS)
    spans = [slice(end - rows, end) for end, rows in zip(ends, ROWS, strict=True)]
    each = [np.cumsum(weights[span]) for span in spans]
    each[2] = np.array([1], np.uint64)
    views = [(*part, sums, 0) for part, sums in zip(parts, each, strict=True)]
    made = loader(views, IDS, batch_size=64)
    for epoch in range(3):
        made.begin([[0, 1, 2]], epoch)
        ids = np.array(ids_of(made))
        assert len(ids) == 64 and sum(ids < 23) == 23 and ids[-1] == 63
        assert not any(ids[(ids >= 23) & (ids < 63)] % 2)

    whole = freeze_array(np.cumsum(weights))
    before = [0, *(int(whole[span.stop - 1]) for span in spans)]
    views = [
        (*part, whole[span], first)
        for part, span, first in zip(parts, spans, before[:-1], strict=True)
    ]
    made = loader(views, IDS, batch_size=64, draw_across=True)
    of_first = []
    for epoch in range(100):
        made.begin([[0, 1, 2]], epoch)
        ids = np.array(ids_of(made))
        assert len(ids) == 64 and not any(ids[ids >= 23] % 2)
        of_first.append(sum(ids < 23))
        made.begin([[1]], epoch)  # one shard, from its piece of the sums
        ids = np.array(ids_of(made))
        assert len(ids) == 40 and set(ids) <= set(range(24, 63, 2)) and len(set(ids)) > 10
    assert 31 < np.mean(of_first) < 36
    with pytest.raises(ValueError, match="from all shards, or from one"):
        made.begin([[0, 2]], 0)
    with pytest.raises(ValueError, match="shard 0 has no weights"):
        loader([parts[0], *views[1:]], IDS, draw_across=True)


def test_row_lists(parts: Any) -> None:
    rows = np.array([5, 0, 0, 22], np.uint32)
    made = loader([(parts[0][0], rows), (parts[1][0], (38, 40))], IDS, shuffle=False)
    made.begin([[1], [0]], 0)
    assert ids_of(made) == [61, 62, 5, 0, 0, 22]
    del rows
    made.begin([[0]], 0)
    assert ids_of(made) == [5, 0, 0, 22]


def test_later_changes_to_row_lists_have_no_effect(parts: Any) -> None:
    rows = np.array([5, 0, 0, 22], np.uint32)
    frozen = rows.view()
    frozen.setflags(write=False)  # its base can still be written
    thawed = rows.copy()
    thawed.setflags(write=False)  # until its owner makes it writable again
    views = [rows, frozen, np.frombuffer(bytearray(rows.tobytes()), np.uint32), thawed]
    made = [loader([(parts[0][0], view)], IDS, shuffle=False) for view in views]
    thawed.setflags(write=True)
    for changed in (rows, views[2], thawed):
        changed[:] = 2**32 - 1
    for one in made:
        one.begin([[0]], 0)
        assert ids_of(one) == [5, 0, 0, 22]


def test_immutable_row_lists_are_shared_not_copied(parts: Any) -> None:
    rows = freeze_array(np.zeros(10, np.uint32))
    part = rows[2:5]
    # A loader that copies holds no reference to the caller's array.
    before = sys.getrefcount(rows), sys.getrefcount(part)
    made = [loader([(parts[0][0], array)], IDS) for array in (rows, part)]
    assert (sys.getrefcount(rows), sys.getrefcount(part)) == (before[0] + 1, before[1] + 1)
    del made


def test_later_changes_to_weight_sums_have_no_effect(parts: Any) -> None:
    sums = np.array([1, 1, 2, 2], np.uint64)
    sums.setflags(write=False)
    part = (parts[0][0], (0, 4), sums, 0)
    made = [loader([part], IDS, seed=3) for _ in range(2)]
    made[0].begin([[0]], 0)
    expected = ids_of(made[0])
    sums.setflags(write=True)
    sums[:] = 0
    made[1].begin([[0]], 0)
    assert ids_of(made[1]) == expected


class _Clears(str):
    """A key like "ops" that empties its dict when it is compared."""

    column: dict[str, Any]

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        self.column.clear()
        return False


def test_a_plan_that_changes_while_it_is_read(parts: Any) -> None:
    key = _Clears("ops")
    key.column = {}
    key.column |= {"name": "i" + str(len("d")) * 500, key: 1}
    with pytest.raises(ValueError, match="name and a list ops"):
        loader(parts, [key.column])


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("threads", [0, 2])
def test_a_loader_may_be_looked_at_while_another_thread_closes_it(
    parts: Any, threads: int, on_device: bool
) -> None:
    depot = _core.Depot(_core.Device("cpu")) if on_device else None
    for _ in range(200):
        made = loader(parts, threads=threads, depot=depot)
        made.begin([[0], [1]], 0)
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
        made.begin([[0]], epoch)
        assert [batch["x"].shape for batch in made] == [(5, 0), (5, 0)]


@pytest.mark.parametrize("ops", [[("scale", 0.013)], [("scale", 0.013), ("cast", "float16")]])
@pytest.mark.parametrize("threads", [0, 1])
def test_batches_ignore_the_callers_denormal_flushing(
    tmp_path: Path, ops: list[tuple[Any, ...]], threads: int
) -> None:
    torch = pytest.importorskip("torch")
    np.save(tmp_path / "x.npy", np.full((200, 5), 3e-38, np.float32))
    files = {"x.npy": (tmp_path / "x.npy").stat().st_size}
    shard = _core.ShardReader(tmp_path, 200, [("x", "float32", (5,), False, files)])

    def batches(flush: bool) -> list[bytes]:
        made = loader([(shard, (0, 200))], [{"name": "x", "ops": ops}], threads=threads)
        made.begin([[0]], 0)
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
        made.begin([[i] for i in range(len(split))], 3)
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
    made.begin([[2]], 0)  # one row, whose id is 63
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
    for shard in (3, -1, 2**40):
        with pytest.raises(ValueError, match="no shard"):
            made.begin([[0, shard]], 0)
    for mix in ([1, 0], [1, 1]):
        with pytest.raises(ValueError, match="must be in ascending order"):
            made.begin([mix], 0)
    for wrong in (0, [0], [[0], 1], [["0"]], [[0.0]]):
        with pytest.raises(TypeError):
            made.begin(wrong, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="start must be 0 or more"):
        made.begin([[0]], 0, -1)
    with pytest.raises(ValueError, match=r"^count must be"):
        made.begin([[0]], 0, 0, -1)
    assert list(made) == []
    made.begin([[], []], 0)
    assert list(made) == [] and len(made) == 0
    made.begin([], 0)
    assert list(made) == [] and len(made) == 0
    made.close()
    made.close()
    with pytest.raises(ValueError, match="the loader is closed"):
        made.begin([[0]], 0)
    assert list(made) == []


def test_attributes(parts: Any) -> None:
    made = loader(parts, batch_size=7, framework="dlpack")
    assert (made.batch_size, made.framework, made.last_rows, len(made)) == (7, "dlpack", 0, 0)
    assert _core.batch_count(15, 7, False) == 2
    assert _core.batch_count(15, 7, True) == 2
    assert _core.batch_count(18, 7, False) == 3
    with pytest.raises(ValueError, match="1 rows in batches of 0"):
        _core.batch_count(1, 0, False)
    assert [_core.batch_start(16, 7, False, i) for i in range(3)] == [0, 8, 16]
    assert [_core.batch_start(17, 7, True, i) for i in range(3)] == [0, 7, 14]
    for batch in (-1, 3):
        with pytest.raises(ValueError, match=r"16 rows in batches of 7|no batch 3 of 2"):
            _core.batch_start(16, 7, False, batch)


@pytest.mark.parametrize("drop_last", [False, True])
def test_batch_counts(drop_last: bool) -> None:
    for rows in range(200):
        for size in range(1, 70):
            count = _core.batch_count(rows, size, drop_last)
            rounded = max(1, round(rows / size)) if rows else 0
            assert count == (rows // size if drop_last else rounded)
            starts = [_core.batch_start(rows, size, drop_last, i) for i in range(count + 1)]
            assert starts[-1] == (count * size if drop_last else rows)
            sizes = np.diff(starts)
            assert count == 0 or (sizes.max() - sizes.min() <= 1 and sizes[0] == sizes.max())


def test_orders_are_shared_by_loaders(parts: Any) -> None:
    orders = _core.Orders()
    made = [loader(parts, IDS, seed=3, threads=n, orders=orders) for n in (0, 2)]
    del orders
    for epoch in (0, 1, 0):
        for one in made:
            one.begin([[0, 1, 2]], epoch)
        first, second = map(ids_of, made)
        assert first == second and sorted(first) == list(range(64))
    with pytest.raises(TypeError, match="orders must be an Orders, not object"):
        loader(parts, IDS, orders=object())
    with pytest.raises(TypeError):
        _core.Orders(1)  # type: ignore[call-arg]


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
        made.begin([[0, 1], [2]], epoch)
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
            made.begin([[0]], 0)
            for _ in made:
                pass
            before = process.memory_info().rss
            made.begin([[0, 1], [2]], 1)
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
made.begin([[0]], 0)
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


def test_a_loader_raises_in_a_forked_child(tmp_path: Path) -> None:
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

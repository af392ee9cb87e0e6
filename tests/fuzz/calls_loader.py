"""Random loaders: the same passes inline, with threads and through a depot give the same bytes.

Columns of all types, plain and ragged, with transforms; parts as ranges and lists of rows, some
drawn by weights; passes that are left early, batches that are kept, loaders closed by a thread.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cerebro._core as _core

TYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"),
    *("uint16", "uint32", "uint64", "complex64"),
)
TARGETS = ("float32", "float16", "float64", "int64", "int32", "uint8", "bool", "bfloat16")
SHAPES = ((), (1,), (3,), (17,), (0,), (4, 5, 3), (6, 2, 1), (2, 2), (5, 5, 4))
RAGGED_SHAPES = ((), (2,), (0,), (3, 3))

Bytes = dict[str, tuple[tuple[int, ...], bytes]]


class Column(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    ragged: bool


def values(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Any:
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype.startswith(("float", "complex")):
        made = (rng.standard_normal(shape) * 10.0 ** rng.integers(-5, 5)).astype(dtype)
        if made.size and rng.random() < 0.3:
            at = rng.integers(made.size)
            made.reshape(-1)[at] = rng.choice([np.nan, np.inf, -0.0, 1e-40])
        return made
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)


def write_shard(
    rng: np.random.Generator, folder: Path, rows: int, columns: list[Column]
) -> _core.ShardReader:
    folder.mkdir()
    described = []
    for name, dtype, shape, ragged in columns:
        if ragged:
            lengths = rng.integers(0, 9, rows) * (rng.random(rows) < 0.8)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            np.save(folder / f"{name}.values.npy", values(rng, dtype, (int(offsets[-1]), *shape)))
            np.save(folder / f"{name}.offsets.npy", offsets)
            names = [f"{name}.values.npy", f"{name}.offsets.npy"]
        else:
            np.save(folder / f"{name}.npy", values(rng, dtype, (rows, *shape)))
            names = [f"{name}.npy"]
        files = {file: (folder / file).stat().st_size for file in names}
        described.append((name, dtype, shape, ragged, files))
    return _core.ShardReader(folder, rows, described)


def operations(rng: random.Random, column: Column) -> list[tuple[Any, ...]]:
    """Return a chain of transforms; the loader refuses some."""
    if column.ragged:
        pad = (
            "pad",
            rng.choice([0.0, -1.0, 7.0]),
            rng.choice([0, 0, 1, 3, 100]),
            rng.choice([1, 8]),
        )
        return [pad] * rng.randint(0, 1)
    shape = column.shape
    is_image = len(shape) == 3
    channels = rng.choice([1, shape[2]]) if is_image else 1
    made: list[tuple[Any, ...]] = []
    if rng.random() < 0.6:
        made.append(("cast", rng.choice(TARGETS)))
    if rng.random() < 0.3:
        made.append(("scale", rng.choice([1 / 255, 0.013, -2.0])))
    if rng.random() < 0.3:
        mean = tuple(rng.random() for _ in range(channels))
        made.append(("normalize", mean, tuple(rng.uniform(0.1, 2) for _ in range(channels))))
    if is_image and rng.random() < 0.4:
        size = rng.randint(1, shape[0] + 1), rng.randint(1, shape[1] + 1)
        padding = rng.randint(0, 2), rng.randint(0, 2)
        made.append(("crop", size, padding, rng.random() < 0.6))
    if is_image and rng.random() < 0.4:
        made.append(("flip", rng.choice([0.0, 0.5, 1.0])))
    if is_image and rng.random() < 0.5:
        made.append(("to_chw",))
    if rng.random() < 0.1:
        rng.shuffle(made)
    return made


def part(rng: random.Random, reader: _core.ShardReader, rows: int) -> tuple[Any, ...]:
    """Return a range or a list of the shard's rows, perhaps with weights."""
    chosen: Any
    if rng.random() < 0.6:
        start = rng.randint(0, rows)
        chosen = (start, rng.randint(start, rows))
        count = chosen[1] - start
    else:
        count = rng.randint(0, 40) if rows else 0
        chosen = np.array([rng.randrange(rows) for _ in range(count)], np.uint32)
    if rng.random() < 0.75:
        return reader, chosen
    weights = [rng.randint(0, 2) for _ in range(count)]
    weights[-1:] = [1] * (count > 0)
    return reader, chosen, np.cumsum(weights, dtype=np.uint64), 0


def bytes_of(batch: dict[str, Any]) -> Bytes:
    arrays = {
        name: np.asarray(memoryview(value) if isinstance(value, _core.Tensor) else value)
        for name, value in batch.items()
    }
    return {name: (array.shape, array.tobytes()) for name, array in arrays.items()}


def make_loaders(
    rng: random.Random, parts: list[tuple[Any, ...]], columns: list[Column]
) -> list[_core.Loader]:
    """Return three loaders of the same batches, or none if the transforms do not fit."""
    plan: list[dict[str, Any]] = []
    for column in columns:
        entry = {"name": column.name, "ops": operations(rng, column)}
        if rng.random() < 0.2:
            entry |= {"name": f"{column.name}x", "source": column.name}
        plan.append(entry)
    same: dict[str, Any] = {
        "batch_size": rng.choice([1, 2, 3, 8, 64, 1000]),
        "seed": rng.getrandbits(64),
        "shuffle": rng.random() < 0.7,
        "drop_last": rng.random() < 0.3,
    }
    ways: list[dict[str, Any]] = [
        {"threads": 0},
        {"threads": rng.randint(1, 4)},
        {
            "threads": rng.randint(0, 2),
            "depot": _core.Depot(_core.Device("cpu")),
            "residence": rng.choice(["auto", "streamed", "resident"]),
        },
    ]
    made, refused = [], 0
    for way in ways:
        try:
            framework = rng.choice(["numpy", "dlpack"])
            made.append(_core.Loader(parts, plan, framework=framework, **same, **way))
        except ValueError:
            refused += 1
    assert refused in (0, len(ways)), f"only some loaders refuse {plan}"
    return made


def run(rng: random.Random, folder: Path) -> int:
    """Make a dataset, its three loaders and a few passes; return the number of batches."""
    numbers = np.random.default_rng(rng.getrandbits(32))
    columns = []
    for index in range(rng.randint(1, 4)):
        ragged = rng.random() < 0.3
        shape = rng.choice(RAGGED_SHAPES if ragged else SHAPES)
        columns.append(Column(f"c{index}", rng.choice(TYPES), shape, ragged))
    parts = []
    for index in range(rng.randint(1, 4)):
        rows = rng.choice([0, 1, 2, 7, 33, 100])
        parts.append(part(rng, write_shard(numbers, folder / str(index), rows, columns), rows))
    made = make_loaders(rng, parts, columns)
    kept: list[tuple[dict[str, Any], Bytes]] = []
    batches = 0
    for _ in range(rng.randint(1, 4) if made else 0):
        mixes = [[rng.randrange(len(parts))] for _ in range(rng.randint(0, 5))]
        epoch, start = rng.getrandbits(rng.choice([2, 64])), rng.choice([0, 0, 1, 5])
        most = rng.choice([None, None, 3, 0])
        passes = []
        for loader in made:
            loader.begin(mixes, epoch, start)
            seen: list[Bytes] = []
            while most is None or len(seen) < most:
                batch = next(loader, None)
                if batch is None:
                    break
                seen.append(bytes_of(batch))
                if rng.random() < 0.1:
                    kept.append((batch, seen[-1]))
            passes.append(seen)
        batches += sum(map(len, passes))
        assert passes[0] == passes[1], f"threads change a batch of {columns}"
        assert passes[0] == passes[2], f"a depot changes a batch of {columns}"
    if made and rng.random() < 0.3:
        close_beside(rng.choice(made))
    del made
    for batch, before in kept:
        assert bytes_of(batch) == before, "a batch has changed after it was returned"
    return batches


def close_beside(loader: _core.Loader) -> None:
    """Look at a loader while another thread closes it."""
    closing = threading.Thread(target=loader.close)
    closing.start()
    assert len(loader) >= 0 and loader.rows >= 0 and loader.buffers >= 0
    closing.join()

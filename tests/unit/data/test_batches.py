"""Dataset.batches: epochs, shards, resuming, and the arguments it refuses."""

from __future__ import annotations

import copy
import os
import pickle
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import epoch_batches
import numpy as np
import pytest

import cerebro._core as _core
import cerebro.data
from cerebro.data.batches import Batches, idle_threads, make_loader
from cerebro.data.view import View
from cerebro.errors import InputError
from cerebro.transforms import Pad, RandomCrop, RandomHorizontalFlip, Scale, ToCHW

ROWS = 103


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> cerebro.data.Dataset:
    columns = {
        "x": np.arange(ROWS * 48, dtype=np.uint8).reshape(ROWS, 4, 4, 3),
        "y": np.arange(ROWS),
        "t": [list(range(i % 6)) for i in range(ROWS)],
    }
    return cerebro.data.shard(columns, tmp_path_factory.mktemp("data") / "d", shards=5)


def labels(batches: Any) -> list[int]:
    return [int(y) for batch in batches for y in batch["y"]]


def test_every_row_once_an_epoch(data: Any) -> None:
    batches = data.batches(8, seed=3, framework="numpy")
    first, second = labels(batches), labels(batches)
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second
    again = data.batches(8, seed=3, framework="numpy", epoch=1)
    assert labels(again) == second
    again.set_epoch(0)
    assert again.epoch == 0
    assert labels(again) == first
    assert again.epoch == 1
    assert labels(data.batches(8, seed=4, framework="numpy")) != first


def test_rows_are_permuted_as_documented(data: Any) -> None:
    shards = [data.shard(shard)["y"] for shard in range(5)]
    for size in (8, 20, 1000):
        batches = data.batches(size, seed=7, epoch=2, framework="numpy")
        expected = epoch_batches.of_rows(shards, size, seed=7, epoch=2)
        assert [batch["y"].tolist() for batch in batches] == expected
    for shard, stored in enumerate(shards):
        order = _core.permutation(len(stored), 7, "rows", 2, shard)
        batches = data.batches(8, seed=7, epoch=2, shard=shard, framework="numpy")
        assert labels(batches) == stored[order].tolist()
        plain = data.batches(8, shuffle=False, shard=shard, framework="numpy")
        assert labels(plain) == stored.tolist()
    plain = data.batches(8, shuffle=False, framework="numpy")
    assert labels(plain) == np.concatenate(shards).tolist()


def test_batches_have_even_sizes_and_drop_last(data: Any) -> None:
    def sizes(batch_size: int, **options: Any) -> list[int]:
        batches = data.batches(batch_size, framework="numpy", **options)
        found = [len(batch["y"]) for batch in batches]
        assert len(batches) == len(found)
        return found

    for shuffle in (True, False):
        assert sizes(10, shuffle=shuffle) == [11] * 3 + [10] * 7
        assert sizes(8, shuffle=shuffle) == [8] * 12 + [7]
        assert sizes(68, shuffle=shuffle) == [52, 51]  # 1.51 batches
        assert sizes(69, shuffle=shuffle) == [103]
        assert sizes(8, shuffle=shuffle, drop_last=True) == [8] * 12
        assert sizes(104, shuffle=shuffle, drop_last=True) == []
        assert sizes(8, shuffle=shuffle, shard=4) == [10, 10]  # 20 rows: 2.5 batches


@pytest.mark.parametrize("threads", [0, 2])
def test_start_counts_batches(data: Any, threads: int) -> None:
    def batches(start: int) -> Batches:
        return Batches(data, 8, seed=1, framework="numpy", start=start, threads=threads)

    whole = [b["y"].tolist() for b in batches(0)]
    for start in (0, 1, 2, 3, 7, len(whole) - 1, len(whole), len(whole) + 5):
        made = batches(start)
        assert len(made) == max(len(whole) - start, 0)
        assert [b["y"].tolist() for b in made] == whole[start:]
        assert len(made) == len(whole)  # only the first pass begins late
        assert len(list(made)) == len(whole)


def test_two_passes_at_a_time(data: Any) -> None:
    batches = data.batches(8, framework="numpy")
    both = [(a["y"].tolist(), b["y"].tolist()) for a, b in zip(batches, batches, strict=True)]
    first, second = (data.batches(8, epoch=epoch, framework="numpy") for epoch in (0, 1))
    assert [a for a, _ in both] == [b["y"].tolist() for b in first]
    assert [b for _, b in both] == [b["y"].tolist() for b in second]


def test_an_abandoned_pass_leaves_later_passes_complete(data: Any) -> None:
    batches = Batches(data, 8, framework="numpy", threads=1)
    for batch in batches:
        kept = batch["y"].copy(), batch["y"]
        break
    for _ in range(3):
        assert sorted(labels(batches)) == list(range(ROWS))
    assert (kept[0] == kept[1]).all()


def test_batches_of_views(data: Any) -> None:
    pytest.importorskip("torch")
    train, rest = data.split(0.7, 0.3)
    assert sorted(labels(train.batches(8)) + labels(rest.batches(8))) == list(range(ROWS))
    chosen = data.select([3, 3, 50, 102])
    stored = np.concatenate([data.shard(i)["y"] for i in range(5)])
    assert sorted(labels(chosen.batches(8, framework="numpy"))) == sorted(
        stored[[3, 3, 50, 102]].tolist()
    )


def test_a_view_without_rows(data: Any) -> None:
    pytest.importorskip("torch")
    nothing = SimpleNamespace(view=View(data.shards, [range(3, 3)] * 5))
    for framework in ("torch", "numpy"):
        batches = Batches(nothing, 8, framework=framework)
        assert len(batches) == 0 and list(batches) == []


def test_transforms_of_a_view(data: Any) -> None:
    view = data.with_transforms({"x": [RandomCrop(3), ToCHW(), Scale(1 / 255)], "t": [Pad(-1)]})
    batch = next(iter(view.batches(8, framework="numpy")))
    assert list(batch) == ["x", "y", "t", "t_mask", "t_length"]
    assert batch["x"].shape == (8, 3, 3, 3) and batch["x"].dtype == np.float32
    assert ((batch["t"] == -1) == ~batch["t_mask"]).all()
    with pytest.raises(InputError, match="column 'y': ToCHW"):
        data.with_transforms({"y": [ToCHW()]})
    with pytest.raises(InputError):
        data.with_transforms({"z": [Scale()]})


def test_random_transforms_are_keyed_by_row(data: Any) -> None:
    """Whatever the view, the batch size and the order, a row is flipped or not."""
    flips = {"x": [RandomHorizontalFlip()]}

    def rows_of(batches: Any) -> dict[int, bytes]:
        return {int(y): x.tobytes() for b in batches for x, y in zip(b["x"], b["y"], strict=True)}

    def flipped(view: Any, batch_size: int, **options: Any) -> dict[int, bytes]:
        view = view.with_transforms(flips)
        return rows_of(view.batches(batch_size, framework="numpy", **options))

    whole = flipped(data, 8, seed=2)
    assert flipped(data, 31, seed=2) == whole
    part, _ = data.split(0.5, 0.5)
    for y, x in flipped(part, 5, seed=2).items():
        assert whole[y] == x
    assert flipped(data, 8, seed=2, shuffle=False) == whole
    assert flipped(data, 8, seed=2, epoch=1) != whole
    plain = rows_of(data.batches(8, framework="numpy"))
    calm = Batches(data.with_transforms(flips), 8, framework="numpy", augment=False)
    assert rows_of(calm) == plain
    assert whole != plain


def test_make_loader(data: Any) -> None:
    loader = make_loader(data, 8, seed=0, shuffle=False, framework="dlpack", threads=1)
    assert isinstance(loader, _core.Loader)
    loader.begin([[4], [0]], 0)
    got = [np.asarray(batch["y"]).tolist() for batch in loader]
    stored = [data.shard(i)["y"].tolist() for i in (4, 0)]
    assert list(chain.from_iterable(got)) == stored[0] + stored[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, not 0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number of at least 1, not 2.5"),
        ({"batch_size": "8"}, "batch_size must be a whole number"),
        ({"batch_size": True}, "batch_size must be a whole number"),
        ({"seed": -1}, "seed must be a whole number from 0 to"),
        ({"epoch": -1}, "epoch must be a whole number"),
        ({"start": -1}, "start must be a whole number of at least 0"),
        ({"shard": 5}, "shard must be a whole number from 0 to 4, not 5"),
        ({"framework": "tf"}, "framework must be one of torch, numpy, jax, dlpack"),
        ({"device": "gpu"}, "device must be 'cpu', 'cuda'"),
        ({"device": "cuda:x"}, "device must be 'cpu', 'cuda'"),
        ({"device": "cuda", "framework": "numpy"}, "NumPy has no arrays on cuda"),
        ({"residence": "here"}, "residence must be one of auto, resident, streamed"),
        ({"threads": -1}, "threads must be a whole number from 0 to 64"),
    ],
)
def test_bad_arguments(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Batches(data, **({"batch_size": 8} | options))


def test_bad_epochs_and_repr(data: Any) -> None:
    pytest.importorskip("torch")
    batches = data.batches(8)
    with pytest.raises(InputError, match="epoch"):
        batches.set_epoch(-3)
    assert repr(batches) == "Batches(epoch=0, 13 batches of 8 rows, framework='torch')"
    assert batches.batch_size == 8
    assert 0 <= idle_threads() <= 2


def test_numpy_integers_are_taken(data: Any) -> None:
    batches = data.batches(np.int64(8), seed=np.uint32(3), shard=np.int8(2), framework="numpy")
    assert len(labels(batches)) == 21


def test_no_file_is_left_open(data: Any, tmp_path: Path) -> None:
    import psutil

    before = psutil.Process().num_fds()
    for _ in range(3):
        list(Batches(data, 8, framework="numpy", threads=2))
    assert psutil.Process().num_fds() == before


def test_calling_iter_does_not_advance_the_epoch(data: Any) -> None:
    """Lightning calls iter() on what it is given before it asks for a batch."""
    batches = data.batches(16, framework="numpy")
    first = [batch["x"].copy() for batch in data.batches(16, framework="numpy")]
    for _ in range(3):
        iter(batches)
    assert batches.epoch == 0
    assert all(
        np.array_equal(batch["x"], there) for batch, there in zip(batches, first, strict=True)
    )
    assert batches.epoch == 1


def test_sampler_set_epoch_sets_the_epoch_of_the_batches(data: Any) -> None:
    batches = data.batches(16, framework="numpy")
    batches.sampler.set_epoch(5)
    assert batches.epoch == 5


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]
)
def test_copies_begin_with_the_next_pass(data: Any, copied: Any) -> None:
    batches = data.batches(16, framework="numpy", seed=3)
    next(iter(batches))
    there = copied(batches)
    assert (there.epoch, len(there)) == (batches.epoch, len(batches)) == (1, len(batches))
    assert all(np.array_equal(one["x"], two["x"]) for one, two in zip(batches, there, strict=True))


def test_used_batches_work_after_a_fork(data: Any) -> None:
    batches = data.batches(16, framework="numpy", threads=1)
    expected = [batch["x"].sum() for batch in batches]
    batches.set_epoch(0)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            sums = [float(batch["x"].sum()) for batch in batches]
            os.write(writer, repr(sums).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        assert file.read() == repr([float(value) for value in expected])
    os.waitpid(child, 0)


def test_a_dataset_is_not_read_row_by_row(data: Any) -> None:
    with pytest.raises(TypeError, match=r"in batches, not by row: iterate over data.batches"):
        data[0]

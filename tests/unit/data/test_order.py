"""Epochs: which rows each batch has, and which batches each unit, against an independent order."""

from __future__ import annotations

import warnings
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import epoch_batches
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from line_model import build

import cerebro
import cerebro._core as _core
from cerebro.data import Dataset
from cerebro.data.batches import Batches, make_loader
from cerebro.data.order import MOST_BYTES, Cut, EpochOrder, make_order, resolve_shuffle
from cerebro.data.view import View
from cerebro.errors import InputError

LR = {"lr": [0.1]}
ROWS = 240
SHARDS = (1, 5, 9, 70)
"""The numbers of shards: one; a group and more; several groups; two pools."""


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Dataset]:
    """The same rows in different numbers of shards."""
    columns = {
        "y": np.arange(ROWS),
        "t": [np.arange(row % 6) for row in range(ROWS)],
    }
    folder = tmp_path_factory.mktemp("sets")
    return {
        count: cerebro.shard(columns, folder / str(count), shards=count, seed=count)
        for count in SHARDS
    }


@st.composite
def cases(draw: Any) -> Any:
    """Draw a number of shards, the rows of a view with repeated ones, and arguments."""
    count = draw(st.sampled_from(SHARDS))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    few = random.choice(count, random.integers(1, count + 1), replace=False)  # the others are empty
    chosen = random.integers(0, ROWS, draw(st.integers(1, 2 * ROWS)))
    size = -(-ROWS // count)
    chosen = np.where(np.isin(chosen // size, few), chosen, few[0] * size + chosen % size)
    cut = Cut(draw(st.integers(1, 70)), draw(st.booleans()), draw(st.integers(1, 5)))
    return (
        count,
        np.minimum(chosen, ROWS - 1),
        cut,
        draw(st.integers(0, 5)),
        draw(st.integers(0, 9)),
    )


def of_shards(view: Dataset) -> list[list[int]]:
    return [view.shard(shard)["y"].tolist() for shard in range(view.num_shards)]


def rows_of(batches: Any) -> list[list[int]]:
    """Return the rows of each batch, and check their ragged values."""
    found = []
    for batch in batches:
        rows, lengths = batch["y"], batch["t_length"]
        assert lengths.tolist() == [row % 6 for row in rows]
        places = np.arange(batch["t"].shape[1])
        assert np.array_equal(batch["t_mask"], places < lengths[:, None])
        assert np.array_equal(batch["t"], np.where(batch["t_mask"], places, 0))
        found.append(rows.tolist())
    return found


def check_sizes(batches: list[list[int]], rows: int, cut: Cut) -> None:
    size = cut.batch_size
    if cut.drop_last:
        assert [len(batch) for batch in batches] == [size] * (rows // size)
        return
    assert len(batches) == max(1, round(rows / size))
    assert sum(map(len, batches)) == rows
    assert max(map(len, batches)) - min(map(len, batches)) <= 1
    assert min(map(len, batches)) >= min(rows, size / 2)


def check_rows(batches: list[list[int]], shards: list[list[int]], cut: Cut) -> None:
    """Check that every row comes once, or as often as the view has it."""
    every, here = (sorted(chain.from_iterable(rows)) for rows in (shards, batches))
    if cut.drop_last:
        left = np.bincount(every, minlength=ROWS) - np.bincount(here, minlength=ROWS)
        assert (left >= 0).all() and left.sum() == len(every) - len(here)
    else:
        assert here == every


def parts_of(view: Dataset, order: EpochOrder, cut: Cut, epoch: int, trial: int) -> Any:
    """Return the parts of an epoch that a trial visits, and the rows of their batches."""
    loader = make_loader(
        view, cut.batch_size, seed=order.seed, shuffle=order.shuffle, drop_last=cut.drop_last,
        framework="numpy",
    )  # fmt: skip
    parts = [order.part(part, epoch, cut) for part in order.visits(trial, epoch)]
    found = []
    for part in parts:
        loader.begin([part.mix], epoch, part.start, part.count)
        found.append(rows_of(loader))
    return parts, found


def check_parts(
    view: Dataset, order: EpochOrder, cut: Cut, epoch: int, trial: int, whole: list[list[int]]
) -> Any:
    """Check that the parts of an epoch, joined, are its batches; return the parts."""
    parts, found = parts_of(view, order, cut, epoch, trial)
    assert list(chain.from_iterable(found)) == whole
    assert order.steps(epoch, cut) == len(whole)
    before = 0
    for step, (part, batches) in enumerate(zip(parts, found, strict=True)):
        assert part.count == sum(part.updates) == len(batches)
        assert order.batches_before(trial, epoch, step, cut) == before
        before += len(batches)
    return parts


@given(cases())
@settings(max_examples=120, deadline=None)
def test_an_epoch_is_one_permutation_of_all_rows(sets: Any, case: Any) -> None:
    count, chosen, cut, epoch, seed = case
    view = sets[count].select(chosen)
    shards = of_shards(view)
    batches = Batches(
        view, cut.batch_size, seed=seed, epoch=epoch, drop_last=cut.drop_last, framework="numpy",
        shuffle="rows",
    )  # fmt: skip
    assert len(batches) == cut.count(len(chosen))
    whole = rows_of(batches)
    options = {"seed": seed, "epoch": epoch, "drop_last": cut.drop_last}
    assert whole == epoch_batches.of_rows(shards, cut.batch_size, **options)
    check_sizes(whole, len(chosen), cut)
    check_rows(whole, shards, cut)
    order = make_order(view, "rows", seed)
    assert order.num_parts == count
    for trial in (0, 3):  # for all trials the same
        parts = check_parts(view, order, cut, epoch, trial, whole)
    updates = list(chain.from_iterable(part.updates for part in parts))
    assert updates == epoch_batches.sizes(len(whole), cut.accumulate)
    units = [len(part.updates) for part in parts]
    assert max(units) - min(units) <= 1
    assert order.steps_of(3, cut) == [len(whole)] * 3


@given(cases(), st.integers(0, 30))
@settings(max_examples=120, deadline=None)
def test_an_epoch_is_one_permutation_of_each_group(sets: Any, case: Any, trial: int) -> None:
    count, chosen, cut, epoch, seed = case
    view = sets[count].select(chosen)
    shards = of_shards(view)
    order = make_order(view, "shards", seed)
    mixes = order.mixes(epoch)
    batches = view.batches(
        cut.batch_size, seed=seed, epoch=epoch, drop_last=cut.drop_last, framework="numpy",
        shuffle="shards", trial=trial,
    )  # fmt: skip
    whole = rows_of(batches)
    options: Any = {"seed": seed, "epoch": epoch, "drop_last": cut.drop_last}
    of_group = [epoch_batches.of_mix(shards, mix, cut.batch_size, **options) for mix in mixes]
    first = (trial + epoch) % len(mixes)
    assert whole == list(chain.from_iterable(of_group[first:] + of_group[:first]))
    for mix, group in zip(mixes, of_group, strict=True):
        rows = sum(len(shards[shard]) for shard in mix)
        if rows:
            check_sizes(group, rows, cut)
    check_rows(whole, shards, cut)
    for part in check_parts(view, order, cut, epoch, trial, whole):
        assert list(part.updates) == epoch_batches.sizes(part.count, cut.accumulate)
    assert order.steps_of(epoch + 1, cut)[epoch] == len(whole)


@pytest.mark.parametrize("count", [1, 2, 4, 5, 7, 8, 9, 31, 33, 63, 64, 65, 200])
def test_groups_are_drawn_within_pools(count: int) -> None:
    order = EpochOrder("shards", tuple(range(1, count + 1)), seed=5)
    pools = order.pools
    assert list(chain.from_iterable(pools)) == list(range(count))
    assert len(pools) == max(1, count // 32)
    assert count < 32 or {len(pool) for pool in pools} <= set(range(32, 64))
    drawn = [order.mixes(epoch) for epoch in range(12)]
    for groups in drawn:
        assert sorted(chain.from_iterable(groups)) == list(range(count))
        assert all(len(mix) <= 4 and list(mix) == sorted(mix) for mix in groups)
        assert len(groups) == order.num_parts == len(order.pool_of_part)
        for mix, pool in zip(groups, order.pool_of_part, strict=True):
            assert set(mix) <= set(pools[pool])
        for number, pool in enumerate(pools):
            of_pool = [
                g for g, where in zip(groups, order.pool_of_part, strict=True) if where == number
            ]
            assert len(of_pool) == -(-len(pool) // 4)
            assert max(map(len, of_pool)) - min(map(len, of_pool)) <= 1
    # Groups differ from epoch to epoch if there is a choice, and do not depend on the rows.
    different = len(set(map(tuple, drawn)))
    assert different == 1 if count <= 4 else different > 4 if count < 9 else different == 12
    assert EpochOrder("shards", (3,) * count, seed=5).mixes(7) == drawn[7]
    assert count <= 4 or EpochOrder("shards", (3,) * count, seed=6).mixes(7) != drawn[7]
    if 4 < count <= 8:
        places = _core.permutation(count, 5, "groups", 2, 0).tolist()
        half = count // 2
        assert drawn[2] == [tuple(sorted(places[:half])), tuple(sorted(places[half:]))]
    # Parts take the pools in turn, so that trials that begin at different parts are spread.
    assert order.pool_of_part[: len(pools)] == list(range(len(pools)))
    assert sum(order.part_rows) == pytest.approx(sum(order.shard_rows))
    assert order.pool_rows == [sum(shard + 1 for shard in pool) for pool in pools]


def test_trials_visit_the_groups_in_rotated_order(sets: Any) -> None:
    order = make_order(sets[70], "shards", 1)
    for epoch in range(3):
        mixes = order.mixes(epoch)
        for trial in range(2 * len(mixes)):
            first = (trial + epoch) % len(mixes)
            assert order.pass_of(trial, epoch) == mixes[first:] + mixes[:first]
            still = EpochOrder("shards", order.shard_rows, 1, stagger=False)
            assert still.pass_of(trial, epoch) == mixes
    rows = make_order(sets[70], "rows", 1)
    assert rows.pass_of(3, 2) == [tuple(range(70))]
    assert rows.visits(3, 2) == list(range(rows.num_parts))


def views(sets: Any) -> dict[str, Dataset]:
    data = sets[9]
    folds = cerebro.KFold(3, seed=1).split(data)
    return {
        "whole": data,
        "split": data.split(0.6, 0.4)[1],
        **{f"fold {number}": train for number, (train, _) in enumerate(folds)},
        "slice": data.select(slice(70, 190)),  # without the first and the last shards
        "repeated": data.select([5, 5, 5, 200, 7, 5]),
    }


@pytest.mark.parametrize("shuffle", ["rows", "shards"])
def test_views_and_passes_that_start_late(sets: Any, shuffle: Any) -> None:
    for view in views(sets).values():
        shards = of_shards(view)

        def pass_of(view: Dataset = view, size: int = 7, **options: Any) -> list[list[int]]:
            return rows_of(
                view.batches(size, seed=2, epoch=1, shuffle=shuffle, framework="numpy", **options)
            )

        whole = pass_of()
        mixes = make_order(view, shuffle, 2).pass_of(0, 1)
        expected = [epoch_batches.of_mix(shards, mix, 7, seed=2, epoch=1) for mix in mixes]
        assert whole == list(chain.from_iterable(expected))
        check_rows(whole, shards, Cut(7))
        for start in (1, len(whole) // 2, len(whole) - 1, len(whole), len(whole) + 3):
            assert pass_of(start=start) == pass_of(start=start, threads=0) == whole[start:]
        for shard in (0, 4, 8):
            alone = epoch_batches.of_mix(shards, [shard], 7, seed=2, epoch=1)
            assert pass_of(shard=shard) == alone
            assert pass_of(shard=shard, start=1) == alone[1:]


def test_trials_of_a_fold_share_an_order(sets: Any) -> None:
    """Only the rows of the view and the seed count, not the trial or the size of its batches."""
    orders = _core.Orders()
    for train, _ in cerebro.KFold(3, seed=1).split(sets[5]):
        for size in (9, 20):
            loader = make_loader(train, size, seed=4, framework="numpy", orders=orders)
            for epoch in (0, 1, 0):
                loader.begin([range(5)], epoch)
                expected = epoch_batches.of_rows(of_shards(train), size, seed=4, epoch=epoch)
                assert rows_of(loader) == expected


# --- the default ----------------------------------------------------------------------------------


def test_the_default_shuffle_depends_on_size_alone(
    sets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = sets[9].select(slice(0, 100))
    for stored, expected in ((MOST_BYTES, "rows"), (MOST_BYTES + 1, "shards")):
        monkeypatch.setattr(View, "stored_bytes", stored)
        for cores in (1, 64):
            monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
            monkeypatch.setattr("os.sched_getaffinity", lambda pid, n=cores: set(range(n)))
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "" if cores == 1 else "0,1")
            assert resolve_shuffle(None, view) == expected
        for given_one in (True, None):
            passed = rows_of(view.batches(8, framework="numpy", shuffle=given_one))
            named = rows_of(view.batches(8, framework="numpy", shuffle=expected))
            assert passed == named
        assert resolve_shuffle("rows", view) == "rows"
        assert resolve_shuffle("shards", view) == "shards"
        assert resolve_shuffle(None, view, stagger=False) == "shards"


def test_a_view_is_as_large_as_its_share_of_the_files(sets: Any) -> None:
    data = sets[5]
    files = sum(file.stat().st_size for file in Path(data.path).rglob("*.npy"))
    assert data.view.stored_bytes == files
    assert data.select(slice(0, 60)).view.stored_bytes == files * 60 // ROWS
    assert data.select([1, 1]).view.stored_bytes == files * 2 // ROWS


@pytest.mark.parametrize("wrong", ["row", True, 1, "Rows", ["rows"]])
def test_other_values_of_shuffle_are_refused(sets: Any, wrong: Any) -> None:
    with pytest.raises(InputError, match='shuffle must be "rows", "shards" or None, not'):
        resolve_shuffle(wrong, sets[5])
    with pytest.raises(InputError, match="shuffle must be"):
        cerebro.search(build, LR, sets[5], epochs=1, n_trials=1, batch_size=8, shuffle=wrong)
    with pytest.raises(InputError, match="shuffle must be"):
        cerebro.plan(LR, sets[5], epochs=1, n_trials=1, shuffle=wrong)
    if wrong is not True:
        with pytest.raises(InputError, match="shuffle must be"):
            sets[5].batches(8, shuffle=wrong)


def test_impossible_shuffling_by_rows_is_refused(sets: Any) -> None:
    with pytest.raises(InputError, match=r'stagger=False .* needs shuffle="shards"'):
        resolve_shuffle("rows", sets[5], stagger=False)
    with pytest.raises(InputError, match=r'stagger=False .* needs shuffle="shards"'):
        cerebro.search(
            build, LR, sets[5], epochs=1, n_trials=1, batch_size=8, shuffle="rows", stagger=False
        )
    many = SimpleNamespace(view=SimpleNamespace(num_rows=2**32, stored_bytes=10))
    for shuffle in ("rows", None):
        with pytest.raises(InputError, match=r'orders at most 4,294,967,295 rows.*use "shards"'):
            resolve_shuffle(shuffle, many)
    assert resolve_shuffle("shards", many) == "shards"


# --- data whose shards differ ---------------------------------------------------------------------


def line_data(folder: Path, rows: int, shards: int, shuffle: bool, **columns: Any) -> Dataset:
    random = np.random.default_rng(0)
    columns = {
        "x": random.normal(size=(rows, 3)).astype(np.float32),
        "y": random.normal(size=rows).astype(np.float32),
        **columns,
    }
    return cerebro.shard(columns, folder, shards=shards, shuffle=shuffle)


def readers(data: Dataset, folder: Path, shuffle: Any) -> list[Any]:
    """What reads the data in this order."""
    return [
        lambda: data.batches(8, framework="numpy", shuffle=shuffle),
        lambda: cerebro.search(
            build, LR, data, epochs=1, n_trials=1, batch_size=16, workers=0, shuffle=shuffle,
            run=folder, progress=False,
        ),
    ]  # fmt: skip


def warned(reader: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        reader()
    return [str(one.message) for one in found if "the shards of" in str(one.message)]


SORTED = {
    "kind": np.repeat(np.arange(10), 40),  # by class
    "name": np.repeat(["ant", "bee", "cat", "dog"], 100),
    "time": np.linspace(0, 1e9, 400),
}


@pytest.mark.parametrize("column", SORTED)
def test_sorted_data_that_is_read_by_groups(tmp_path: Path, column: str) -> None:
    data = line_data(tmp_path / "d", 400, 8, False, **{column: SORTED[column]})
    for number, reader in enumerate(readers(data, tmp_path / "run", "shards")):
        (message,) = warned(reader)
        assert f"differ in column {column!r}: it was written with shuffle=False" in message, number
        assert 'search with shuffle="rows"' in message
    for reader in readers(data, tmp_path / "rows", "rows"):
        assert warned(reader) == []
    mixed = line_data(tmp_path / "mixed", 400, 8, True, **{column: SORTED[column]})
    for reader in readers(mixed, tmp_path / "other", "shards"):
        assert warned(reader) == []


def test_the_warning_names_only_the_worst_column(tmp_path: Path) -> None:
    columns = {**SORTED, "noise": np.random.default_rng(1).normal(size=400)}
    data = line_data(tmp_path / "d", 400, 8, False, **columns)
    (message,) = warned(readers(data, tmp_path, "shards")[0])
    assert "differ in column 'name' (and in 2 more columns): " in message
    # Four shards are one group, whose rows are all shuffled together.
    few = line_data(tmp_path / "few", 400, 4, False, **SORTED)
    assert warned(readers(few, tmp_path, "shards")[0]) == []


@pytest.mark.parametrize("rows", [16, 24, 40, 96])
def test_small_random_shards_do_not_warn(tmp_path: Path, rows: int) -> None:
    for seed in range(12):
        random = np.random.default_rng(seed)
        columns = {
            "two": random.integers(0, 2, rows),
            "ten": random.integers(0, 10, rows),
            "rare": random.random(rows) < 0.05,
            "wide": random.standard_cauchy(rows),
            "same": np.zeros(rows, np.int64),
        }
        data = line_data(tmp_path / str(seed), rows, 8, False, **columns)
        assert warned(readers(data, tmp_path, "shards")[0]) == []

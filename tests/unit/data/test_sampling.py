"""Dataset.with_sampling: rows drawn by weight with replacement, from all or from each shard."""

from __future__ import annotations

import pickle
from itertools import islice
from typing import Any

import epoch_batches
import numpy as np
import pytest

import cerebro._core as _core
import cerebro.data
from cerebro.data.order import Sampling, make_order
from cerebro.errors import InputError
from cerebro.transforms import RandomHorizontalFlip

ROWS = 240
SHARDS = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> cerebro.data.Dataset:
    rows = np.arange(ROWS)
    columns = {
        "row": rows,
        "x": rows.repeat(12).reshape(ROWS, 2, 2, 3).astype(np.uint8),
        "w": (rows % 4).astype(np.float32),  # weights 0, 1, 2, 3
        "y": (rows % 10 == 0).astype(np.int64),  # one row in ten is of class 1
        "one": np.where(rows < 1, 1.0, 0.0),
        "zero": np.zeros(ROWS),
        "broken": np.where(rows == 7, np.nan, 1.0),
    }
    return cerebro.data.shard(columns, tmp_path_factory.mktemp("data") / "d", shards=SHARDS)


def drawn(data: Any, epoch: int = 0, **options: Any) -> list[int]:
    batches = data.batches(16, seed=3, epoch=epoch, framework="numpy", **options)
    return [int(row) for batch in batches for row in batch["row"]]


def check_frequencies(epochs: list[list[int]], weights: Any) -> None:
    """Check that rows are drawn in proportion to their weights: rows by number."""
    drawn_rows = sum(map(len, epochs))
    found = np.bincount([row for epoch in epochs for row in epoch], minlength=ROWS)
    expected = drawn_rows * weights / weights.sum()
    assert (found[weights == 0] == 0).all()
    seen = weights > 0
    chi2 = ((found[seen] - expected[seen]) ** 2 / expected[seen]).sum()
    assert chi2 < seen.sum() + 3 * np.sqrt(2 * seen.sum())  # a chi-square's mean and deviation


def weights_of(data: Any, shards: Any, of_row: Any) -> Any:
    weights = np.zeros(ROWS)
    for shard in shards:
        rows = data.shard(shard)["row"]
        weights[rows] = of_row(rows)
    return weights


def test_rows_are_drawn_in_proportion(data: Any) -> None:
    rows = np.arange(ROWS)
    view, classes = data.with_sampling("w"), data.with_sampling(balance="y")
    epochs = [drawn(view, epoch) for epoch in range(60)]
    assert {len(epoch) for epoch in epochs} == {ROWS}
    check_frequencies(epochs, rows % 4.0)
    of_class = np.where(rows % 10 == 0, 1 / 24, 1 / 216)
    check_frequencies([drawn(classes, epoch) for epoch in range(60)], of_class)
    for shard in range(SHARDS):
        of_shard = weights_of(data, [shard], lambda some: some % 4.0)
        for shuffle in ("rows", "shards"):
            epochs = [drawn(view, epoch, shard=shard, shuffle=shuffle) for epoch in range(60)]
            assert {len(epoch) for epoch in epochs} == {60}
            check_frequencies(epochs, of_shard)


def test_each_shard_of_a_group_is_drawn_within_itself(data: Any) -> None:
    view = data.with_sampling("w")
    epochs = [drawn(view, epoch, shuffle="shards") for epoch in range(60)]
    shards = [data.shard(shard)["row"] for shard in range(SHARDS)]
    for epoch in epochs:
        assert [np.isin(epoch, rows).sum() for rows in shards] == [60] * SHARDS

    def share(rows: Any) -> Any:
        return rows % 4 / (rows % 4).sum()

    check_frequencies(epochs, weights_of(data, range(SHARDS), share))


def words(*key: int) -> Any:
    """Yield the numbers of xoshiro256**, seeded by splitmix64 with a key of numbers."""
    mask = 2**64 - 1

    def rotated(x: int, k: int) -> int:
        return (x << k | x >> (64 - k)) & mask

    def split() -> int:
        nonlocal state
        x = state = (state + 0x9E3779B97F4A7C15) & mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    state, *others = key
    for number in others:
        state = split() ^ number
    s = [split() for _ in range(4)]
    while True:
        yield rotated(s[1] * 5 & mask, 7) * 9 & mask
        last = s[1] << 17 & mask
        s[2] ^= s[0]
        s[3] ^= s[1]
        s[1] ^= s[2]
        s[0] ^= s[3]
        s[2] ^= last
        s[3] = rotated(s[3], 45)


DRAWS = 8
"""The use of the core's generator: CER_RNG_DRAWS."""


def draws(sums: Any, before: int, seed: int, epoch: int, part: int) -> Any:
    """Return the positions that are drawn by running sums, as many as there are."""
    bound = int(sums[-1]) - before
    # A product whose lower half is small would have to be drawn again: of 2**53, almost never.
    numbers = islice(words(seed, DRAWS, epoch, part), len(sums))
    at = [before + (number * bound >> 64) for number in numbers]
    return np.searchsorted(sums, np.array(at, np.uint64), side="right")


@pytest.mark.parametrize("column", [{"weights": "w"}, {"balance": "y"}])
def test_draws_are_those_of_the_documented_generator(data: Any, column: Any) -> None:
    whole = data.with_sampling(**column)
    # In the last view only the shards 1 to 3 have rows, which are drawn as from shard 1.
    for view, first in (
        (whole, 0),
        (whole.split(0.3, 0.7)[1], 0),
        (whole.select(slice(70, 190)), 1),
    ):
        there = range(first, SHARDS)
        shards = [view.shard(shard)["row"] for shard in range(SHARDS)]
        for epoch in (0, 3):
            key: Any = {"seed": 3, "epoch": epoch}
            sums = np.concatenate([part for part, _ in view.view.weight_sums(across=True)])
            order = draws(sums, 0, part=first, **key)
            found = view.batches(16, framework="numpy", **key)
            expected = epoch_batches.of_rows(shards, 16, order=order)
            assert [batch["row"].tolist() for batch in found] == expected

            starts = np.cumsum([0, *map(len, shards)])
            parts = view.view.weight_sums(across=False)
            (mix,) = make_order(view, "shards", 3).mixes(epoch)
            assert mix == tuple(range(SHARDS))
            order = np.concatenate(
                [starts[s] + draws(parts[s][0], 0, part=s, **key) for s in there]
            )
            order = order[_core.permutation(len(order), 3, "rows", epoch, first)]
            found = view.batches(16, framework="numpy", shuffle="shards", **key)
            expected = epoch_batches.of_rows(shards, 16, order=order)
            assert [batch["row"].tolist() for batch in found] == expected


@pytest.mark.parametrize("shuffle", ["rows", "shards"])
def test_a_pass_depends_on_seed_epoch_and_weights_alone(data: Any, shuffle: Any) -> None:
    view = data.with_sampling("w")
    whole = drawn(view, shuffle=shuffle)
    for threads in (0, 2):
        assert drawn(view, threads=threads, shuffle=shuffle) == whole
    assert whole[3 * 16 :] == drawn(view, start=3, shuffle=shuffle)
    assert whole != drawn(view, 1, shuffle=shuffle)
    assert whole == drawn(pickle.loads(pickle.dumps(view)), shuffle=shuffle)
    assert whole != drawn(data, shuffle=shuffle)
    assert sorted(drawn(data, shuffle=shuffle)) == list(range(ROWS))


def test_without_shuffling_each_row_comes_once(data: Any) -> None:
    view = data.with_sampling("w")
    assert drawn(view, shuffle=False) == drawn(data, shuffle=False)
    in_order = [int(row) for batch in view.in_order(16, "numpy") for row in batch["row"]]
    assert in_order == drawn(data, shuffle=False)
    assert drawn(view.with_sampling()) == drawn(data)


def test_classes_get_equal_shares(data: Any) -> None:
    view = data.with_sampling(balance="y")
    labels = [y for epoch in range(20) for y in np.array(drawn(view, epoch)) % 10 == 0]
    assert abs(np.mean(labels) - 0.5) < 0.02
    weighted = data.select(np.arange(ROWS)).with_sampling("y")  # weights 0 and 1
    assert all(row % 10 == 0 for row in drawn(weighted))


def test_a_view_draws_from_its_own_rows(data: Any) -> None:
    """A view of a sampled view draws from its own rows; rows given twice count twice."""
    train, _ = data.with_sampling("w").split(0.5, 0.5)
    rows = set(drawn(data.split(0.5, 0.5)[0], shuffle=False))
    assert len(drawn(train)) == ROWS // 2
    assert set(drawn(train)) <= rows
    chosen = data.select([3, 3, 3, 1]).with_sampling(balance="y")
    assert len(drawn(chosen)) == 4


def test_sampling_is_recorded_in_the_spec(data: Any) -> None:
    view = data.with_sampling(balance="y")
    assert "sampling" not in data.spec()
    assert view.spec()["sampling"] == {"balance": "y"}
    again = cerebro.data.Dataset.from_spec(view.spec())
    assert again.checksum == view.checksum != data.checksum
    assert drawn(again) == drawn(view)
    assert view.with_sampling().checksum == data.checksum
    assert (
        data.view.holds(view.view)
        and not view.view.holds(data.view)
        and view.view.holds(again.view)
    )
    assert "rows drawn with equal classes of 'y'" in repr(view)
    assert "rows drawn by &#x27;w&#x27;" in data.with_sampling("w")._repr_html_()
    with pytest.raises(InputError, match="spec is damaged"):
        cerebro.data.Dataset.from_spec({**view.spec(), "sampling": {"luck": "y"}})


def test_a_row_is_transformed_alike_however_often_it_is_drawn(data: Any) -> None:
    view = data.with_sampling("w").with_transforms({"x": [RandomHorizontalFlip()]})
    seen: dict[int, bytes] = {}
    for batch in view.batches(8, framework="numpy"):
        for row, x in zip(batch["row"], batch["x"], strict=True):
            assert seen.setdefault(int(row), x.tobytes()) == x.tobytes()
    assert len(seen) < ROWS


def test_the_loader_refuses_invalid_weight_sums(data: Any) -> None:
    (reader, part), *_ = data.view.loader_parts()
    plan = cerebro.transforms.compile(data.columns, {})
    good = np.arange(1, 61, dtype=np.uint64)
    _core.Loader([(reader, part, good)], plan, batch_size=4, framework="numpy")
    for sums in (good[:-1], good.astype(np.int64), good[::-1], "w"):
        with pytest.raises(TypeError, match="uint64 array, one for each row"):
            _core.Loader([(reader, part, sums)], plan, batch_size=4, framework="numpy")
    with pytest.raises(ValueError, match="all weights are 0"):
        _core.Loader([(reader, part, good * np.uint64(0))], plan, batch_size=4, framework="numpy")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": "z"}, "no column 'z'"),
        ({"weights": "x"}, "column 'x' cannot give the weights: it must have one number"),
        ({"balance": "w"}, "column 'w' cannot give the classes: it must have one integer"),
        ({"weights": "w", "balance": "y"}, "choose one"),
        ({"weights": [1.0, 2.0]}, "weights must be the name of a column, not .*: write the values"),
        ({"weights": "zero"}, "column 'zero': all weights are 0, so no row can be drawn$"),
        ({"weights": "broken"}, "column 'broken', shard ., row .*: nan is not a weight"),
    ],
)
def test_invalid_sampling_arguments_are_refused(
    data: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        data.with_sampling(**arguments)


def test_sums_are_whole_numbers() -> None:
    sampling = Sampling("weights", "w")
    sums = sampling.sum_weights(np.array([0.0, 1e308, 0.0, 1e308]), 0)
    assert sums is not None and not sums.flags.writeable
    assert sums.tolist() == [0, 2**52, 2**52, 2**53]
    with pytest.raises(InputError, match=r"-1\.0 is not a weight"):
        sampling.sum_weights(np.array([1, -1], np.int8), 0)
    assert sampling.sum_weights(np.empty(0), 0) is None


def test_all_loaders_of_a_view_share_the_sums(data: Any) -> None:
    view = data.with_sampling("w")
    for across in (True, False):
        first, again = view.view.weight_sums(across=across), view.view.weight_sums(across=across)
        assert all(
            np.shares_memory(a, b) and one == two
            for (a, one), (b, two) in zip(first, again, strict=True)
        )
        assert [len(sums) for sums, _ in first] == data.view.shard_rows
    assert data.view.weight_sums(across=True) is None


def test_a_zero_weight_shard_is_refused_only_when_drawn_alone(data: Any) -> None:
    one = data.with_sampling("one")  # only row 0 has a weight
    assert drawn(one) == [0] * ROWS
    assert drawn(one, shuffle=False) == drawn(data, shuffle=False)
    stored = np.concatenate([data.shard(shard)["w"] for shard in range(SHARDS)])
    some = data.with_sampling("w").select((stored == 0) | (np.arange(ROWS) >= 60))
    assert set(drawn(some)) <= {row for row in range(ROWS) if row % 4}
    for shard in range(SHARDS):
        if 0 in data.shard(shard)["row"]:
            assert drawn(one, shard=shard) == [0] * 60
        else:
            with pytest.raises(InputError, match=f"all weights in shard {shard} are 0"):
                drawn(one, shard=shard)
    cure = 'all weights in shard . are 0, .*: use shuffle="rows", or leave out .* with select'
    for view in (one, some):
        with pytest.raises(InputError, match=cure):
            drawn(view, shuffle="shards")
        with pytest.raises(InputError, match=cure):
            cerebro.search(
                lambda config: None, {}, view, epochs=1, n_trials=1, batch_size=8, workers=0,
                shuffle="shards",
            )  # fmt: skip
    # A view without any weight is found when batches are made.
    with pytest.raises(InputError, match=r"all weights are 0, so no row can be drawn$"):
        drawn(data.with_sampling("w").select(stored == 0))
    empty = data.with_sampling("w").select(np.flatnonzero(stored)[:20])
    assert len(drawn(empty, shuffle="shards")) == 20  # shards without rows are no matter


def test_invalid_weights_in_a_spec_are_refused(data: Any) -> None:
    spec = {**data.spec(), "sampling": {"weights": "broken"}}
    try:
        view = cerebro.data.Dataset.from_spec(spec)
    except InputError:
        return
    for shuffle in ("rows", "shards"):
        with pytest.raises(InputError, match=r"'broken', .*row .*: nan is not a weight"):
            drawn(view, shuffle=shuffle)

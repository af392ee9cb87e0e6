"""Numbers that do not fit are refused, and never cut off to the bits that do."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import cerebro._core as _core


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_outside_64_bits(seed: int) -> None:
    functions: list[Callable[[], object]] = [
        lambda: _core.trial_seed(seed, 0),
        lambda: _core.permutation(3, seed, "rows"),
        lambda: _core.random_doubles(1, seed, "space"),
        lambda: _core.Loader([], [], batch_size=1, seed=seed),
    ]
    for function in functions:
        with pytest.raises(ValueError, match=f"seed must be .* to {2**64 - 1}, not {seed}"):
            function()


def empty_loader() -> _core.Loader:
    """A loader of one shard without rows."""
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "x.npy", np.zeros(0, np.int64))
        files = {"x.npy": (Path(folder) / "x.npy").stat().st_size}
        shard = _core.ShardReader(folder, 0, [("x", "int64", (), False, files)])
        return _core.Loader(
            [(shard, (0, 0))], [{"name": "x", "ops": []}], batch_size=1, framework="numpy"
        )


def test_the_ends_of_the_range() -> None:
    assert _core.trial_seed(2**64 - 1, 2**32 - 1) != _core.trial_seed(2**64 - 1, 0)
    assert _core.trial_seed(np.int64(7), np.uint32(3)) == _core.trial_seed(7, 3)
    assert len(_core.random_doubles(2, 2**64 - 1, "eval", 2**64 - 1, 2**64 - 1)) == 2
    assert _core.visit_order(2**32 - 1, 2**32 - 1, 3) == [0, 1, 2]
    assert _core.permutation(0, 0, "rows").tolist() == []
    assert _core.random_doubles(0, 0, "space") == []
    empty_loader().begin([[0]], 2**64 - 1, 0, 2**64 - 1)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("trial", lambda: _core.trial_seed(0, -1)),
        ("trial", lambda: _core.trial_seed(0, 2**32)),
        ("trial", lambda: _core.visit_order(-1, 0, 1)),
        ("epoch", lambda: _core.visit_order(0, 2**70, 1)),
        ("shards", lambda: _core.visit_order(0, 0, 0)),
        ("n", lambda: _core.permutation(2**32, 0, "rows")),
        ("n", lambda: _core.random_doubles(-1, 0, "space")),
        ("a", lambda: _core.permutation(3, 0, "rows", a=-1)),
        ("b", lambda: _core.random_doubles(1, 0, "eval", b=2**64)),
        ("epoch", lambda: empty_loader().begin([], -1)),
        ("epoch", lambda: empty_loader().begin([], 2**64)),
        ("count", lambda: empty_loader().begin([], 0, 0, -1)),
        ("count", lambda: empty_loader().begin([], 0, 0, 2**64)),
        ("interval_ms", lambda: _core.BeatPage().start_beating(2**32 + 1)),
    ],
)
def test_other_numbers_out_of_range_are_refused(name: str, function: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        function()


def test_numbers_of_more_digits_than_python_prints() -> None:
    with pytest.raises(ValueError, match=r"^trial must be .*, not an int of too many digits"):
        _core.trial_seed(0, 10**5000)
    with pytest.raises(ValueError, match=r"^an int of too many digits .* is not a number from 0"):
        _core.Schedule(shards=-(10**5000))


def test_an_error_in_a_users_index_method_is_raised() -> None:
    class Unlimited:
        def __index__(self) -> int:
            raise OverflowError("no such number")

    with pytest.raises(OverflowError, match="no such number"):
        _core.trial_seed(0, Unlimited())  # type: ignore[arg-type]
    with pytest.raises(OverflowError, match="no such number"):
        _core.Schedule(shards=2, live_models=Unlimited())  # type: ignore[arg-type]


def test_non_integers_are_refused() -> None:
    with pytest.raises(TypeError, match="seed must be a whole number, not float"):
        _core.trial_seed(1.5, 0)  # type: ignore[arg-type]


def test_attempts_and_positions_of_slots(tmp_path: Path) -> None:
    slots = _core.Slots(str(tmp_path / "trial"), True)
    packed = _core.pack_state({})
    for attempt in (-1, 2**32):
        with pytest.raises(ValueError, match=r"^attempt must be"):
            slots.pack({}, attempt=attempt)
        with pytest.raises(ValueError, match=r"^attempt must be"):
            slots.put(packed, attempt=attempt)
    with pytest.raises(ValueError, match=r"^attempt must be"):
        slots.fence(2**32)
    slots.put(packed, attempt=2**32 - 1)
    for position in (-1, 2**64):
        with pytest.raises(ValueError, match=r"^position must be"):
            slots.commit(position)
    assert slots.committed() is None
    slots.commit(2**64 - 1)
    assert slots.committed() == (2**64 - 1, 2**32 - 1, len(packed))
    with pytest.raises(ValueError, match=r"^position must be"):
        slots.view(-1)

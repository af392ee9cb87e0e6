"""Slots: commits, fences, views and what a killed process leaves."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cerebro._core as _core
from cerebro.errors import CorruptDataError, StateError


def state(value: float, n: int = 1000) -> dict[str, object]:
    return {
        "w": np.full(n, value, np.float32),
        "step": int(value),
        "m": [np.full((3, n), -value, np.float32)],
    }


def check(buffer: object, value: float) -> None:
    back = _core.unpack_state(buffer)
    assert back["step"] == value
    assert bool((back["w"] == value).all())
    assert bool((back["m"][0] == -value).all())


def commit(slots: _core.Slots, tree: object, *, attempt: int, position: int) -> int:
    """Pack a state and make it the newest."""
    nbytes = slots.pack(tree, attempt=attempt)
    slots.commit(position)
    return nbytes


@pytest.fixture
def stem(tmp_path: Path) -> Path:
    return tmp_path / "0001"


def test_commits_alternate_between_two_slots(stem: Path) -> None:
    slots = _core.Slots(stem, True)
    assert slots.committed() is None
    with pytest.raises(StateError, match="no committed state"):
        slots.view()
    for position in range(1, 6):
        nbytes = commit(slots, state(position), attempt=2, position=position)
        assert slots.committed() == (position, 2, nbytes)
        check(slots.view(), position)
        if position > 1:
            check(slots.view(position - 1), position - 1)
    with pytest.raises(StateError, match="no committed state of that position"):
        slots.view(3)
    assert sorted(path.name for path in stem.parent.iterdir()) == ["0001.a", "0001.b", "0001.slots"]


def test_both_files_are_safetensors_of_their_exact_length(stem: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    slots = _core.Slots(stem, True)
    for position in (1, 2):
        nbytes = commit(slots, state(position), attempt=0, position=position)
        path = stem.with_suffix(".a" if position == 1 else ".b")
        assert path.stat().st_size == nbytes
        with safetensors.safe_open(path, "np") as file:
            np.testing.assert_array_equal(file.get_tensor("/w"), np.full(1000, float(position)))


def test_a_view_outlives_shorter_states(stem: Path) -> None:
    slots = _core.Slots(stem, True)
    views, lengths = [], []
    for position, rows in enumerate([9000, 9000, 5000, 5000, 5, 5, 5, 5]):  # a, b, a, b, ...
        lengths.append(commit(slots, {"w": np.ones(rows)}, attempt=0, position=position))
        views.append(slots.view())
    assert [len(bytes(view)) for view in views] == lengths  # no SIGBUS
    views.clear()
    for end in (".a", ".b"):
        commit(slots, {"w": np.ones(5)}, attempt=0, position=9)
        assert stem.with_suffix(end).stat().st_size == lengths[-1]


def test_states_that_grow_and_shrink(stem: Path) -> None:
    slots = _core.Slots(str(stem), True)
    other = _core.Slots(str(stem), False)
    sizes = [10, 100_000, 5, 5, 300_000, 1, 1, 50_000, 50_000]
    for position, n in enumerate(sizes, start=1):
        packer = (slots, other)[position % 2]
        nbytes = commit(packer, state(position, n), attempt=0, position=position)
        for reader in (slots, other):
            assert reader.committed() == (position, 0, nbytes)
            check(reader.view(), position)
            assert len(reader.view()) == reader.view().nbytes == nbytes
            if position > 1:
                check(reader.view(position - 1), position - 1)


def test_a_view_outlives_growth_and_close(stem: Path) -> None:
    slots = _core.Slots(stem, True)
    commit(slots, state(1), attempt=0, position=1)
    view = memoryview(slots.view())
    commit(slots, state(2), attempt=0, position=2)
    commit(slots, state(3, 100_000), attempt=0, position=3)
    assert view.readonly
    slots.close()
    slots.close()
    assert len(bytes(view)) == view.nbytes
    with pytest.raises(ValueError, match="closed"):
        slots.committed()


def test_committed_states_are_sealed(stem: Path) -> None:
    """Whoever goes on with the trial believes it, though its process died at that moment."""
    slots = _core.Slots(stem, True)
    assert slots.sealed() is None
    for position in (1, 2, 3):
        slots.pack(state(position), attempt=5)
        found = slots.sealed()
        assert (found and found[0]) == (position - 1 or None)
        assert slots.commit(position) == slots.hash()
        found = slots.sealed()
        assert found is not None and found[:2] == (position, 5)
        check(found[2], position)
    slots.pack(state(4), attempt=6)
    assert slots.attempt() == 5
    slots.fence(8)
    assert slots.attempt() == 8
    with pytest.raises(StateError, match="attempt 8"):
        slots.commit(4)
    found = slots.sealed()
    assert found is not None and found[0] == 3


def test_a_torn_slot_is_not_taken(stem: Path) -> None:
    slots = _core.Slots(stem, True)
    for position in (1, 2):
        commit(slots, state(position), attempt=0, position=position)
    slots.close()
    file = stem.with_suffix(".b")
    whole = file.read_bytes()
    file.write_bytes(whole[:4096] + bytes(len(whole) - 4096))  # pages that never got there
    found = _core.Slots(stem, False).sealed()
    assert found is not None and found[0] == 1
    check(found[2], 1)


def test_hash_and_save(stem: Path, tmp_path: Path) -> None:
    slots = _core.Slots(stem, True)
    commit(slots, state(1), attempt=0, position=1)
    packed = _core.pack_state(state(1))
    assert bytes(slots.view()) == bytes(packed)
    assert slots.hash() == _core.hash_state(packed)
    path = tmp_path / "saved.safetensors"
    path.write_bytes(b"x" * 1_000_000)
    slots.save(path)
    assert path.read_bytes() == bytes(packed)
    with pytest.raises(FileNotFoundError):
        slots.save(tmp_path / "no" / "where")


def test_put_takes_packed_states_only(stem: Path) -> None:
    slots = _core.Slots(stem, True)
    packed = _core.pack_state(state(7))
    assert slots.put(packed, attempt=1) == packed.nbytes
    assert slots.committed() is None
    assert slots.commit(4) == _core.hash_state(packed)
    assert slots.committed() == (4, 1, packed.nbytes)
    check(slots.view(), 7)
    with pytest.raises(CorruptDataError):
        slots.put(bytes(packed)[:-1], attempt=1)
    with pytest.raises(StateError, match="nothing was packed"):
        slots.commit(5)
    assert slots.committed() == (4, 1, packed.nbytes)


def test_a_fence_refuses_lower_attempts(stem: Path) -> None:
    coordinator, late = _core.Slots(stem, True), _core.Slots(stem, False)
    commit(late, state(1), attempt=0, position=1)
    coordinator.fence(2)
    coordinator.fence(1)
    with pytest.raises(StateError, match=r"attempt 1 may not pack into .*: attempt 2 has begun"):
        commit(late, state(2), attempt=1, position=2)
    check(late.view(), 1)
    commit(late, state(3), attempt=2, position=3)
    check(coordinator.view(), 3)


@pytest.mark.parametrize(("late", "newest"), [(10, 4000), (4000, 10), (1000, 1000)])
def test_a_commit_that_is_refused_changes_nothing(stem: Path, late: int, newest: int) -> None:
    old, new = _core.Slots(stem, True), _core.Slots(stem, True)
    commit(new, state(1), attempt=1, position=1)
    old.pack(state(7, late), attempt=1)  # it is silent from here
    new.fence(2)
    nbytes = commit(new, state(2, newest), attempt=2, position=2)
    page = stem.with_suffix(".slots").read_bytes()
    with pytest.raises(StateError, match="attempt 2 has begun"):
        old.commit(2)
    assert stem.with_suffix(".slots").read_bytes() == page
    assert stem.with_suffix(".b").stat().st_size == nbytes
    for reader in (old, new, _core.Slots(stem, False)):
        assert reader.committed() == (2, 2, nbytes)
        check(reader.view(), 2)
        check(reader.view(1), 1)
        assert reader.sealed()[:2] == (2, 2)


VIEWER = """
import sys
from cerebro import _core

view = memoryview(_core.Slots(sys.argv[1], False).view())
print(len(view), flush=True)
sys.stdin.readline()
print(bytes(view).hex()[-16:], len(bytes(view)), flush=True)
"""


def test_a_view_in_another_process_outlives_shorter_states(stem: Path) -> None:
    slots = _core.Slots(stem, True)
    nbytes = commit(slots, {"w": np.ones(9000)}, attempt=0, position=1)
    end = bytes(slots.view()).hex()[-16:]
    viewer = subprocess.Popen(
        [sys.executable, "-c", VIEWER, str(stem)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert viewer.stdout is not None
    assert int(viewer.stdout.readline()) == nbytes
    for position in (2, 3):
        commit(slots, {"w": np.zeros(5)}, attempt=0, position=position)
    out, _ = viewer.communicate("\n", timeout=60)
    assert viewer.returncode == 0  # no SIGBUS
    assert out.split() == [end, str(nbytes)]


def test_a_fence_raised_while_a_state_is_walked(stem: Path) -> None:
    slots = _core.Slots(stem, True)
    commit(slots, state(1), attempt=0, position=1)

    class Fences:
        """Its memory is asked for while the state is walked."""

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self) -> object:
            slots.fence(9)
            return np.ones(3).__dlpack__()

    with pytest.raises(StateError, match="attempt 9"):
        commit(slots, {"x": Fences()}, attempt=8, position=2)
    check(slots.view(), 1)


def test_an_unreported_commit_is_reverted(stem: Path) -> None:
    slots = _core.Slots(stem, True)
    for position in (1, 2):
        commit(slots, {"at": position}, attempt=position, position=position)
    slots.fence(3)
    slots.revert(attempt=3, position=1)
    assert slots.committed() == (1, 1, len(memoryview(slots.view())))
    assert _core.unpack_state(slots.view(), "numpy") == {"at": 1}
    slots.revert(attempt=3, position=1)
    with pytest.raises(StateError, match="attempt 2 may not"):
        slots.revert(attempt=2, position=2)
    with pytest.raises(StateError, match="no committed state of position 7"):
        slots.revert(attempt=3, position=7)
    with pytest.raises(ValueError, match="attempt"):
        slots.revert(attempt=-1, position=1)
    slots.close()
    with pytest.raises(ValueError, match="closed"):
        slots.revert(attempt=3, position=1)


def test_a_failed_pack_changes_nothing(stem: Path) -> None:
    slots = _core.Slots(stem, True)
    commit(slots, state(1), attempt=0, position=1)
    with pytest.raises(StateError, match="'/x'"):
        commit(slots, {"x": {1, 2}}, attempt=0, position=2)
    check(slots.view(), 1)


def test_a_missing_or_invalid_page_is_refused(stem: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"0001\.slots"):
        _core.Slots(stem, False)
    page = stem.with_suffix(".slots")
    for content in (b"", b"short", bytes(4096), b"x" * 4096):
        page.write_bytes(content)
        with pytest.raises(CorruptDataError, match=r"0001\.slots is not a commit page"):
            _core.Slots(stem, False)
    with pytest.raises(CorruptDataError, match="not a commit page"):
        _core.Slots(stem, True)
    page.write_bytes(bytes(4096))
    _core.Slots(stem, True)
    _core.Slots(stem, False)


def test_a_slot_that_was_cut_off(stem: Path) -> None:
    slots = _core.Slots(stem, True)
    commit(slots, state(1), attempt=0, position=1)
    os.truncate(stem.with_suffix(".a"), 100)
    for reader in (slots, _core.Slots(stem, False)):
        with pytest.raises(CorruptDataError, match=r"0001\.a is corrupt: it has been truncated"):
            reader.view()
        with pytest.raises(CorruptDataError):
            reader.hash()
    stem.with_suffix(".a").unlink()
    with pytest.raises(FileNotFoundError, match=r"0001\.a"):
        _core.Slots(stem, False).view()


def test_a_cut_page_is_refused(stem: Path) -> None:
    """Nor is it filled up: what it lacks may have been the newest record. (In C at every byte.)"""
    slots = _core.Slots(stem, True)
    for position in (1, 2):
        commit(slots, state(position, 10), attempt=0, position=position)
    page = stem.with_suffix(".slots")
    content = page.read_bytes()
    for size in (*range(0, 256, 11), *range(256, len(content), 480), len(content) - 1):
        page.write_bytes(content[:size])
        for create in (False, True) if size else (False,):
            with pytest.raises(CorruptDataError, match=r"0001\.slots is not a commit page"):
                _core.Slots(stem, create)
    page.write_bytes(content)
    check(_core.Slots(stem, False).view(), 2)


def test_a_state_cut_anywhere_is_refused(stem: Path) -> None:
    slots = _core.Slots(stem, True)
    commit(slots, state(1, 10), attempt=0, position=1)
    content = stem.with_suffix(".a").read_bytes()
    for size in range(len(content)):
        stem.with_suffix(".a").write_bytes(content[:size])
        with pytest.raises(CorruptDataError, match=r"0001\.a is corrupt: it has been truncated"):
            _core.Slots(stem, False).view()


def test_any_bit_of_a_page_flipped_gives_a_whole_state_or_none(stem: Path) -> None:
    slots = _core.Slots(stem, True)
    for position in (1, 2):
        commit(slots, state(position, 10), attempt=3, position=position)
    page = stem.with_suffix(".slots")
    content = page.read_bytes()
    for bit in range(0, 8 * 256, 3):  # what follows is unused
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << (bit % 8)
        page.write_bytes(flipped)
        try:
            reader = _core.Slots(stem, False)
        except CorruptDataError as error:
            assert "0001.slots" in str(error)
            continue
        committed = reader.committed()
        if committed is not None:
            assert committed[:2] in ((1, 3), (2, 3))
            check(reader.view(), committed[0])


@pytest.mark.parametrize("suffix", [".slots", ".b"])
def test_links_are_not_followed(stem: Path, suffix: str) -> None:
    slots = _core.Slots(stem, True)
    commit(slots, state(1), attempt=0, position=1)
    victim = stem.parent / "victim"
    victim.write_bytes(bytes(4096))
    file = stem.with_suffix(suffix)
    file.unlink(missing_ok=True)
    file.symlink_to(victim)
    with pytest.raises(CorruptDataError, match=rf"0001\{suffix} is a symbolic link"):
        commit(_core.Slots(stem, True), state(2), attempt=0, position=2)
    assert victim.read_bytes() == bytes(4096)


def test_a_state_is_not_saved_through_a_link(stem: Path) -> None:
    slots = _core.Slots(stem, True)
    commit(slots, state(1), attempt=0, position=1)
    (stem.parent / "victim").write_bytes(b"mine")
    (stem.parent / "link").symlink_to("victim")
    with pytest.raises(CorruptDataError, match="link is a symbolic link"):
        slots.save(stem.parent / "link")
    assert (stem.parent / "victim").read_bytes() == b"mine"


def test_a_damaged_record_falls_back_to_the_other_slot(stem: Path) -> None:
    slots = _core.Slots(stem, True)
    for position in (1, 2, 3):
        commit(slots, state(position), attempt=0, position=position)
    page = bytearray(stem.with_suffix(".slots").read_bytes())
    for at in (128, 136, 144, 152):  # the record of slot a, which is the newest
        damaged = bytearray(page)
        damaged[at] ^= 1
        stem.with_suffix(".slots").write_bytes(damaged)
        reader = _core.Slots(stem, False)
        assert reader.committed()[0] == 2
        check(reader.view(), 2)


def test_wrong_arguments(stem: Path) -> None:
    slots = _core.Slots(stem, True)
    with pytest.raises(TypeError):
        slots.pack(state(1), 0, 1)
    with pytest.raises(TypeError):
        slots.view("x")
    with pytest.raises(TypeError):
        _core.Slots(3, True)


PACKER = """
import os, sys
import numpy as np
from cerebro import _core

slots = _core.Slots(sys.argv[1], False)
position = int(sys.argv[2])
parent = os.getppid()
print("ready", flush=True)
while os.getppid() == parent:
    position += 1
    n = 20000 + 777 * (position % 3)
    w = np.full(n, position)
    slots.pack({"w": w, "p": position, "v": [w, -w]}, attempt=0)
    slots.commit(position)
"""


def test_a_killed_process_leaves_a_whole_state(stem: Path) -> None:
    slots = _core.Slots(stem, True)
    rng = random.Random(5)
    last = 0
    for _ in range(12):
        child = subprocess.Popen(
            [sys.executable, "-c", PACKER, str(stem), str(last)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        child.stdout.readline()
        # Wait for commits, then for a random number of turns of this loop.
        while (slots.committed() or (0, 0, 0))[0] < last + 3:
            assert child.poll() is None
        for _ in range(rng.randrange(3000)):
            slots.committed()
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        position, attempt, nbytes = slots.committed()
        assert position >= last + 3
        assert attempt == 0
        sealed = slots.sealed()
        assert sealed is not None and sealed[0] == position
        for reader in (slots, _core.Slots(stem, False)):
            view = reader.view()
            assert view.nbytes == nbytes
            back = _core.unpack_state(view)
            assert back["p"] == position
            n = 20000 + 777 * (position % 3)
            assert np.array_equal(back["w"], np.full(n, position))
            assert np.array_equal(back["v"][1], np.full(n, -position))
        last = position

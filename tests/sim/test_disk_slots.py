"""Slots on the simulated disk: the real C code, stopped at any call and left without power."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import pytest
from disk import MountedDisk, SimulatedDisk
from faults import ProcessDied
from scripted import ScriptedProcess, make_disk

import cerebro._core as _core
from cerebro.errors import CorruptDataError, StateError

STEM = "/run/7"


def state(number: int) -> bytes:
    """Return a packed state; their lengths differ, up to three pages."""
    return bytes(
        _core.pack_state({"number": number, "text": f"{number} " * (number * 7 % 5 * 900)})
    )


def pack_in_turn(
    disks: list[MountedDisk], committed: dict[int, bytes], units: int = 8, offset: int = 0
) -> None:
    """Train a trial: two processes pack in turn, and keep their slots open."""
    opened: dict[int, object] = {}
    for unit in range(offset, offset + units):
        turn = unit // 2 % 2
        slots = opened.get(turn) or disks[turn].open_slots(STEM, create=True)
        opened[turn] = slots
        slots.fence(unit + 1)
        assert slots.put(state(unit), attempt=unit + 1) == len(state(unit))
        slots.commit(unit)
        committed[unit] = state(unit)
        assert slots.committed() == (unit, unit + 1, len(state(unit)))
        assert bytes(slots.view()) == state(unit)


def read_sealed(disk: SimulatedDisk) -> tuple[int, bytes] | None:
    slots = disk.mount(ScriptedProcess()).open_slots(STEM, create=False)
    with contextlib.closing(slots):
        sealed = slots.sealed()
    return None if sealed is None else (sealed[0], bytes(sealed[2]))


def count_calls(real: Path) -> int:
    disk = make_disk(0, real)
    process = ScriptedProcess()
    pack_in_turn([disk.mount(process)] * 2, {})
    disk.close()
    return len(process.calls)


def run_until(
    real: Path, at: int, seed: int, fault: BaseException
) -> tuple[SimulatedDisk, dict[int, bytes]]:
    """Train until call `at` fails; return the disk and the states committed before."""
    disk = make_disk(seed, real)
    process, committed = ScriptedProcess(at, fault), {}
    with pytest.raises(type(fault)):
        pack_in_turn([disk.mount(process), disk.mount(process)], committed)
    return disk, committed


@pytest.mark.parametrize("fault", [ProcessDied(), OSError(errno.ENOSPC, "no space")])
def test_the_last_commit_survives_a_death_or_an_error_at_any_call(
    real: Path, fault: BaseException
) -> None:
    for at in range(1, count_calls(real)):
        for seed in range(6):
            disk, committed = run_until(real, at, seed, fault)
            newest = max(committed.items(), default=None)
            assert read_sealed(disk) == newest, (at, seed)
            later = {}
            pack_in_turn([disk.mount(ScriptedProcess())] * 2, later, units=3, offset=20)
            assert read_sealed(disk) == (22, state(22))
            disk.close()


def test_a_dying_process_leaves_packs_that_are_begun_and_partly_written(real: Path) -> None:
    lengths = set()
    for seed in range(60):
        disk = make_disk(seed, real)
        process = ScriptedProcess()
        slots = disk.mount(process).open_slots(STEM, create=True)
        process.fail_next(ProcessDied())
        with pytest.raises(ProcessDied):
            slots.put(state(3), attempt=1)
        if disk.names("/run") == ["7.slots"]:
            lengths.add(None)
        else:
            content = disk.content(STEM + ".a")
            written = len(content.rstrip(b"\0"))
            assert state(3).startswith(content[:written])
            assert len(content) == len(state(3))
            lengths.add(written)
        disk.close()
    assert None in lengths
    assert len(lengths) > 20


def test_after_a_power_failure_at_any_call_a_sealed_state_is_a_committed_one(real: Path) -> None:
    kept = set()
    for at in range(1, count_calls(real)):
        for seed in range(25):
            disk, committed = run_until(real, at, seed, ProcessDied())
            disk.lose_power()
            try:
                sealed = read_sealed(disk)
            except (CorruptDataError, FileNotFoundError) as error:
                kept.add(type(error))
            else:
                assert sealed is None or committed[sealed[0]] == sealed[1], (at, seed)
                kept.add(None if sealed is None else max(committed) - sealed[0])
            disk.mount(ScriptedProcess()).check_slots(STEM)
            disk.close()
    # Also much older states may be left: one whose page of slots was written to the disk long ago.
    assert kept >= {CorruptDataError, FileNotFoundError, None, 0, 1, 2}


def test_names_of_slots_are_durable_once_their_folder_is_synced(real: Path) -> None:
    for seed in range(100):
        disk = make_disk(seed, real)
        mounted = disk.mount(ScriptedProcess())
        pack_in_turn([mounted] * 2, {}, units=2)
        mounted.sync_folder("/run")
        disk.lose_power()
        assert sorted(disk.names("/run")) == ["7.a", "7.b", "7.slots"]
        disk.close()


# --- two processes --------------------------------------------------------------


def test_a_late_process_cannot_commit_and_views_stay_as_they_are(disk: SimulatedDisk) -> None:
    late, other = disk.mount(ScriptedProcess()), disk.mount(ScriptedProcess())
    first = late.open_slots(STEM, create=True)
    first.put(state(1), attempt=1)
    first.commit(1)
    view = first.view()
    first.put(state(2), attempt=1)
    second = other.open_slots(STEM, create=False)
    second.fence(2)
    with pytest.raises(StateError, match=r"attempt 1 may not pack into /run/7.slots: attempt 2"):
        first.commit(2)
    second.put(state(3), attempt=2)  # of another file: the late process may still write to the old
    second.commit(3)
    second.revert(attempt=2, position=1)
    assert first.committed() == (1, 1, len(state(1)))
    assert bytes(view) == state(1)
    assert second.attempt() == 2
    assert second.hash() == _core.hash_state(state(1))
    assert sorted(disk.names("/run")) == ["7.a", "7.b", "7.slots"]
    assert disk.content(STEM + ".b") == state(3)


def test_slots_can_be_moved_saved_checked_and_removed(disk: SimulatedDisk) -> None:
    mounted = disk.mount(ScriptedProcess())
    pack_in_turn([mounted] * 2, {}, units=2)
    with contextlib.closing(mounted.open_slots("/run/7.moving", create=True)) as moving:
        moving.put(state(4), attempt=9)
        moving.commit(4)
    for suffix in (".a", ".slots"):
        mounted.rename(f"/run/7.moving{suffix}", STEM + suffix)
    mounted.remove(STEM + ".b")
    assert sorted(disk.names("/run")) == ["7.a", "7.slots"]
    assert read_sealed(disk) == (4, state(4))
    assert mounted.check_slots(STEM) is None
    slots = mounted.open_slots(STEM, create=False)
    slots.save("/run/kept")
    slots.save("/run/kept")
    slots.close()
    assert mounted.read("/run/kept") == mounted.read(STEM + ".a") == state(4)
    mounted.remove(STEM + ".a")
    suffix, what, _ = mounted.check_slots(STEM)
    assert (suffix, what) == (
        ".a",
        "it cannot be read (cannot open /run/7.a: No such file or directory)",
    )
    mounted.remove(STEM + ".slots")
    with pytest.raises(FileNotFoundError, match=r"cannot open /run/7\.slots"):
        mounted.open_slots(STEM, create=False)
    assert mounted.check_slots(STEM) is None
    assert disk.names("/run") == ["kept"]


def test_a_folder_of_slots_can_be_removed_and_made_again(disk: SimulatedDisk) -> None:
    mounted = disk.mount(ScriptedProcess())
    mounted.remove_folder("/run")
    with pytest.raises(FileNotFoundError):
        mounted.open_slots(STEM, create=True)
    mounted.make_folder("/run")
    pack_in_turn([mounted] * 2, {}, units=2)
    assert read_sealed(disk) == (1, state(1))


def test_a_failed_pack_cannot_be_committed(real: Path) -> None:
    for seed in range(20):
        disk = make_disk(seed, real)
        process = ScriptedProcess()
        slots = disk.mount(process).open_slots(STEM, create=True)
        process.fail_next(OSError(errno.ENOSPC, "no space"))
        with pytest.raises(OSError, match="no space"):
            slots.put(state(1), attempt=1)
        with pytest.raises(StateError, match="nothing was packed"):
            slots.commit(1)
        slots.put(state(1), attempt=1)
        slots.commit(1)
        assert read_sealed(disk) == (1, state(1))
        disk.close()


def test_a_dead_process_holds_no_real_file_once_another_begins(disk: SimulatedDisk) -> None:
    process = ScriptedProcess()
    slots = disk.mount(process).open_slots(STEM, create=True)
    process.is_dead = True
    disk.mount(ScriptedProcess())
    with pytest.raises(ValueError, match="closed"):
        slots._slots.committed()
    with pytest.raises(ProcessDied):
        slots.committed()
    slots.close()

"""Damaged slots are found, whatever the commit page says: places, packs under way, versions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cerebro._core as _core
from cerebro.errors import CorruptDataError
from cerebro.machine.local import LOCAL
from cerebro.run.states import slot_damage


def packed(stem: Path, value: int, *, commit: bool = True) -> None:
    slots = _core.Slots(stem, True)
    slots.pack({"w": np.full(100, value)}, attempt=value)
    if commit:
        slots.commit(value)
    slots.close()


def damage_of(stem: Path) -> tuple[Path, str] | None:
    return slot_damage(stem.parent, int(stem.name), LOCAL.disk)


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("given_up", [0, 1, 2, 5])
def test_slot_records_are_found_after_abandoned_packs(tmp_path: Path, given_up: int) -> None:
    stem = tmp_path / "3"
    packed(stem, 1)
    for value in range(2, 2 + given_up):  # packs that nobody ended
        packed(stem, value, commit=False)
        assert damage_of(stem) is None
    packed(stem, 10)
    assert damage_of(stem) is None
    place = 128 * given_up
    flip(stem.with_suffix(".slots"), 128 + 64 + place)
    assert damage_of(stem)[1] == "its record of the newest state is damaged"
    flip(stem.with_suffix(".slots"), 128 + 64 + place)
    flip(stem.with_suffix(".b"), -1)
    assert "checksum differs" in damage_of(stem)[1]


def test_a_slot_that_is_being_packed_is_no_damage(tmp_path: Path) -> None:
    stem = tmp_path / "3"
    for value in (1, 2):
        packed(stem, value)
    head = stem.with_suffix(".slots").read_bytes()[64:72]
    packed(stem, 3, commit=False)
    flip(stem.with_suffix(".a"), -1)
    assert damage_of(stem) is None
    content = bytearray(stem.with_suffix(".slots").read_bytes())
    content[64:72] = head
    stem.with_suffix(".slots").write_bytes(content)
    assert damage_of(stem) is None  # its record was made invalid as well


@pytest.mark.parametrize(
    ("version", "of", "fix"),
    [(1, "an earlier", "repeat the search in a new folder"), (3, "a newer", "update Cerebro")],
)
def test_pages_of_other_versions_are_refused(
    tmp_path: Path, version: int, of: str, fix: str
) -> None:
    stem = tmp_path / "3"
    packed(stem, 1)
    page = stem.with_suffix(".slots")
    content = bytearray(page.read_bytes())
    content[8] = version
    page.write_bytes(content)
    told = f"has slot version {version}, of {of} Cerebro, and this one reads only version 2: {fix}"
    assert damage_of(stem) == (page, f"it {told}")
    for create in (False, True):
        with pytest.raises(CorruptDataError) as caught:
            _core.Slots(stem, create)
        assert str(caught.value) == f"{page} {told}"
    assert page.read_bytes() == content

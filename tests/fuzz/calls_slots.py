"""Random calls of two holders of a trial's slots, damage to their files, and processes killed.

State i is filled with one byte that follows from i, so a mixture of two states is seen.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import cerebro._core as _core
from cerebro.errors import CorruptDataError, StateError

REFUSED = (CorruptDataError, StateError, OSError, ValueError)
"""What calls may raise: on damaged files, or out of turn."""

FILES = ("7.a", "7.b", "7.slots")


def state(number: int, size: int) -> dict[str, Any]:
    return {"number": number, "x": np.full(size, number % 251, np.uint8)}


def number_of(packed: Any) -> int:
    """Return the number of a packed state, which must be whole."""
    found: Any = _core.unpack_state(packed)
    number = int(found["number"])
    assert (found["x"] == number % 251).all(), f"a mixture of states, at {number}"
    return number


# --- calls and damage ----------------------------------------------------------------


class Holders:
    """Up to two processes' `Slots` of a trial, as far as the files can tell."""

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self.rng = rng
        self.folder = folder
        self.held: list[_core.Slots] = []
        self.number = 0  # of the last state
        self.old: dict[Path, bytes] = {}  # copies of files
        self.views: list[tuple[Any, int]] = []  # with their numbers
        self.damaged = False

    def step(self) -> None:
        (call,) = self.rng.choices(list(CALLS), list(CALLS.values()))
        with contextlib.suppress(*REFUSED):
            call(self)

    def slots(self) -> _core.Slots:
        if not self.held:
            raise StateError("nobody holds the slots")
        return self.rng.choice(self.held)

    def open(self) -> None:
        if len(self.held) < 2:
            self.held.append(_core.Slots(self.folder / "7", self.rng.random() < 0.8))

    def close(self) -> None:
        slots = self.slots()
        self.held.remove(slots)
        slots.close()

    def close_all(self) -> None:
        while self.held:
            self.held.pop().close()
        self.views.clear()

    def damage(self) -> None:
        """Damage a file that nobody has mapped; cutting one that is mapped ends the process."""
        self.close_all()
        file = self.folder / self.rng.choice(FILES)
        if file.exists():
            self.damaged = True
            self.rng.choice(DAMAGES)(self, file)

    def check(self) -> None:
        _core.check_slots(self.folder / "7")

    def pack(self) -> None:
        self.number += 1
        made = state(self.number, self.rng.choice([0, 1, 100, 4000, 5000, 70000]))
        attempt = self.number + self.rng.choice([0, 0, 0, 0, -1, 2])
        if self.rng.random() < 0.2:
            self.slots().put(_core.pack_state(made), attempt=attempt)
        else:
            self.slots().pack(made, attempt=attempt)

    def commit(self) -> None:
        self.slots().commit(self.rng.choice([self.number] * 3 + [self.rng.getrandbits(64)]))

    def fence(self) -> None:
        self.slots().fence(max(0, self.number + self.rng.choice([-1, 0, 1])))

    def revert(self) -> None:
        slots = self.slots()
        committed = slots.committed()
        slots.revert(attempt=self.number, position=max(0, committed[0] - 1) if committed else 0)

    def view(self) -> None:
        found = self.slots().view()
        if not self.damaged:  # else it is only sealed() that promises a whole state
            self.views.append((found, number_of(found)))

    def look_back(self) -> None:
        """Read the last view again; another pack may have begun in its slot since."""
        if self.views:
            found, number = self.views.pop()
            self.slots().put(found, attempt=number)

    def sealed(self) -> None:
        found = self.slots().sealed()
        assert found is None or 1 <= number_of(found[2]) <= self.number

    def others(self) -> None:
        slots = self.slots()
        slots.attempt()
        slots.save(self.folder / "saved")
        slots.hash()

    # --- damage to a file ---

    def flip(self, file: Path) -> None:
        content = bytearray(file.read_bytes())
        for _ in range(self.rng.randint(1, 4) if content else 0):
            at = self.rng.randrange(min(len(content), self.rng.choice([len(content), 200, 136])))
            flipped = content[at] ^ 1 << self.rng.randrange(8)
            content[at] = self.rng.choice([flipped, 0, 255])
        file.write_bytes(content)

    def resize(self, file: Path) -> None:
        size = file.stat().st_size
        os.truncate(file, self.rng.choice([0, 8, size // 2, max(size - 1, 0), size + 1, 8192]))

    def swap(self, file: Path) -> None:
        a, b = self.folder / FILES[0], self.folder / FILES[1]
        if a.exists() and b.exists():
            a.rename(self.folder / "swapped")
            b.rename(a)
            (self.folder / "swapped").rename(b)

    def remove(self, file: Path) -> None:
        file.unlink()

    def keep_copy(self, file: Path) -> None:
        self.old[file] = file.read_bytes()

    def put_old_back(self, file: Path) -> None:
        if file in self.old:
            file.write_bytes(self.old[file])

    def link(self, file: Path) -> None:
        file.unlink()
        file.symlink_to(os.devnull)


CALLS: dict[Callable[[Holders], None], float] = {
    Holders.open: 8,
    Holders.close: 4,
    Holders.damage: 4,
    Holders.check: 3,
    Holders.pack: 30,
    Holders.commit: 20,
    Holders.fence: 4,
    Holders.revert: 4,
    Holders.view: 6,
    Holders.look_back: 2,
    Holders.sealed: 8,
    Holders.others: 3,
}
"""The calls, and how often each is tried."""

DAMAGES: tuple[Callable[[Holders, Path], None], ...] = (
    *(Holders.flip, Holders.flip, Holders.flip, Holders.resize, Holders.swap, Holders.remove),
    *(Holders.keep_copy, Holders.put_old_back, Holders.put_old_back, Holders.link),
)


def run(rng: random.Random, folder: Path) -> int:
    """Make up to 80 calls."""
    holders = Holders(rng, folder)
    calls = rng.randint(5, 80)
    for _ in range(calls):
        holders.step()
    holders.close_all()
    return calls


# --- processes that are killed ---------------------------------------------------------

WORKER = """
import random, sys
import calls_slots
calls_slots.commit_forever(sys.argv[1], int(sys.argv[2]), random.Random(int(sys.argv[3])))
"""


def commit_forever(stem: str, last: int, rng: random.Random) -> None:
    """Pack and commit states after `last`; print the number of each once it is committed."""
    slots = _core.Slots(stem, True)
    slots.fence(last)
    for number in range(last + 1, sys.maxsize):
        made = state(number, rng.choice([0, 100, 4000, 70000, 300000]))
        slots.pack(made, attempt=number)
        if rng.random() < 0.8:
            slots.commit(number)
            print(number, flush=True)
        if rng.random() < 0.1:
            with contextlib.suppress(StateError):
                slots.revert(attempt=number, position=number - 1)


def run_kills(rng: random.Random, folder: Path) -> int:
    """Kill a few processes that commit states, one after the other; return how many committed.

    A process is killed after so many commits, somewhere in what it does next. What it has told is
    committed, or the state before it, if it was just taken back.
    """
    stem, told, last = folder / "7", 0, 0
    for _ in range(rng.randint(1, 4)):
        command = [sys.executable, "-c", WORKER, str(stem), str(last), str(rng.getrandbits(32))]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, cwd=Path(__file__).parent
        ) as process:
            assert process.stdout is not None
            for _ in range(rng.randint(0, 30)):
                told = int(process.stdout.readline())
            process.kill()
            told = max([told, *map(int, process.stdout.read().split(b"\n")[:-1])])
        if not (folder / FILES[2]).exists():
            assert told == 0
            continue
        try:
            slots = _core.Slots(stem, False)
        except CorruptDataError:  # killed while it made the page
            assert told == 0
            continue
        committed, sealed = slots.committed(), slots.sealed()
        if told:
            assert committed is not None and committed[0] >= told - 1
            assert sealed is not None and number_of(sealed[2]) == sealed[0] >= told - 1
            assert number_of(slots.view()) == committed[0]
        damage = _core.check_slots(stem)
        assert damage is None, damage
        last = max(last, slots.attempt(), told) + 1
        slots.close()
    return told

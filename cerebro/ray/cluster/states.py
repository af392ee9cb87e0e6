"""Where the states of live trials are, and how one is fetched.

Of each trial two states are kept: the newest, and the newest one that was made on another
node. When a node is lost, the states that were made there are; a trial then goes back to
the other one, which costs it the units that it did on that node since it came there.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cerebro._core as _core
from cerebro.errors import CorruptDataError

CARRIED_BYTES = 65_536
"""States up to here Ray carries in its messages (its own limit is 100 kB): they lie with the
coordinator and are lost with no node."""


@dataclass(frozen=True)
class HeldState:
    """A packed state in the object store."""

    position: int
    """Units behind it."""
    ref: Any
    node: str
    """Where it was made, and its first copy is."""
    worker: int
    state_hash: str
    nbytes: int


class HeldStates:
    """The states of all live trials; see the module's text."""

    def __init__(self) -> None:
        self._states: dict[int, list[HeldState]] = {}

    def add(self, trial: int, state: HeldState) -> None:
        """A unit has left a state: keep it, and of the older ones the one of use."""
        older = [s for s in self._states.get(trial, []) if s.position < state.position]
        elsewhere = [s for s in older if s.node != state.node]
        self._states[trial] = [*elsewhere[-1:], state]

    def at(self, trial: int, position: int) -> HeldState | None:
        """The state behind so many units."""
        found = [s for s in self._states.get(trial, []) if s.position == position]
        return found[-1] if found else None

    def newest(self, trial: int) -> HeldState | None:
        """The newest state of a trial."""
        states = self._states.get(trial)
        return states[-1] if states else None

    def lose(self, trial: int, position: int) -> int | None:
        """A state cannot be had any more; return the position of the one before it, if any."""
        left = [s for s in self._states.get(trial, []) if s.position < position]
        if trial in self._states:
            self._states[trial] = left
        return left[-1].position if left else None

    def lose_node(self, node: str) -> None:
        """A node is gone, and what lay there of the states that were made there."""
        for trial, states in self._states.items():
            self._states[trial] = [s for s in states if s.node != node or s.nbytes <= CARRIED_BYTES]

    def forget(self, trial: int) -> None:
        """A trial has ended: the object store may have its memory back."""
        self._states.pop(trial, None)

    @property
    def nbytes(self) -> int:
        """Bytes of all states that are held."""
        return sum(state.nbytes for states in self._states.values() for state in states)


STATE_SECONDS = 300.0
"""How long a state may take to come from another node."""

STEP_SECONDS = 1.0
"""How often it is asked whether that node is gone: Ray itself takes half a minute to notice."""


class StateGone(Exception):
    """A state cannot be had any more."""


class StoreFull(Exception):
    """There is no room for a state, neither in an object store nor on the disk behind it."""


def fetch(ref: Any, node: str, gone: Collection[str]) -> Any:
    """Return a packed state: an array of bytes, in the object store of this node.

    Parameters
    ----------
    ref
        A reference to it.
    node
        Where it was made.
    gone
        Nodes that are gone; others add to it meanwhile.

    Raises
    ------
    StateGone
        If it is lost, or does not come.
    StoreFull
        If there was no room for it where it was made, or is none here.
    """
    import ray

    end = time.monotonic() + STATE_SECONDS
    while True:
        try:
            return ray.get(ref, timeout=STEP_SECONDS)
        except ray.exceptions.GetTimeoutError:
            if node in gone:
                raise StateGone("the node that it was made on is gone") from None
            if time.monotonic() >= end:
                raise StateGone(f"it did not come in {STATE_SECONDS:g} s") from None
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            raise StoreFull(type(error).__name__) from None
        except ray.exceptions.RayError as error:
            raise StateGone(type(error).__name__) from None


def fetch_to_file(held: HeldState, gone: Collection[str], path: Path) -> None:
    """Write a state from the object store to a file.

    Raises
    ------
    StateGone, CorruptDataError
        If it is gone, or is not what it was.
    OSError
        If it cannot be written.
    """
    packed = fetch(held.ref, held.node, gone)
    if _core.hash_state(packed) != held.state_hash:
        raise CorruptDataError("its hash is another")
    with path.open("wb") as file:
        file.write(packed)

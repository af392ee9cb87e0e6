"""The states of live trials in the object store, and how to fetch one.

Two states of each trial are kept: the newest, and the newest one from a different node. If a node
is lost, so are the states that were made there. The trial then returns to its other state and
repeats the units that it did on the lost node.
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
"""Ray sends states up to this size in its messages (its limit is 100 kB): the coordinator holds
them, and they survive the loss of a node."""


@dataclass(frozen=True)
class HeldState:
    """A packed state in the object store."""

    position: int
    """The number of units done before it."""
    ref: Any
    node: str
    """The node that made it and has the first copy."""
    worker: int
    state_hash: str
    nbytes: int


class HeldStates:
    """The states of all live trials; see the module's docstring."""

    def __init__(self) -> None:
        self._states: dict[int, list[HeldState]] = {}

    def add(self, trial: int, state: HeldState) -> None:
        """Add the state of a unit; of the older ones, keep the newest from a different node."""
        older = [s for s in self._states.get(trial, []) if s.position < state.position]
        elsewhere = [s for s in older if s.node != state.node]
        self._states[trial] = [*elsewhere[-1:], state]

    def at(self, trial: int, position: int) -> HeldState | None:
        """Return the state after `position` units."""
        found = [s for s in self._states.get(trial, []) if s.position == position]
        return found[-1] if found else None

    def newest(self, trial: int) -> HeldState | None:
        """Return the newest state of a trial."""
        states = self._states.get(trial)
        return states[-1] if states else None

    def lose(self, trial: int, position: int) -> int | None:
        """Remove a lost state; return the position of the one before it, if any."""
        left = [s for s in self._states.get(trial, []) if s.position < position]
        if trial in self._states:
            self._states[trial] = left
        return left[-1].position if left else None

    def lose_node(self, node: str) -> None:
        """Remove the states that were lost with a node."""
        for trial, states in self._states.items():
            self._states[trial] = [s for s in states if s.node != node or s.nbytes <= CARRIED_BYTES]

    def forget(self, trial: int) -> None:
        """Drop a trial that has ended, so that the object store can free its states."""
        self._states.pop(trial, None)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all held states."""
        return sum(state.nbytes for states in self._states.values() for state in states)


STATE_SECONDS = 300.0
"""The time within which a state must arrive from a different node."""

STEP_SECONDS = 1.0
"""How often to check whether that node is gone: Ray itself takes half a minute to notice."""


class StateGone(Exception):
    """A state is lost."""


class StoreFull(Exception):
    """A state fits neither in an object store nor on the disk behind it."""


def fetch(ref: Any, node: str, gone: Collection[str]) -> Any:
    """Return a packed state as an array of bytes in this node's object store.

    Parameters
    ----------
    ref
        A reference to the state.
    node
        The node where it was made.
    gone
        The lost nodes; other threads add to it meanwhile.

    Raises
    ------
    StateGone
        If it is lost or does not arrive.
    StoreFull
        If there is no room for it on either node.
    """
    import ray

    end = time.monotonic() + STATE_SECONDS
    while True:
        try:
            return ray.get(ref, timeout=STEP_SECONDS)
        except ray.exceptions.GetTimeoutError:
            if node in gone:
                raise StateGone("the node that made it is gone") from None
            if time.monotonic() >= end:
                raise StateGone(f"it did not arrive within {STATE_SECONDS:g} s") from None
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            raise StoreFull(type(error).__name__) from None
        except ray.exceptions.RayError as error:
            raise StateGone(type(error).__name__) from None


def fetch_to_file(held: HeldState, gone: Collection[str], path: Path) -> None:
    """Write a state from the object store to a file.

    Raises
    ------
    StateGone, CorruptDataError
        If the state is lost or damaged.
    OSError
        If the file cannot be written.
    """
    packed = fetch(held.ref, held.node, gone)
    if _core.hash_state(packed) != held.state_hash:
        raise CorruptDataError("its hash differs")
    with path.open("wb") as file:
        file.write(packed)

"""Where the states of live trials are, as the coordinator knows it: references, never bytes.

Of each trial two states are kept: the newest, and the newest one that was made on another
node. When a node is lost, the states that were made there are; a trial then goes back to
the other one, which costs it the units that it did on that node since it came there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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

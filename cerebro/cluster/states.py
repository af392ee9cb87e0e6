"""The states of live trials: which are held, and where.

An agent holds the states that its worker has made. Two states of each trial are kept: the newest,
and the newest from a different node, or else from a different agent. If an agent is lost, its
states are, too. The trial then returns to its other state and repeats the units since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CARRIED_BYTES = 65_536
"""States up to this size travel in messages: the coordinator holds them, and they survive the loss
of an agent."""


@dataclass(frozen=True)
class HeldState:
    """A packed state at an agent."""

    position: int  # the number of units done before it
    ref: Any
    node: str  # the node that made it
    agent: str  # the number of the agent there that holds it
    worker: int
    state_hash: str
    nbytes: int

    @property
    def is_here(self) -> bool:
        """Whether the reference itself has the state; see `cerebro.cluster.blobs.Blob`."""
        return getattr(self.ref, "packed", None) is not None


class HeldStates:
    """The states of all live trials; see the module's docstring."""

    def __init__(self) -> None:
        self._states: dict[int, list[HeldState]] = {}
        self._keeping: dict[int, int] = {}  # trial -> position of a state that is being written

    def add(self, trial: int, state: HeldState) -> None:
        """Add the state of a unit; of the older ones, keep the newest from elsewhere."""
        older = [s for s in self._states.get(trial, []) if s.position < state.position]
        elsewhere = [s for s in older if s.node != state.node]
        elsewhere = elsewhere or [s for s in older if s.agent != state.agent]
        self._states[trial] = [*elsewhere[-1:], state]

    def find_state(self, trial: int, position: int) -> HeldState | None:
        states = [s for s in self._states.get(trial, []) if s.position == position]
        return states[-1] if states else None

    def find_newest(self, trial: int) -> HeldState | None:
        states = self._states.get(trial)
        return states[-1] if states else None

    def remove_lost_state(self, trial: int, position: int) -> int | None:
        """Remove a lost state; return the position of the one before it, if any."""
        earlier = [s for s in self._states.get(trial, []) if s.position < position]
        if trial in self._states:
            self._states[trial] = earlier
        return earlier[-1].position if earlier else None

    def remove_agent(self, agent: str) -> None:
        for trial, states in self._states.items():
            self._states[trial] = [
                s for s in states if s.agent != agent or s.nbytes <= CARRIED_BYTES or s.is_here
            ]

    def forget(self, trial: int) -> None:
        self._states.pop(trial, None)

    @property
    def is_keeping(self) -> bool:
        """Whether a state is being written into the run's folder."""
        return bool(self._keeping)

    def begin_keeping(self, trial: int, state: HeldState) -> None:
        self._keeping[trial] = state.position

    def end_keeping(self, trial: int, state: HeldState) -> bool:
        """Note that a state was written; return False if a later one of the trial replaces it."""
        if self._keeping.get(trial) != state.position:
            return False
        del self._keeping[trial]
        return True


STATE_SECONDS = 300.0  # the time within which a state must arrive from a different agent


class StateGone(Exception):
    """A state is lost."""

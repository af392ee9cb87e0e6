"""Let several threads of one process run units in turn, which overlap only on a GPU.

A process has one set of random generators, one standard output, one list of warning filters. So
only the thread that has the turn runs the host's part of a unit. While it waits for its own work on
the GPU, it gives the turn away (`give_away`), and another thread puts more work on the GPU, on its
own stream. A thread that takes the turn first restores the state that its own unit left behind. So
a unit never sees another's state, and computes what it would compute alone.

A unit gives its turn away only after `allow_giving_away(True)`: its code between two batches must
not depend on anything of the process that is not kept here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

PutBack = Callable[[], object]
"""Puts a part of the process's state back; may be called several times."""

Keep = Callable[[], PutBack]
"""Notes the present state of a part of the process."""


class Turn:
    """The part that one thread takes in `Turns`, from the begin of a message to its end.

    `waits` is called with True when the thread begins to wait for its turn, before a unit or in the
    middle of one, and with False when it has it.
    """

    def __init__(self, turns: Turns, waits: Callable[[bool], object]) -> None:
        self.turns = turns
        self.waits = waits
        self.gives_away = False
        self.kept: list[PutBack] | None = None


class Turns:
    """Gives the turn to one thread at a time.

    `keeps` has a function for everything that a unit changes in the process: it notes the state.
    """

    def __init__(self, keeps: Sequence[Keep]) -> None:
        self._keeps = keeps
        self._changed = threading.Condition()
        self._taken = False
        self._inside: list[Turn] = []  # begun and not ended
        self._alone: list[Turn] = []  # the first of them runs while no other has begun
        self._holder: Turn | None = None  # whose state the process has; None: that between units
        self._between: list[PutBack] = []

    @contextmanager
    def take_turn(self, waits: Callable[[bool], object] = bool) -> Iterator[None]:
        """Run a block in this thread's turn, from the state between units to the same state."""
        turn = Turn(self, waits)
        with self._changed:
            self._wait_until(turn, lambda: not self._taken and not self._alone)
            self._taken = True
            self._inside.append(turn)
        try:
            self._switch(turn)
            _here.turn = turn
            yield
        finally:
            _here.turn = None
            self._holder = None
            with self._changed:
                for begun in (self._inside, self._alone):
                    if turn in begun:
                        begun.remove(turn)
                self._taken = False
                self._changed.notify_all()

    @contextmanager
    def give_away(self, turn: Turn) -> Iterator[None]:
        self._give_turn()
        try:
            yield
        finally:
            self._take_again(turn, lambda: not self._taken)

    def wait_until_alone(self, turn: Turn) -> None:
        with self._changed:
            if turn in self._alone:
                return
            self._inside.remove(turn)
            self._alone.append(turn)
        self._give_turn()
        first = self._alone
        self._take_again(turn, lambda: not self._taken and not self._inside and first[0] is turn)

    def _give_turn(self) -> None:
        with self._changed:
            self._taken = False
            self._changed.notify_all()

    def _take_again(self, turn: Turn, may: Callable[[], bool]) -> None:
        with self._changed:
            self._wait_until(turn, may)
            self._taken = True
        self._switch(turn)

    def _wait_until(self, turn: Turn, may: Callable[[], bool]) -> None:
        if not may():
            turn.waits(True)
            self._changed.wait_for(may)
            turn.waits(False)

    def _switch(self, turn: Turn) -> None:
        """Give the process the state of a unit; keep that of the unit before it."""
        before = self._holder
        if before is turn:
            return
        put_backs = [keep() for keep in self._keeps]
        if before is None:
            self._between = put_backs
        else:
            before.kept = put_backs
        if turn.kept is not None or before is not None:
            for put_back in self._between if turn.kept is None else turn.kept:
                put_back()
        turn.kept = None
        self._holder = turn


class _Here(threading.local):
    turn: Turn | None = None


_here = _Here()


def allow_giving_away(yes: bool) -> None:
    """Say whether this thread's unit may give its turn away from now on."""
    if _here.turn is not None:
        _here.turn.gives_away = yes


def gives_away() -> bool:
    """Return whether this thread's unit gives its turn away while it waits for the GPU."""
    return _here.turn is not None and _here.turn.gives_away


def is_shared() -> bool:
    """Return whether other units may run in this process between two units of this thread."""
    return _here.turn is not None


def give_away() -> AbstractContextManager[None]:
    """Let other units run during the block, which runs no Python code of the unit.

    Does nothing in a process that runs one unit at a time, and in a unit that keeps its turn.
    """
    turn = _here.turn
    if turn is None or not turn.gives_away:
        return nullcontext()
    return turn.turns.give_away(turn)


def wait_until_alone() -> bool:
    """Wait until no other thread is in a unit, and let none begin one until this unit ends.

    Return whether there may have been another unit.
    """
    turn = _here.turn
    if turn is None:
        return False
    turn.turns.wait_until_alone(turn)
    return True

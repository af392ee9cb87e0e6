"""Mistakes that can be planted in the code for clusters, to see whether a simulation finds them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

from cerebro.cluster.executor import ClusterExecutor
from cerebro.cluster.hub import Hub
from cerebro.cluster.states import HeldStates
from cerebro.cluster.supervisor import TrialFiles
from cerebro.worker.messages import Task, UnitDone


def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
    """Replace a function by what `make` makes of it, in a block."""
    return lambda: mock.patch.object(owner, name, make(owner.__dict__[name]))


def hear_the_lost(handle_answer: Any) -> Any:
    def unsafe(self: ClusterExecutor, remote: Any, call: Any, done: Any) -> None:
        if remote.call is None and done.exception() is None:
            remote.call = call
        handle_answer(self, remote, call, done)

    return unsafe


def keep_at_once(record_unit: Any) -> Any:
    def unsafe(self: ClusterExecutor, remote: Any, task: Task, ref: Any, event: UnitDone) -> None:
        record_unit(self, remote, task, ref, event)
        now = self._events.now
        now[-1] = replace(now[-1], is_kept=True)

    return unsafe


def do_not_fetch(fetch_to_file: Any) -> Any:
    def unsafe(self: Hub, held: Any, gone: Any, path: Any) -> None:
        """Say that it is there."""

    return unsafe


DEFECTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "an agent takes any state in its slots for the right one": patch(
        TrialFiles, "has_state", lambda _: lambda self, task: task.trial in self._made
    ),
    "any state of a trial is sent": patch(
        HeldStates, "find_state", lambda _: lambda self, trial, position: self.find_newest(trial)
    ),
    "a lost state is still held": patch(
        HeldStates, "remove_lost_state", lambda _: lambda self, trial, position: position
    ),
    "the answer of a lost worker counts": patch(ClusterExecutor, "_handle_answer", hear_the_lost),
    "an epoch's row is written before its state has arrived": patch(
        ClusterExecutor, "_record_unit", keep_at_once
    ),
    "an epoch's state does not arrive": patch(Hub, "fetch_to_file", do_not_fetch),
}

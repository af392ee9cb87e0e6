"""Mistakes that can be planted in the real code, to see whether a simulation finds them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from cluster_defects import DEFECTS as OF_CLUSTERS
from cluster_defects import patch
from slots_files import SimulatedSlots

from cerebro.executors.local import LocalExecutor
from cerebro.machine import durable
from cerebro.run.store import Store
from cerebro.run.store.writing import OpenFile, Transaction
from cerebro.worker.messages import Task
from cerebro.worker.trial_state import TrialSlots

Patch = Callable[[], AbstractContextManager[Any]]


def publish_without(step: str) -> Callable[[Any], Any]:
    """Leave a step of publishing states out."""

    def make(publish: Any) -> Any:
        def unsafe(files: Any, disk: Any) -> None:
            with mock.patch.object(type(disk), step, lambda *_: None):
                publish(files, disk)

        return unsafe

    return make


def write_rows_first(publish_states: Any) -> Any:
    def unsafe(self: Transaction, disk: Any) -> None:
        write_rows = self.write_rows

        def write_and_publish(connection: Any) -> None:
            write_rows(connection)
            publish_states(self, disk)

        self.write_rows = write_and_publish  # type: ignore[method-assign]

    return unsafe


def remove_states_first(publish_states: Any) -> Any:
    def unsafe(self: Transaction, disk: Any) -> None:
        publish_states(self, disk)
        self.remove_states(disk)

    return unsafe


def only_fence(settle: Any) -> Any:
    def unsafe(self: TrialSlots, task: Task) -> None:
        self.open(task.trial).fence(task.dispatch)

    return unsafe


def trust_any_state(sealed: Any) -> Any:
    def unsafe(self: SimulatedSlots) -> Any:
        committed = self.committed()
        return None if committed is None else (*committed[:2], self.view())

    return unsafe


def do_not_wait_for_the_disk(connect: Any) -> Any:
    def unsafe(self: OpenFile) -> None:
        connect(self)
        self.connection.execute("PRAGMA synchronous = OFF")

    return unsafe


def hear_early(queue: Any) -> Any:
    def unsafe(self: LocalExecutor, worker: int, task: Task) -> None:
        queue(self, worker, task)
        if worker in self._workers:
            self._workers[worker].beat.hear(task.number_before)

    return unsafe


class NoError:
    """Replaces `Store._error`, and drops every error."""

    def __get__(self, store: object, kind: type) -> None:
        return None

    def __set__(self, store: object, error: object) -> None:
        pass


DEFECTS: dict[str, Patch] = {
    "a state is not synced before its row": patch(durable, "publish", publish_without("sync")),
    "a state's name is not synced before its row": patch(
        durable, "publish", publish_without("sync_folder")
    ),
    "a row is written before its state": patch(Transaction, "publish_states", write_rows_first),
    "a state is removed before its row": patch(Transaction, "publish_states", remove_states_first),
    "commits do not wait for the disk": patch(OpenFile, "_connect", do_not_wait_for_the_disk),
    "rows of a group are committed one by one": patch(
        Store, "group", lambda _: lambda self: contextlib.nullcontext()
    ),
    "writing goes on after an error": lambda: mock.patch.object(
        Store, "_error", NoError(), create=True
    ),
    "a commit without an answer is not undone": patch(TrialSlots, "settle", only_fence),
    "a state is trusted without its seal": patch(SimulatedSlots, "sealed", trust_any_state),
    "a slot is used again before the answer is heard": patch(LocalExecutor, "queue", hear_early),
    "a doubled answer is counted twice": lambda: mock.patch.object(Task, "identity", None),
    **OF_CLUSTERS,
}


def plant(name: str | None) -> AbstractContextManager[Any]:
    """Have the real code make a mistake in the block; None: no mistake."""
    return contextlib.nullcontext() if name is None else DEFECTS[name]()

"""Derive a dataset on a cluster: which worker makes which shard, and what follows from a loss.

A node makes the shards that it holds. A worker without one takes a shard whose node is lost, or
one of a node that has many left; the shard is then sent there first. See docs/design/features.md.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from cerebro.cluster.messages import Sent
from cerebro.data.derivation import Arrived, Order
from cerebro.errors import CorruptDataError, InputError, WorkerError, text_of
from cerebro.executors.base import PlacingExecutor
from cerebro.executors.wire import pickle_context
from cerebro.machine.devices import is_gpu
from cerebro.machine.libraries import present_settings
from cerebro.run.settings import Exactness
from cerebro.worker.messages import (
    News,
    Note,
    RunContext,
    RunFolders,
    ShardFailed,
    ShardMade,
    ShardTask,
    WorkerJoined,
    WorkerLost,
)

MAX_LOSSES = 4  # of workers while they make one shard, or in a row before they begin one


class Makers(PlacingExecutor, Protocol):
    """What `MadeShards` needs from an executor of a cluster."""

    def keep_made(self, manifest: bytes) -> None:
        """Have nodes keep the shards that they have made."""


class FunctionFailed(Exception):
    """The traceback of an exception in a worker; the cause of the error that the user gets."""


class MadeShards:
    """A `ShardMakers` (see `cerebro.data.derivation`) with the workers of a cluster, by number."""

    def __init__(self, executor: Makers, order: Order, workers: Iterable[int]) -> None:
        self._executor = executor
        self._order = order
        self._idle = set(workers)
        self._running: dict[int, int] = {}  # worker -> shard
        self._left: list[int] = []  # shards that no worker has
        self._losses: Counter[int] = Counter()
        self._lost_at_start = 0
        self._cause = ""  # why the last lost worker was not replaced

    def make(self, shards: Sequence[int]) -> Iterator[Arrived]:
        self._left = list(shards)
        while self._left or self._running:
            self._assign()
            if not self._running:
                raise WorkerError(f"derive: no worker is left, and none joins: {self._cause}")
            for event in self._executor.wait():
                if isinstance(event, ShardMade):
                    del self._running[event.worker]
                    self._idle.add(event.worker)
                    self._lost_at_start = 0
                    self._assign()  # before the caller takes its time
                    shard, folder = event.task.shard, Path(event.folder)
                    yield Arrived(shard, event.files, folder, event.worker, event.node)
                else:
                    self._handle(event)

    def keep(self, manifest: bytes) -> None:
        self._executor.keep_made(manifest)

    def _assign(self) -> None:
        """Assign shards to idle workers, preferring shards that they already hold."""
        for choose in (self._choose_held_shard, self._choose_other_shard):
            for worker in sorted(self._idle):
                shard = choose(worker)
                if shard is not None:
                    self._left.remove(shard)
                    self._idle.remove(worker)
                    self._running[worker] = shard
                    self._executor.submit(worker, ShardTask(shard, self._order.nbytes[shard]))

    def _choose_held_shard(self, worker: int) -> int | None:
        """Return the shard that a worker and the fewest others hold."""
        holders = self._executor.holders()
        if holders is None:
            return next(iter(self._left), None)
        shards = [shard for shard in self._left if worker in holders[shard]]
        return min(shards, key=lambda shard: (len(holders[shard]), shard), default=None)

    def _choose_other_shard(self, worker: int) -> int | None:
        """Return a shard that a worker does not hold, after asking for it to be sent there."""
        holders = self._executor.holders()
        if holders is None or not self._left:
            return None
        shard = next((shard for shard in self._left if not holders[shard]), None)
        if shard is None:
            waiting = Counter(tuple(holders[shard]) for shard in self._left)
            most = max(waiting, key=lambda workers: waiting[workers] / len(workers))
            if self._running and waiting[most] < 2 * len(most):
                return None  # its holders will have made it before it could be sent
            shard = next(s for s in reversed(self._left) if tuple(holders[s]) == most)
        self._executor.load(worker, shard)
        return shard

    def _handle(self, event: News) -> None:
        if isinstance(event, ShardFailed):
            cause = FunctionFailed(event.traceback) if event.traceback else None
            raise _make_error(event) from cause
        if isinstance(event, WorkerLost):
            self._handle_lost_worker(event)
        elif isinstance(event, WorkerJoined):
            self._idle.add(event.worker)
        elif isinstance(event, Note):
            warnings.warn(event.text, stacklevel=2)

    def _handle_lost_worker(self, event: WorkerLost) -> None:
        """Replace a worker, or go on without it; raise WorkerError if its shard ends them all."""
        self._idle.discard(event.worker)
        shard = self._running.pop(event.worker, None)
        text = event.reason
        if shard is not None:
            self._left.insert(0, shard)
            text += f", which was computing shard {shard}"
        if shard is not None and event.began:
            self._lost_at_start = 0
            self._losses[shard] += 1
            if self._losses[shard] == MAX_LOSSES:
                raise WorkerError(
                    f"derive: {MAX_LOSSES} workers were lost while they computed shard {shard}; "
                    f"the last: {event.reason}"
                )
        else:
            self._lost_at_start += 1
        self._cause = event.reason
        if self._lost_at_start < MAX_LOSSES:
            try:
                self._idle.add(self._executor.replace(event.worker))
                warnings.warn(f"{text}; another worker takes its place", stacklevel=2)
                return
            except WorkerError as error:
                self._cause = text_of(error)
        warnings.warn(f"{text}; the others continue without it", stacklevel=2)


def make_context(order: Order) -> RunContext:
    """Describe an order as a run without trials; raise InputError if it cannot be sent."""
    work_there = order.work.with_view(None)
    if is_gpu(work_there.derivation.device):  # a worker sees one GPU, which may be another here
        there = replace(work_there.derivation, device=order.device)
        work_there = replace(work_there, derivation=there)
    try:
        work = pickle_context(work_there)
    except InputError as error:
        cause = error.__cause__ or error
        raise InputError(
            f"derive: the function cannot be sent to workers ({text_of(cause)}): create the "
            "objects that it needs inside it, or leave out executor="
        ) from cause
    return RunContext(
        build=Sent(work),
        train=order.view,
        folders=RunFolders(str(order.folder), str(order.folder.parent), str(order.folder)),
        exactness=Exactness(threads=order.threads),
        device=order.device,
        libraries=present_settings(),
    )


def _make_error(event: ShardFailed) -> Exception:
    where = f"shard {event.task.shard}, node {event.node}"
    if event.kind == "input":
        return InputError(event.message)
    if event.kind == "memory":
        return InputError(f"{event.message} ({where})")
    if event.kind == "data":
        return CorruptDataError(f"{event.message} ({where})")
    if event.kind == "storage":
        return OSError(f"a node's disk is full: {event.message} ({where})")
    return InputError(f"derive: the function fails in {where}: {event.message}")

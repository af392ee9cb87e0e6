"""What a simulated worker does, step by step as `cerebro.worker.runner`; its models are numbers.

The state of a trial is a number and a count of units. Each unit mixes what identifies it into the
number: a unit that is left out, repeated, or trained from another state gives a wrong number from
there on. `right_state` computes the right one.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
from messages import SimulatedChannel
from world import Process, Program, SimulatedClock

import cerebro._core as _core
from cerebro.data.order import EpochOrder
from cerebro.errors import CorruptDataError, StateError, UnitCancelled, text_of
from cerebro.executors.wire import pickle_event, unpickle
from cerebro.machine.disk import Disk
from cerebro.machine.files import ExhaustedError, StorageError, explain_storage_errors, is_full
from cerebro.run.records import strip_study
from cerebro.run.states import read_state
from cerebro.worker.messages import (
    MAX_LIVE_MODELS,
    CheckDone,
    CommittedState,
    Event,
    Job,
    ProcessNotes,
    RunContext,
    Task,
    UnitDone,
    UnitFailed,
    UnitSums,
)
from cerebro.worker.trial_state import EpochProgress, TrialSlots

MASK = 2**64 - 1
STEP_SECONDS = 5e-4  # between two steps of a worker that take no time to speak of
UNIT_SECONDS = 0.01, 3.0  # the shortest and the longest pass over a part
BATCHES = 3  # looks at the flag that cancels, in a unit

Waits = Generator[float | None, None, Any]
"""A part of a worker's program, with its result."""


# --- what is right ------------------------------------------------------------------------


def mix(value: int, *words: int) -> int:
    """Mix words into a number, so that every change of one changes the result."""
    for word in words:
        value = (value ^ (word & MASK)) * 0x9E3779B97F4A7C15 & MASK
        value ^= value >> 29
    return value


def seed_of(config: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(strip_study(config), sort_keys=True).encode())


@dataclass
class Model:
    """A trial's numbers, with the progress of its epoch."""

    value: int = 0
    count: int = 0
    progress: EpochProgress = field(default_factory=EpochProgress)

    def train(
        self,
        config: Mapping[str, Any],
        stream: int,
        epoch: int,
        step: int,
        part: int,
        order: EpochOrder,
    ) -> UnitSums:
        """Train on a part, or validate if it is -1."""
        self.progress.begin_unit(epoch, step)
        self.value = mix(self.value, seed_of(config), stream, epoch, step, part)
        self.count += 1
        loss = self.value / 2**64
        rows = sum(order.shard_rows) if part < 0 else round(order.part_rows[part])
        sums = {"loss": (loss * rows, float(rows))}
        if part < 0:
            self.progress.validation = {"loss": loss}
        else:
            self.progress.add_training(sums)
        return UnitSums(rows, 1, sums)

    def to_state(self) -> dict[str, Any]:
        model = {"value": self.value, "count": self.count}
        return {"model": model, "progress": self.progress.to_state()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Model:
        progress = EpochProgress.from_state(state["progress"])
        return cls(state["model"]["value"], state["model"]["count"], progress)


def train_units(
    config: Mapping[str, Any],
    stream: int,
    order: EpochOrder,
    units: int,
    *,
    validates: bool = False,
    start: Model | None = None,
    first_epoch: int = 0,
) -> Model:
    """Return a trial after so many units; a clone begins with a copy of `start`, at an epoch."""
    model = Model() if start is None else Model(start.value, start.count)
    per_epoch = order.num_parts + validates
    for unit in range(units):
        epoch, step = first_epoch + unit // per_epoch, unit % per_epoch
        visits = [*order.visits(stream, epoch), -1]
        model.train(config, stream, epoch, step, visits[step], order)
    return model


def right_value(
    config: Mapping[str, Any], stream: int, order: EpochOrder, units: int, **more: Any
) -> int:
    return train_units(config, stream, order, units, **more).value


def right_hash(
    config: Mapping[str, Any], stream: int, order: EpochOrder, units: int, **more: Any
) -> str:
    """Return the hash of a trial's packed state after so many units."""
    state = train_units(config, stream, order, units, **more).to_state()
    return _core.hash_state(_core.pack_state(state))


def right_metrics(
    config: Mapping[str, Any], stream: int, order: EpochOrder, epochs: int, **more: Any
) -> dict[str, float]:
    """Return the metrics of the last of so many epochs."""
    units = epochs * (order.num_parts + more.get("validates", False))
    return train_units(config, stream, order, units, **more).progress.epoch_metrics()


@dataclass(frozen=True)
class SimulatedData:
    """The part of a dataset's interface that a run needs if no row is ever read."""

    shard_rows: tuple[int, ...]
    nbytes: int = 1000

    @property
    def view(self) -> SimulatedData:
        return self

    shards = view

    @property
    def num_rows(self) -> int:
        return sum(self.shard_rows)

    @property
    def num_shards(self) -> int:
        return len(self.shard_rows)

    def check_sizes(self, shard: int) -> None:
        """Its files are never damaged."""


# --- the worker ----------------------------------------------------------------------------


@dataclass
class Live:
    """A model that a worker keeps between units, with its position in the trial."""

    model: Model
    epochs: int | None
    position: int = -1


class SimulatedWorker:
    """Answers the messages of its coordinator, as `cerebro._worker` does."""

    def __init__(
        self,
        process: Process,
        channel: SimulatedChannel,
        page: Any,
        disk: Disk,
        context: RunContext,
        number: int,
    ) -> None:
        self._process = process
        self._channel = channel
        self._page = page
        self._disk = disk
        self._context = context
        self._number = number
        self._clock = SimulatedClock(process)
        self._slots = TrialSlots(context.folders.slots, disk)
        self._live: dict[int, Live] = {}  # the least recently used first
        self._done: tuple[int, int] | None = None  # the last task, if it was a unit that is done
        channel.socket.on_arrival = process.wake
        channel.socket.on_end = self._hear_end

    def _hear_end(self) -> None:
        self._process.wake()
        self._process.end_with_coordinator()

    def _delay(self, most: float = STEP_SECONDS) -> float:
        return most * self._process.random.random()

    def run(self) -> Program:
        waiting: list[bytes] = []
        while True:
            while not waiting:
                try:
                    waiting = self._channel.receive()
                except (EOFError, OSError):
                    self._process.die(-9)
                    return
                if not waiting:
                    yield None
            kind, *rest = unpickle(waiting.pop(0))
            yield self._delay()
            if kind == "run":
                yield from self._answer(rest[0])
            elif kind == "end":
                self._slots.close_all()
                self._live.clear()
                yield from self._send(cloudpickle.dumps({}))

    def _send(self, message: bytes) -> Program:
        try:
            self._channel.send(message)
            while self._channel.has_unsent:
                yield self._delay()
                self._channel.flush()
        except OSError:
            self._process.die(-9)
            yield None  # never continued

    def _answer(self, task: Job) -> Program:
        if isinstance(task, Task) and not task.may_follow(self._done):
            return
        self._page.begin_task(0.0)
        event: Event = CheckDone(self._number, ())
        if isinstance(task, Task):
            event = yield from self._run_or_fail(task)
        yield self._delay()
        self._page.end_task()
        self._done = event.task.identity if isinstance(event, UnitDone) else None
        yield from self._send(pickle_event(event))

    def _run_or_fail(self, task: Task) -> Waits:
        try:
            return (yield from self._run(task))
        except Exception as error:
            self._live.pop(task.trial, None)
            kind: Any = "error"
            if isinstance(error, UnitCancelled):
                kind = "cancelled"
            elif isinstance(error, CorruptDataError):
                kind = "data"
            elif isinstance(error, ExhaustedError):
                kind = "worker"
            elif isinstance(error, StorageError) or is_full(error):
                kind = "storage"
            elif not isinstance(error, (OSError, StateError)):
                raise
            return UnitFailed(self._number, task, kind, text_of(error), dropped=(task.trial,))

    def _run(self, task: Task) -> Waits:
        started, began = self._clock.time(), self._clock.perf_counter()
        for trial in task.ended:
            self._live.pop(trial, None)
            self._slots.close(trial)
        self._slots.settle(task)
        yield self._delay()
        live, loaded = yield from self._take_model(task)
        total = yield from self._compute(live.model, task)
        metrics, nbytes, state_hash = yield from self._commit(live, task)
        file = None
        if metrics is not None:
            file = self._slots.save(task, self._context.folders.states, state_hash)
            yield self._delay()
        return UnitDone(
            worker=self._number,
            task=task,
            total=total,
            started=started,
            seconds=self._clock.perf_counter() - began,
            loaded=loaded,
            state=CommittedState(nbytes, state_hash, file),
            metrics=metrics,
            dropped=self._drop_least_used(),
            process=ProcessNotes(resident=100_000_000),
        )

    def _take_model(self, task: Task) -> Waits:
        """Return the trial's model, and whether its state was loaded."""
        live = self._live.get(task.trial)
        begins = task.position == 0 or task.clone_of is not None
        if live is not None and (
            live.epochs != task.epochs or (begins and live.position != task.position)
        ):
            live = None
        loaded = False
        if live is None:
            self._live.pop(task.trial, None)
            yield self._delay()
            live = Live(Model(), task.epochs)
            if task.clone_of is not None:
                state = _core.unpack_state(read_state(task.clone_of, self._disk))
                parent = Model.from_state(state)
                live.model = Model(parent.value, parent.count)
                live.position = task.position
                loaded = True
            elif task.position == 0:
                live.position = 0
        self._live.pop(task.trial, None)  # until its state is right
        if live.position != task.position:
            packed = self._slots.read(task)
            yield self._delay()
            live.model = Model.from_state(_core.unpack_state(packed))
            live.position = task.position
            loaded = True
        self._live[task.trial] = live
        return live, loaded

    def _compute(self, model: Model, task: Task) -> Waits:
        first, last = UNIT_SECONDS
        seconds = first * math.exp(math.log(last / first) * self._process.random.random())
        for _ in range(BATCHES):
            yield seconds / BATCHES
            if self._page.cancelled:
                raise UnitCancelled("the unit was cancelled")
        order = self._context.order(task.trial)
        return model.train(task.config, task.key, task.epoch, task.step, task.part, order)

    def _commit(self, live: Live, task: Task) -> Waits:
        """Commit a unit; return the metrics, if the epoch is over, the state's size, its hash."""
        slots = self._slots.open(task.trial)
        metrics = None
        if task.step == self._context.units_per_epoch - 1:
            metrics = live.model.progress.epoch_metrics()
        yield self._delay()
        if task.after is not None:
            yield from self._await_hearing(task.number_before)
        with explain_storage_errors():
            nbytes = slots.pack(live.model.to_state(), attempt=task.dispatch)
        yield self._delay()
        with explain_storage_errors():
            state_hash = slots.commit(task.position + 1)
        live.position = task.position + 1
        yield self._delay()
        return metrics, nbytes, state_hash

    def _await_hearing(self, answer: int) -> Program:
        seconds = 1e-4
        is_heard = self._page.heard == answer
        while not is_heard:
            is_heard = self._page.heard == answer
            if self._page.cancelled:
                raise UnitCancelled("the unit was cancelled before it was committed")
            if not is_heard:
                yield seconds
                seconds = min(2 * seconds, 0.1)

    def _drop_least_used(self) -> tuple[int, ...]:
        limit = self._context.limits.live_models or MAX_LIVE_MODELS
        gone = list(self._live)[:-limit]
        for trial in gone:
            del self._live[trial]
        return tuple(gone)

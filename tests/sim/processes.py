"""Simulated worker processes, and what the real executor uses to start and end them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from messages import SimulatedChannel, SimulatedListener, make_pair
from trainer import SimulatedWorker
from world import Process, SimulatedClock, SimulatedTasks, World

from cerebro.errors import WorkerError
from cerebro.executors.local import LocalExecutor
from cerebro.executors.process import REAP_SECONDS
from cerebro.executors.wire import pickle_message
from cerebro.machine.disk import Disk
from cerebro.machine.local import Machine
from cerebro.worker.messages import RunContext

START_SECONDS = 0.05, 1.0  # from the start of a process to its first step
NOT_REPLACED = 0.02  # the probability that a process cannot be started in place of a lost one
NO_EXIT_DESCRIPTOR = 0.05


class SimulatedPage:
    """The page of heartbeats of a worker, or the coordinator's own, as `_core.BeatPage` has it."""

    def __init__(self, process: Process) -> None:
        self.batches = self.rows = 0
        self.cancelled = False
        self.heard = 0
        self._process = process
        self._began: float | None = None  # when the heartbeats did
        self._task_began: float | None = None

    def start_beating(self, interval_ms: int, coordinator: int | None = None) -> None:
        assert interval_ms == 100
        self._began = self._process.world.now

    def stop(self) -> None:
        self._began = None

    @property
    def beats(self) -> int:
        return 0 if self._began is None else self._process.count_beats(self._began)

    @property
    def task_seconds(self) -> float | None:
        return None if self._task_began is None else self._process.world.now - self._task_began

    def begin_task(self, grace: float = 0.0) -> None:
        self._task_began = self._process.world.now + grace

    def postpone_task(self, seconds: float) -> None:
        assert self._task_began is not None
        self._task_began += seconds

    def end_task(self) -> None:
        self._task_began = None

    def cancel(self) -> None:
        self.cancelled = True

    def clear(self) -> None:
        self.cancelled = False

    def hear(self, answer: int) -> None:
        self.heard = answer


class SimulatedChild:
    """The process of a worker, as its coordinator sees it."""

    def __init__(self, process: Process, owner: Process) -> None:
        self.pid = process.pid
        self._process = process
        self._owner = owner

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> int:
        process = self._process
        # A process that waits for its disk ends, even if killed, only after that.
        blocked = process.blocked_until if process.stopped_until < process.blocked_until else 0.0
        world = process.world
        if not self._owner.wait(timeout, lambda: process.is_dead and world.now >= blocked):
            raise subprocess.TimeoutExpired("worker", timeout)
        assert process.returncode is not None
        return process.returncode


class SimulatedWorkerProcess:
    """What `WorkerProcess` is, for a simulated worker."""

    def __init__(self, owner: Process, process: Process) -> None:
        ours, self.their_socket = make_pair(owner, process)
        self.process = SimulatedChild(process, owner)
        self.channel = SimulatedChannel(ours)
        self.beat = SimulatedPage(process)
        self.exit_fd = None if owner.random.random() < NO_EXIT_DESCRIPTOR else process.pid
        self.lanes = [self]
        self.sources: dict[Any, Any] = {}
        self._owner = owner
        self._simulated = process

    @property
    def has_ended(self) -> bool:
        """Whether the descriptor of its end is readable, as all that it has sent."""
        if self.exit_fd is None or not self._simulated.is_dead:
            return False
        return self.channel.socket.ends_at is None or self.channel.socket.has_ended

    def send(self, message: tuple[Any, ...], *, is_plain: bool = False) -> None:
        self.channel.send(pickle_message(message, is_plain=is_plain))

    def stop(self, *, kill: bool) -> None:
        self._owner.call("kill")
        if kill:
            self._simulated.die(-9)
        self.channel.close()
        self.exit_fd = None
        try:
            self.process.wait(REAP_SECONDS)
        except subprocess.TimeoutExpired:
            raise WorkerError(f"worker process {self.process.pid} does not end") from None


class SimulatedStarter:
    """What `Starter` is, in a process of the world; workers get their disk from `mount`."""

    def __init__(
        self,
        process: Process,
        mount: Callable[[Process], Disk],
        threads: int = 1,
        seats: Sequence[object] = (),
        *,
        fresh: bool = False,
        fork: bool = True,
    ) -> None:
        self._process = process
        self._mount = mount
        self._context: RunContext | None = None

    @property
    def _world(self) -> World:
        return self._process.world

    def own_pid(self) -> int:
        return self._process.pid

    def count_kills(self) -> int:
        return 0

    def is_stopped(self, pid: int) -> bool:
        (process,) = [each for each in self._world.processes if each.pid == pid]
        return process.stopped_until > self._world.now

    def make_page(self) -> SimulatedPage:
        return SimulatedPage(self._process)

    def begin(self, context: RunContext) -> None:
        self._context = context

    def start(self, number: int, seat: int, *, wait: bool) -> SimulatedWorkerProcess:
        self._process.call("start")
        if not wait and self._process.random.random() < NOT_REPLACED:
            raise WorkerError("cannot start a worker process: there is no memory")
        assert self._context is not None
        process = self._world.start_process(f"worker-{self._world.workers}")
        process.machine = self._process.machine
        self._world.workers += 1
        worker = SimulatedWorkerProcess(self._process, process)
        channel = SimulatedChannel(worker.their_socket)
        disk = mount_disk(process, self._mount)
        program = SimulatedWorker(process, channel, worker.beat, disk, self._context, number)

        # A message may be late, but the kernel says at once that the other end is gone.
        self._process.on_death.append(process.end_with_coordinator)

        def begin() -> None:
            worker.beat.start_beating(100)
            process.drive(program.run())

        first, last = START_SECONDS
        self._world.at(first + (last - first) * process.random.random(), begin, process)
        worker.send(("begin",), is_plain=True)
        return worker

    def end(self, ended: Collection[SimulatedWorkerProcess]) -> None:
        for worker in ended:
            worker.stop(kill=True)


def start_machine(world: World, name: str, mount: Callable[[Process], Disk]) -> Machine:
    """Start a process, such as ``coordinator-0``, and return what it gets of the machine."""
    process = world.start_process(name)
    disk = mount_disk(process, mount)
    return Machine(SimulatedClock(process), disk, SimulatedTasks(process))


def mount_disk(process: Process, mount: Callable[[Process], Disk]) -> Disk:
    disk = mount(process)
    if (die := getattr(disk, "die", None)) is not None:  # releases its locks
        process.on_death.append(die)
    return disk


def make_executor(
    machine: Machine, workers: int, mount: Callable[[Process], Disk], **options: Any
) -> LocalExecutor:
    """Return the real executor for a machine's process; workers get their disk from `mount`."""
    assert isinstance(machine.clock, SimulatedClock)
    process = machine.clock.process
    starter: Any = partial(SimulatedStarter, process, mount)
    listener: Any = partial(SimulatedListener, process)
    return LocalExecutor(
        workers, 1, clock=machine.clock, processes=starter, messages=listener, **options
    )

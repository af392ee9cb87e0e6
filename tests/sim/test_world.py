"""The simulated machine itself: its time, its faults, and the real executor above it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faults import Fault, Kind, ProcessDied, draw_fault
from fibers import Fiber
from messages import SimulatedChannel, make_pair
from processes import make_executor, start_machine
from trainer import Model, SimulatedData, right_hash, right_metrics, right_value, train_units
from world import Process, SimulatedClock, SimulatedTasks, Stuck, World

import cerebro._core as _core
from cerebro.executors.local import LocalExecutor
from cerebro.machine.disk import Disk
from cerebro.machine.program import NONE
from cerebro.run.settings import Batches
from cerebro.worker.messages import RunContext, RunFolders, Task, UnitDone, UnitFailed, WorkerLost

CONFIG = {"lr": 0.1}
ORDER = Batches(shuffle="shards").make_order(SimulatedData((10,) * 12), 0)  # type: ignore[arg-type]


UNSEEN = 1000


def never() -> bool:
    return False


# --- time ---------------------------------------------------------------------------------


def test_events_happen_in_the_order_of_their_times() -> None:
    world, seen = World(0), []
    for seconds in (3.0, 1.0, 2.0, 1.0):
        world.at(seconds, partial(lambda s: seen.append((s, world.now)), seconds))
    assert not world.wait(2.5, never)
    assert seen == [(1.0, 1.0), (1.0, 1.0), (2.0, 2.0)]
    assert world.now == 2.5
    assert world.wait(None, lambda: len(seen) == 4)


@pytest.mark.parametrize("seconds", [0.0, 3.0], ids=["waiting", "slow"])
def test_events_of_one_time_keep_their_order(seconds: float) -> None:
    """Also if they were made at different times, or their process cannot take them yet."""
    process = make_process("slow", seconds=seconds)
    world = process.world
    seen: list[int] = []
    for number in range(100):
        note = partial(world.at_time, 1.7, partial(seen.append, number), process)
        world.at(0.01 * number, note)
    for _ in range(3):
        process.call("read")
    process.sleep(5.0)
    assert seen == list(range(100))


def test_a_wait_for_what_cannot_happen_is_stuck() -> None:
    world = World(0)
    process = world.start_process("coordinator-0")
    with pytest.raises(Stuck, match=r"coordinator-0 waits .* nothing is left to happen"):
        process.wait(None, never)


def test_a_loop_that_does_not_end_is_stuck() -> None:
    process = World(0).start_process("coordinator-0")
    with pytest.raises(Stuck, match="does not end"):
        while True:
            process.sleep(10.0)


def test_a_task_runs_while_its_process_waits_and_dies_with_it() -> None:
    world = World(0)
    process = world.start_process("coordinator-0")
    tasks, work, done = SimulatedTasks(process), [1, 2, 3], []

    def step() -> bool:
        done.append(work.pop(0))
        return done[-1] != 3

    task, ready = tasks.repeat(step, lambda: bool(work), "writer"), tasks.event()
    assert done == []
    task.join()
    assert done == [1, 2, 3]
    world.at(1.0, ready.set)
    assert not ready.wait(0.5)
    assert ready.wait()

    tasks.repeat(lambda: bool(done.append(work.pop())) or True, lambda: bool(work), "writer")
    work.append(4)
    world.at(0.0, lambda: process.die(-9))
    with pytest.raises(ProcessDied):
        process.sleep(1.0)
    world.wait(1.0, never)
    assert done == [1, 2, 3]


# --- faults of one process ------------------------------------------------------------------


def make_process(kind: Kind, **more: Any) -> Process:
    return World(0, [Fault("coordinator-0", 3, kind, **more)]).start_process("coordinator-0")


def test_a_killed_process_makes_no_further_call() -> None:
    process = make_process("kill")
    process.call("read")
    process.call("read")
    for _ in range(2):
        with pytest.raises(ProcessDied):
            process.call("read")
    assert process.returncode == -9
    assert process.calls == 3


def test_a_failing_disk_fails_so_many_calls_and_no_message() -> None:
    process = make_process("error", errno=28, times=2)
    process.call("read")
    process.call("read")
    process.call("send")
    for _ in range(2):
        with pytest.raises(OSError, match="No space left") as error:
            process.call("write", "file")
        assert error.value.filename == "file"
    process.call("write")


@pytest.mark.parametrize("kind", ["stop", "slow"])
def test_others_go_on_while_a_process_is_stopped(kind: Kind) -> None:
    process = make_process(kind, seconds=5.0)
    seen: list[str] = []
    process.call("read")
    process.world.at(1.0, lambda: seen.append("of others"))
    process.world.at(2.0, lambda: seen.append("own"), process)
    process.call("read")
    process.call("read")
    assert seen == ["of others"]
    process.sleep(0.1)
    assert seen == ["of others", "own"]
    assert process.count_beats(0.0) == (2 if kind == "stop" else 52)


@pytest.mark.parametrize("seconds", [1.0, None], ids=["time is over", "ready"])
def test_a_thread_that_a_call_blocks_goes_on_first(seconds: float | None) -> None:
    """It may be under a lock, for which another thread of its process would wait for ever."""
    process = make_process("slow", seconds=5.0)
    world = process.world
    seen: list[str] = []

    def read() -> None:
        for _ in range(3):
            process.call("read")
        seen.append("blocked thread")

    def pass_time() -> None:  # as a call of another process does
        world.now += 0.1

    def plan() -> None:
        world.at_time(process.blocked_until - 2e-9, pass_time)
        world.at_time(process.blocked_until - 1e-9, partial(seen.append, "event"), process)

    Fiber(process, read)
    world.at(1.0, plan)
    process.wait(seconds, lambda: world.now > 4.0)
    seen.append("main thread")
    process.sleep(1.0)
    assert seen == ["blocked thread", "main thread", "event"]
    assert world.now > 6.0


def test_only_the_wall_clock_jumps() -> None:
    process = make_process("jump", seconds=-1000.0)
    clock = SimulatedClock(process)
    before = clock.time(), clock.monotonic(), clock.perf_counter()
    for _ in range(3):
        process.call("read")
    assert clock.time() - before[0] == pytest.approx(-1000.0, abs=0.01)
    assert clock.monotonic() - before[1] == pytest.approx(0.0, abs=0.01)
    assert clock.perf_counter() - before[2] == pytest.approx(0.0, abs=0.01)


def test_a_power_loss_ends_all_processes() -> None:
    process = make_process("power")
    other, lost = process.world.start_process("worker-0"), []
    process.world.on_power_loss.append(lambda: lost.append(True))
    process.call("read")
    process.call("read")
    with pytest.raises(ProcessDied):
        process.call("read")
    assert other.is_dead
    assert lost == []
    process.world.start_process("coordinator-1")
    assert lost == [True]


def test_a_fault_is_one_line_of_english() -> None:
    rng = random.Random(0)
    kinds: list[Kind] = ["kill", "stop", "error", "power"]
    texts = [str(draw_fault(rng, {"worker-3": 20}, (kind,))) for kind in kinds]
    assert texts[0] == "worker-3 is killed at its call 14"
    assert texts[3].startswith("the machine loses power at call ")


# --- messages -------------------------------------------------------------------------------


def connect(*faults: Fault) -> tuple[World, SimulatedChannel, SimulatedChannel]:
    world = World(0, faults)
    ours, theirs = make_pair(world.start_process("coordinator-0"), world.start_process("worker-0"))
    return world, SimulatedChannel(ours), SimulatedChannel(theirs)


def receive_all(world: World, channel: SimulatedChannel) -> Iterator[bytes | str]:
    """Yield what arrives within a second, and how the connection ends."""
    for _ in range(100):
        world.wait(0.01, never)
        try:
            yield from channel.receive()
        except (EOFError, OSError) as error:
            yield type(error).__name__
            return


def test_messages_arrive_in_their_order() -> None:
    world, ours, theirs = connect()
    sent = [b"a" * 10, b"b" * 100_000, b"c"]
    for message in sent:
        ours.send(message)
    assert [*receive_all(world, theirs)] == sent
    large = b"d" * 1_000_000
    ours.send(large)
    assert ours.has_unsent
    arrived: list[bytes] = []
    while not arrived:
        world.wait(0.01, never)
        arrived = theirs.receive()
        ours.flush()
    assert arrived == [large]


def test_what_a_dead_process_has_sent_arrives_before_its_end() -> None:
    world, ours, theirs = connect()
    ours.send(b"a")
    world.wait(0.01, never)
    ours.socket.process.die(-9)
    assert [*receive_all(world, theirs)] == [b"a", "EOFError"]


def test_the_last_message_of_a_dying_process_may_be_cut() -> None:
    results = set()
    for number in range(30):
        world = World(number)
        pair = make_pair(world.start_process("coordinator-0"), world.start_process("worker-0"))
        ours, theirs = map(SimulatedChannel, pair)
        ours.send(b"a" * 10)
        pair[0].process.die(-9)
        results.add((*receive_all(world, theirs),))
    assert results == {(b"a" * 10, "EOFError"), ("EOFError",)}


def test_a_delayed_message_holds_back_those_after_it() -> None:
    world, ours, theirs = connect(Fault("coordinator-0", 1, "delay", 0.5))
    ours.send(b"a")
    ours.send(b"b")
    world.wait(0.4, never)
    assert theirs.receive() == []
    world.wait(0.2, never)
    assert theirs.receive() == [b"a", b"b"]


def test_a_doubled_message_arrives_twice() -> None:
    world, ours, theirs = connect(Fault("coordinator-0", 1, "double"))
    ours.send(b"a")
    ours.send(b"b")
    assert [*receive_all(world, theirs)] == [b"a", b"a", b"b"]


def test_a_cut_message_breaks_the_connection() -> None:
    world, ours, theirs = connect(Fault("coordinator-0", 2, "cut"))
    ours.send(b"a")
    ours.send(b"b" * 100)
    assert [*receive_all(world, theirs)] == [b"a", "EOFError"]
    with pytest.raises(OSError, match="the peer has gone"):
        ours.send(b"c")
    with pytest.raises(EOFError):
        ours.receive()


# --- the real executor ------------------------------------------------------------------------


class Run:
    """Trains one trial in order, without a coordinator; another process continues a dead one."""

    def __init__(self, world: World, folder: Path, workers: int = 2) -> None:
        self.world = world
        self.workers = workers
        self.folder = folder
        self.events: list[Any] = []
        folders = RunFolders(str(folder), str(folder), str(folder))
        data: Any = SimulatedData((10,) * 12)
        self.context = RunContext(
            None,  # type: ignore[arg-type]
            data,
            folders,
            batches=Batches(shuffle="shards"),
            program=NONE,
        )

    def mount(self, process: Process) -> Disk:
        return Disk()

    def start(self, name: str = "coordinator-0") -> LocalExecutor:
        machine = start_machine(self.world, name, self.mount)
        executor = make_executor(machine, self.workers, self.mount)
        self.idle = executor.start(self.context)
        return executor

    def make_task(self, position: int, dispatch: int, **more: Any) -> Task:
        epoch, step = divmod(position, ORDER.num_parts)
        part = ORDER.visits(0, epoch)[step]
        return Task(
            0,
            CONFIG,
            epoch,
            step,
            part,
            position=position,
            dispatch=dispatch,
            **{"attempt": 0, **more},
        )

    def train(self, executor: LocalExecutor, units: int, rng: random.Random) -> None:
        """Train from the committed state on, on any worker; queue a unit now and then."""
        slots = _core.Slots(self.folder / "0", True)
        # A worker of a dead coordinator may still read what it was sent, which no slots have seen.
        dispatch = slots.attempt() + UNSEEN
        slots.fence(dispatch)
        position = (slots.committed() or (0,))[0]
        running: dict[int, list[Task]] = {}
        while position < units:
            if not running:
                worker = rng.choice(self.idle)
                running[worker] = [self.make_task(position, dispatch)]
                executor.submit(worker, running[worker][0])
                dispatch += 1
            ((worker, tasks),) = running.items()
            if len(tasks) == 1 and position + 1 < units and rng.random() < 0.5:
                tasks.append(self.make_task(position + 1, dispatch, after=tasks[0].dispatch))
                executor.queue(worker, tasks[1])
                dispatch += 1
            for event in executor.wait(5.0):
                self.events.append(event)
                if isinstance(event, UnitDone):
                    assert event.task == running[worker].pop(0)
                    position += 1
                    self.check(event, position)
                    if not running[worker]:
                        del running[worker]
                elif isinstance(event, WorkerLost):
                    running.pop(event.worker, None)
                    self.idle.remove(event.worker)
                    while len(self.idle) < self.workers:
                        self.idle.append(self.replace(executor, event.worker))
                else:
                    assert isinstance(event, UnitFailed)
                    del running[worker]
        executor.close()

    def replace(self, executor: LocalExecutor, worker: int) -> int:
        while True:
            try:
                return executor.replace(worker)
            except Exception as error:
                assert "there is no memory" in str(error)

    def check(self, event: UnitDone, units: int) -> None:
        assert event.state.hash == right_hash(CONFIG, 0, ORDER, units)
        if event.metrics is not None:
            assert event.metrics == right_metrics(CONFIG, 0, ORDER, units // ORDER.num_parts)


def train(world: World, folder: Path, units: int, workers: int = 2) -> Run:
    run = Run(world, folder, workers)
    for coordinator in range(10):
        try:
            executor = run.start(f"coordinator-{coordinator}")
            run.train(executor, units, random.Random(world.seed))
            break
        except ProcessDied:
            continue
    slots = _core.Slots(folder / "0", False)
    state = _core.unpack_state(slots.view(units))
    assert Model.from_state(state) == train_units(CONFIG, 0, ORDER, units)
    assert state["model"]["value"] == right_value(CONFIG, 0, ORDER, units)
    return run


def list_losses(run: Run) -> list[str]:
    return [event.reason for event in run.events if isinstance(event, WorkerLost)]


def test_the_executor_trains_on_simulated_workers(tmp_path: Path) -> None:
    world = World(0)
    run = train(world, tmp_path, 6)
    assert [type(event) for event in run.events] == [UnitDone] * 6
    assert world.struck == []
    world.wait(1.0, never)
    assert [process.name for process in world.processes if not process.is_dead] == ["coordinator-0"]


def test_the_watchdog_reports_a_worker_that_hangs(tmp_path: Path) -> None:
    faults = [Fault("worker-0", 8, "late beats", 60.0), Fault("worker-0", 8, "slow", 20.0)]
    losses = list_losses(train(World(0, faults), tmp_path, 6, workers=1))
    assert losses == ["the worker process hangs: it sent no heartbeat for 10 seconds"]


def test_answers_show_that_a_worker_without_heartbeats_lives(tmp_path: Path) -> None:
    world = World(0, [Fault("worker-0", 8, "late beats", 60.0)])
    assert list_losses(train(world, tmp_path, 60, workers=1)) == []
    assert len(world.struck) == 1


def test_the_watchdog_reports_a_stopped_worker(tmp_path: Path) -> None:
    fault = Fault("worker-0", 8, "stop", 60.0)
    losses = list_losses(train(World(0, [fault]), tmp_path, 6, workers=1))
    assert losses == ["the worker process was stopped: it sent no heartbeat for 10 seconds"]


def test_a_shorter_stop_loses_no_worker(tmp_path: Path) -> None:
    faults = [Fault("worker-0", 8, "stop", 5.0), Fault("coordinator-0", 8, "stop", 60.0)]
    world = World(0, faults)
    assert list_losses(train(world, tmp_path, 6, workers=1)) == []
    assert len(world.struck) == 2


def test_a_killed_worker_is_lost_by_its_signal(tmp_path: Path) -> None:
    run = train(World(0, [Fault("worker-0", 8, "kill")]), tmp_path, 6, workers=1)
    assert list_losses(run) == ["the worker process was ended by SIGKILL"]


def test_workers_outlive_their_coordinator_for_a_moment(tmp_path: Path) -> None:
    ends = []
    for seed in range(20):
        world = World(seed, [Fault("coordinator-0", 12, "kill")])
        run = Run(world, tmp_path / str(seed))
        run.folder.mkdir()
        with pytest.raises(ProcessDied):
            run.train(run.start(), 6, random.Random(seed))
        died = world.now
        world.wait(None, lambda: all(process.is_dead for process in world.processes))  # noqa: B023
        ends.append(world.now - died)
    assert 0.05 < max(ends) < 0.2


def test_a_doubled_answer_costs_its_worker(tmp_path: Path) -> None:
    losses = []
    for seed in range(20):
        folder = tmp_path / str(seed)
        folder.mkdir()
        world = World(seed, [Fault("worker-0", 8, "double")])
        losses += list_losses(train(world, folder, 6, workers=1))
    assert {*losses} == {"the worker process sent an unexpected UnitDone"}


KINDS: tuple[Kind, ...] = ("kill", "stop", "slow", "delay", "cut", "late beats", "jump", "power")


@pytest.mark.parametrize("block", range(10))
def test_one_trial_is_trained_right_with_any_faults(tmp_path: Path, block: int) -> None:
    struck = 0
    for seed in range(20 * block, 20 * block + 20):
        rng = random.Random(seed)
        names = {f"coordinator-{n}": 60 for n in range(2)} | {f"worker-{n}": 40 for n in range(4)}
        faults = [draw_fault(rng, names, KINDS) for _ in range(rng.randint(0, 6))]
        folder = tmp_path / str(seed)
        folder.mkdir()
        world = World(seed, faults)
        train(world, folder, 9)
        struck += len(world.struck)
    assert struck > 10


def test_one_seed_decides_everything(tmp_path: Path) -> None:
    def run(name: str) -> tuple[Any, ...]:
        folder = tmp_path / name
        folder.mkdir()
        faults = [Fault("worker-0", 9, "kill"), Fault("coordinator-0", 30, "stop", 20.0)]
        world = World(7, faults)
        events = train(world, folder, 9).events
        events = [replace(e, state=None) if isinstance(e, UnitDone) else e for e in events]
        return world.now, [(process.name, process.calls) for process in world.processes], events

    assert run("a") == run("b")

"""Supervises one worker process on a node, for a coordinator on another.

The process has the same protection as on one machine: heartbeats, a time limit per unit, redirected
output, and it ends with its parent. The supervisor, a part of an agent (`cerebro.cluster.agent`),
passes tasks to it, and states to and from other nodes. It imports neither PyTorch nor the user's
code, and survives a crash of a trial.

Every unit carries the trial's dispatch number, which only grows. The supervisor can therefore
reject a call that arrives late or twice.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cerebro._core as _core
from cerebro.cluster.engine import find_own_gpu
from cerebro.cluster.messages import (
    Begin,
    DataAt,
    JobResult,
    NodeReport,
    Sent,
    StateIn,
    read_machine_id,
)
from cerebro.cluster.states import Fetcher, StateGone
from cerebro.cluster.wire import LOAN_SECONDS, SharedSocket
from cerebro.data import Dataset
from cerebro.data.cache import Cache, cache_folder
from cerebro.data.manifest import read_manifest, shard_folder
from cerebro.data.placed import PlacedDataset
from cerebro.data.validation import Folds
from cerebro.errors import (
    CerebroError,
    CorruptDataError,
    DeviceError,
    InputError,
    WorkerError,
    text_of,
)
from cerebro.executors.local import LocalExecutor
from cerebro.machine import environment, resources
from cerebro.machine.devices import Device, is_gpu
from cerebro.machine.disk import Disk
from cerebro.machine.files import is_full
from cerebro.machine.local import LOCAL
from cerebro.machine.objects import Objects
from cerebro.run.states import KeptState, remove_slots, slots_stem
from cerebro.worker.messages import (
    CheckDone,
    Event,
    Job,
    RunContext,
    ShardFailed,
    ShardTask,
    Task,
    UnitDone,
    UnitFailed,
    WorkerShare,
)

MAX_LOG_BYTES = 1 << 20  # kept of a unit's output; the middle of a longer one is left out


class LateCall(Exception):
    """The task came after a later one of the same trial."""


class AgentProcess:
    """The worker process of an agent, and the unit that is queued at it."""

    def __init__(
        self, socket: SharedSocket, make_local: Callable[..., LocalExecutor] = LocalExecutor
    ) -> None:
        self._make_local = make_local
        self.is_leaving = False  # whether no more units are passed on
        self.is_ending = False
        self._socket = socket
        self._local: LocalExecutor | None = None
        self._number = -1  # in the local executor
        self._offered: Task | None = None  # a queued task that the process has not got yet
        self._passed: Task | None = None  # the one that it has got while it runs the task before
        self._answers: deque[Event] = deque()  # of the process, not taken yet
        self._runner = 0  # the thread in `run`

    @property
    def is_started(self) -> bool:
        return self._local is not None

    @property
    def has_queue(self) -> bool:
        """Whether the process goes on with another unit by itself."""
        return self._passed is not None

    def start(self, context: RunContext, gpu: Device | None) -> None:
        self._local = self._make_local(
            1, context.exactness.threads, fresh=True, seats=[gpu], fork=False
        )
        (self._number,) = self._local.start(context)

    def restart(self) -> None:
        """Start another process. If this raises CerebroError, no process is left."""
        if self._local is not None:
            try:
                self._number = self._local.replace(self._number)
            except CerebroError:
                self._local = None
                raise

    def cancel(self) -> None:
        if self._local is not None:
            with contextlib.suppress(KeyError):
                self._local.cancel(self._number)

    def offer(self, task: Job) -> None:
        """Queue a unit, from any thread, if the one before it runs; `run` awaits its answer."""
        if isinstance(task, Task) and task.after is not None:
            self._offered = task
            if threading.get_ident() != self._runner:
                self._socket.wake()

    def run(self, task: Job) -> Event:
        """Run a task, or await it if it was passed on; return its event."""
        assert self._local is not None
        self._runner = threading.get_ident()
        passed, self._passed = self._passed, None
        if passed is None and not self.is_ending:
            self._local.submit(self._number, task)
        while not self._answers:
            if self.is_ending:
                raise WorkerError("the worker's supervisor ends")
            self._answers.extend(self._wait(self._local, task))
        event = self._answers.popleft()
        if not isinstance(event, UnitDone):
            self._passed = None  # the process has dropped it
        return event

    def _wait(self, local: LocalExecutor, running: Job) -> Sequence[Event]:
        """Queue the offered unit, and return the process's events; none after a wake-up."""
        try:
            self._socket.borrow()  # before it looks for an offer: the next one then wakes it
            self._pass_on(local, running)
            events = local.wait(wake=self._socket)
        finally:
            self._socket.borrow(LOAN_SECONDS)
        if not events:
            self._socket.handle_messages()
        return events

    def _pass_on(self, local: LocalExecutor, running: Job) -> None:
        offered = self._offered
        if offered is None or self._passed is not None or self.is_leaving:
            return
        if isinstance(running, Task) and offered.may_follow(running.identity):
            self._passed = offered
            local.queue(self._number, offered)

    def stop(self) -> None:
        """Have `run` end soon; the process runs on."""
        self.is_ending = True  # before the wake-up: `run` checks it after each one
        self._socket.wake()

    def close(self) -> None:
        """End the process. No other thread may be in `run`, which uses what is closed here."""
        if self._local is not None:
            self._local.close(kill=True)
            self._local = None


class TrialFiles:
    """What trials leave in a folder of the agent: slots with their states, and output."""

    def __init__(self, state_dir: Path, log_dir: Path | None, disk: Disk = LOCAL.disk) -> None:
        self.state_dir = state_dir
        self._disk = disk
        self._log_dir = log_dir  # of output that is to be sent; None: it is written into the run
        self._log_bytes: dict[int, int] = {}  # by trial: the output in its file that was taken
        self._made: dict[int, int] = {}  # positions of the states in the slots here
        self._slots: dict[int, _core.Slots] = {}

    def has_state(self, task: Task) -> bool:
        """Whether the state with which a unit begins was made here, in the trial's slots.

        A unit that begins with a kept state does not look there, even if its trial went back to the
        state that its slots here have.
        """
        is_kept = task.origin is not None or task.clone_of is not None
        return not is_kept and self._made.get(task.trial) == task.position

    def write_state(self, task: Task, state: StateIn, packed: Any) -> Task:
        """Write a state to a file for the process; the file and its memory pages are reused."""
        file = self.state_dir.parent / "state.in"
        self._disk.write_over(file, packed, 0o600)
        if task.clone_of is not None:
            return replace(task, clone_of=replace(task.clone_of, file=str(file)))
        return replace(task, origin=KeptState(str(file), state.state_hash))

    def map_state(self, task: Task) -> Any:
        """Return the state after a unit, as a memory map of its slot."""
        slots = self._slots.get(task.trial)
        if slots is None:
            slots = self._disk.open_slots(slots_stem(self.state_dir, task.trial), create=False)
            self._slots[task.trial] = slots
        packed = slots.view(task.position + 1)
        self._made[task.trial] = task.position + 1
        return packed

    def take_log(self, trial: int, *, goes_on: bool) -> bytes:
        """Return the trial's new output; `goes_on`: the process is writing more of it."""
        if self._log_dir is None:
            return b""
        file = self._log_dir / f"{trial}.log"
        before = self._log_bytes.pop(trial, 0)
        try:
            with file.open("rb") as log:
                log.seek(before)
                text = log.read()
            if goes_on:
                self._log_bytes[trial] = before + len(text)
            else:
                file.unlink()
        except FileNotFoundError:
            return b""
        if len(text) > MAX_LOG_BYTES:
            half = MAX_LOG_BYTES // 2
            gap = f"\n... {len(text) - MAX_LOG_BYTES} bytes ...\n".encode()
            text = text[:half] + gap + text[-half:]
        return text

    def forget(self, trial: int) -> None:
        self._made.pop(trial, None)
        slots = self._slots.pop(trial, None)
        if slots is not None:
            slots.close()
        remove_slots(self.state_dir, trial, self._disk)

    def close(self) -> None:
        for trial in list(self._slots):
            self.forget(trial)


class Supervisor:
    """One worker on a node.

    `number` is the agent's; `node` is the id of its node if nodes can have several agents.
    `fetcher` fetches the states of other agents. `find_gpu` returns the worker's GPU, or raises
    DeviceError if it cannot be used. `make_local` makes the executor of the worker process.
    """

    def __init__(
        self,
        number: str,
        fetcher: Fetcher,
        socket: SharedSocket,
        *,
        node: str = "",
        find_gpu: Callable[[], Device] = find_own_gpu,
        disk: Disk = LOCAL.disk,
        make_local: Callable[..., LocalExecutor] = LocalExecutor,
    ) -> None:
        self.process = AgentProcess(socket, make_local)
        self.fetcher = fetcher
        self._node = node or number
        self._find_gpu = find_gpu
        self._disk = disk
        self._lock = threading.Lock()
        self._cache: Cache | None = None
        self._opening = threading.Lock()  # two caches of one process would have two scratch folders
        self._files = TrialFiles(Path(os.devnull), None)  # until the run begins: no folder
        self._trouble: Exception = WorkerError("the worker has not been started")
        self._dispatched: dict[int, int] = {}
        self._done: tuple[int, int] | None = None  # the last task, if it was a unit that is done
        self._ended: set[int] = set()  # trials of which the process must still be told
        self._gone: set[str] = set()  # agents

    # The coordinator calls most public methods by name, with messages: `agent.call("begin", ...)`
    # or `agent.control("receive", ...)` in executor.py, supply.py, admission.py and hub.py of this
    # folder. `Agent._begin_call` looks the names up.

    # --- before a run ------------------------------------------------------

    def report(
        self, threads: int, token: str, data: Sequence[tuple[Sequence[str], str]], on_gpu: bool
    ) -> NodeReport:
        """Describe this node.

        `token` is a folder that the coordinator has made beside the run's folder. `data` has the
        possible paths and the checksum of each dataset. `on_gpu` adds the worker's GPU.
        """
        gpu = no_gpu = ""
        if on_gpu:
            try:
                gpu = self._find_gpu().label
            except DeviceError as error:
                no_gpu = text_of(error)
        return NodeReport(
            node=self._node,
            host=os.uname().nodename,
            place=self._the_cache.place,
            machine=read_machine_id(),
            environment=environment.describe(threads),
            shares_run=_writes_like_its_owner(token),
            at=tuple(_find_data(paths, checksum) for paths, checksum in data),
            gpu=gpu,
            no_gpu=no_gpu,
        )

    def begin_data(self, manifest: bytes) -> list[int]:
        """Store a dataset's manifest; return the shards that are in the cache."""
        with self._lock:
            return self._the_cache.begin(manifest)

    def receive(self, checksum: str, shard: int, name: str, offset: int, piece: Any) -> None:
        with self._lock:
            self._the_cache.receive(checksum, shard, name, offset, piece)

    def finish(self, checksum: str, shard: int) -> None:
        with self._lock:
            self._the_cache.finish(checksum, shard)

    def pull(self, url: str, checksum: str, shards: Sequence[int]) -> int:
        """Copy shards from object storage, while other calls go on; return the number of bytes."""
        return self._the_cache.pull(Objects(url), checksum, shards)

    def forget_damaged(self, checksum: str, shards: Sequence[int]) -> None:
        self._the_cache.forget_damaged(checksum, shards)

    def data_folders(self, checksums: Sequence[str]) -> list[str]:
        return [str(self._the_cache.data(checksum)) for checksum in checksums]

    def begin(self, begin: Begin) -> None:
        """Start the worker process; failures are reported by later tasks."""
        try:
            self._begin(begin)
        except Exception as error:
            self._trouble = error

    def _begin(self, begin: Begin) -> None:
        context = self._open_run(begin)
        folders = context.folders
        logs = None if begin.shares_run else Path(folders.logs)
        self._files = TrialFiles(Path(folders.slots), logs, self._disk)
        gpu = None
        if is_gpu(context.device):
            gpu = self._find_gpu()
            gpu = replace(gpu, memory=int(gpu.memory * begin.gpu_share))
        self.process.start(context, gpu)

    def _open_run(self, begin: Begin) -> RunContext:
        """Return the run's context for the worker process, with this agent's own folders."""
        for entry in begin.path:  # the coordinator's import path, as far as it exists here
            if entry not in sys.path and os.path.exists(entry):  # noqa: PTH110
                sys.path.append(entry)
        sys.argv[:] = begin.argv
        with contextlib.suppress(OSError):
            os.chdir(begin.directory)
        for data in begin.data:
            if data.in_parts:
                self._the_cache.use(Path(data.spec["path"]).name)
        folder = self._the_cache.scratch()
        settings = dict(begin.settings)
        threads = int(settings["exactness"].threads)
        own = {"slots": folder / "slots"}
        if not begin.shares_run:
            own |= {"states": folder / "epochs", "logs": folder / "trials"}
        for place in own.values():
            place.mkdir(exist_ok=True)
        places = {name: str(place) for name, place in own.items()}
        settings["folders"] = replace(settings["folders"], **places)
        settings["share"] = WorkerShare(
            loader_threads=int(resources.usable_cores() > begin.workers_here * threads),
            live_bytes=resources.available_memory() // (2 * begin.workers_here),
        )
        train, *others = map(_open_data, begin.data)
        return RunContext(
            build=Sent(begin.build),
            train=train,
            validation=others[0] if others else None,
            folds=None if begin.folds is None else Folds.from_json(train, begin.folds),
            **settings,
        )

    # --- units -------------------------------------------------------------

    def run(self, task: Job, state: StateIn | None) -> tuple[JobResult, Any]:
        """Run a task; return its result and the packed state that it left.

        Raises WorkerError if there is no process, and LateCall if a later task of the same trial
        arrived before.
        """
        if not self.process.is_started:
            if isinstance(self._trouble, CorruptDataError):
                return JobResult(_make_data_failure(task, text_of(self._trouble))), None
            raise WorkerError(text_of(self._trouble))
        if isinstance(task, ShardTask):
            self._the_cache.make_room(task.nbytes)
        if not isinstance(task, Task):
            return JobResult(self.process.run(task)), None
        if not task.may_follow(self._done) or (task.after is not None and self.process.is_leaving):
            return JobResult(None, is_dropped=True), None
        self._done = None
        if task.dispatch <= self._dispatched.get(task.trial, -1):
            raise LateCall(f"dispatch {task.dispatch} of trial {task.trial} arrives too late")
        self._dispatched[task.trial] = task.dispatch
        self._ended.update(task.ended)
        self._ended.discard(task.trial)
        fetched = 0
        if state is not None and not self._files.has_state(task):
            try:
                packed = self.fetcher.fetch(
                    state.ref, lambda: self.process.is_ending or state.agent in self._gone
                )
                fetched = len(packed)
                task = self._files.write_state(task, state, packed)
                del packed
            except StateGone as error:
                return JobResult(None, str(error)), None
            except OSError as error:
                if not is_full(error):
                    raise
                return JobResult(None, text_of(error), is_full=True), None
        # Not before the state is here: without this task, the process would keep slots without
        # files, and write the trial's next state where it is not looked for.
        ended = tuple(sorted(self._ended))
        if not self.process.has_queue and (task.after is not None or task.ended != ended):
            task = replace(task, ended=ended, after=None)
        for trial in ended:
            self._files.forget(trial)
        self._ended.clear()
        event = self.process.run(task)
        packed = None
        if isinstance(event, UnitDone):
            packed = self._files.map_state(task)
            self._done = task.identity
        elif isinstance(event, UnitFailed) and event.kind == "data":
            del self._dispatched[task.trial]  # the unit is sent again once the data is here
        log = self._files.take_log(task.trial, goes_on=self.process.has_queue)
        return JobResult(event, log=log, fetched=fetched), packed

    def read_piece(self, shard: int, name: str, offset: int, size: int) -> bytes:
        with (self._files.state_dir / shard_folder(shard) / name).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def drop_made(self, shard: int) -> None:
        shutil.rmtree(self._files.state_dir / shard_folder(shard), ignore_errors=True)

    def keep_made(self, manifest: bytes, shards: Sequence[int]) -> None:
        """Move the files of `ShardTask`s into the cache, as shards of the finished dataset."""
        with self._lock:
            self._the_cache.adopt(self._files.state_dir, manifest, shards)

    def restart(self) -> None:
        try:
            self.process.restart()
        except CerebroError as error:
            self._trouble = error

    def cancel(self) -> None:
        self.process.cancel()

    def mark_agent_lost(self, agent: str) -> None:
        self._gone.add(agent)

    def ping(self) -> int:
        """Return the process id, to show that this supervisor is alive."""
        return os.getpid()

    def stop(self) -> None:
        """Have other threads end their calls soon; the process runs on."""
        self.process.stop()
        with self._opening:
            if self._cache is not None:
                self._cache.stop()

    def end(self) -> None:
        """End the process, as `AgentProcess.close` does, and remove its files."""
        self.process.close()
        self._files.close()
        if self._cache is not None:
            with self._lock:  # the cache is not receiving a shard
                self._cache.close()

    @property
    def _the_cache(self) -> Cache:
        with self._opening:
            if self._cache is None:
                self._cache = Cache(cache_folder())
            return self._cache


def _open_data(data: DataAt) -> Dataset:
    kind = PlacedDataset if data.in_parts else Dataset
    try:
        return kind.from_spec(data.spec)
    except (InputError, OSError) as error:
        raise CorruptDataError(text_of(error)) from error


def _make_data_failure(task: Job, cause: str) -> Event:
    """Return the event of a task whose data cannot be opened, as from a worker process."""
    if isinstance(task, Task):
        return UnitFailed(-1, task, "data", cause)
    if isinstance(task, ShardTask):
        return ShardFailed(-1, task, "data", cause)
    return CheckDone(-1, (), error=cause)


def _find_data(paths: Sequence[str], checksum: str) -> str | None:
    """Return the first path that has the dataset."""
    for path in paths:
        with contextlib.suppress(CerebroError, OSError):
            if read_manifest(path).checksum == checksum:
                return path
    return None


def _writes_like_its_owner(folder: str) -> bool:
    """Return whether files that this process makes in a folder belong to its owner."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid == os.stat(folder).st_uid  # noqa: PTH116
    except OSError:
        return False

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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cerebro._core as _core
from cerebro.cluster.messages import Begin, DataAt, JobResult, NodeReport, StateIn, read_machine_id
from cerebro.cluster.opaque_pickle import Sent
from cerebro.cluster.states import StateGone
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
from cerebro.machine.files import is_full
from cerebro.machine.objects import Objects
from cerebro.machine.resources import available_memory
from cerebro.run.states import CloneOf, KeptState, remove_slots, slots_stem
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

MAX_LOG_BYTES = 1 << 20
"""The largest size of a unit's kept output, in bytes; the middle of a longer one is left out."""


class LateCall(Exception):
    """The task came after a later one of the same trial."""


class Supervisor(ABC):
    """One worker on a node; subclasses implement what depends on the cluster."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cache: Cache | None = None
        self._opening = threading.Lock()  # two caches of one process would have two scratch folders
        self._local: LocalExecutor | None = None
        self._inner = -1  # the process's number in the local executor
        self._trouble = "the worker has not been started"
        self._data_trouble = False
        self._dispatched: dict[int, int] = {}
        self._done: tuple[int, int] | None = None  # the last task, if it was a unit that is done
        self._offered: Task | None = None  # a queued task that the process has not got yet
        self._passed: Task | None = None  # the one that it has got while it runs the task before
        self._answers: deque[Event] = deque()  # of the process, not taken yet
        self._runner = 0  # the thread in `run`
        self.is_leaving = False
        self.is_ending = False
        self._log_bytes: dict[int, int] = {}  # by trial: the output in its file that was taken
        self._made: dict[int, int] = {}  # positions of the states in the slots here
        self._slots: dict[int, _core.Slots] = {}
        self._ended: set[int] = set()  # trials of which the process must still be told
        self._gone: set[str] = set()
        self._shares_run = True
        self._folder = Path()

    # The coordinator calls most public methods by name, with messages: `agent.call("begin", ...)`
    # or `agent.control("receive", ...)` in executor.py, supply.py, admission.py and hub.py of this
    # folder. `Agent._begin_call` looks the names up.

    # --- before a run ------------------------------------------------------

    def report(
        self,
        threads: int,
        token: str,
        data: Sequence[tuple[Sequence[str], str]],
        on_gpu: bool = False,
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
            node=self._get_node_id(),
            host=os.uname().nodename,
            place=self._the_cache.place,
            pid=os.getpid(),
            machine=read_machine_id(),
            cores=resources.usable_cores(),
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
        """Copy shards from object storage into the cache; return the number of bytes.

        Does not block other calls.
        """
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
            self._trouble = text_of(error)
            self._data_trouble = isinstance(error, CorruptDataError)

    def _begin(self, begin: Begin) -> None:
        for entry in begin.path:  # the coordinator's import path, as far as it exists here
            if entry not in sys.path and os.path.exists(entry):  # noqa: PTH110
                sys.path.append(entry)
        sys.argv[:] = begin.argv
        with contextlib.suppress(OSError):
            os.chdir(begin.directory)
        for data in (begin.train, begin.validation):
            if data is not None and data.in_parts:
                self._the_cache.use(Path(data.spec["path"]).name)
        self._folder = self._the_cache.scratch()
        self._shares_run = begin.shares_run
        settings = dict(begin.settings)
        threads = int(settings["exactness"].threads)
        own = {"slots": "slots"}
        if not begin.shares_run:
            own |= {"states": "epochs", "logs": "trials"}
        for sub in own.values():
            (self._folder / sub).mkdir(exist_ok=True)
        places = {name: str(self._folder / sub) for name, sub in own.items()}
        settings["folders"] = replace(settings["folders"], **places)
        settings["share"] = WorkerShare(
            loader_threads=int(resources.usable_cores() > begin.workers_here * threads),
            live_bytes=available_memory() // (2 * begin.workers_here),
        )
        train = _open_data(begin.train)
        context = RunContext(
            build=Sent(begin.build),
            train=train,
            validation=None if begin.validation is None else _open_data(begin.validation),
            folds=None if begin.folds is None else Folds.from_json(train, begin.folds),
            **settings,
        )
        self._log_dir, self._state_dir = Path(context.folders.logs), Path(context.folders.slots)
        seat = None
        if is_gpu(context.device):
            gpu = self._find_gpu()
            seat = replace(gpu, memory=int(gpu.memory * begin.gpu_share))
        self._local = LocalExecutor(1, threads, fresh=True, seats=[seat], fork=False)
        (self._inner,) = self._local.start(context)

    # --- units -------------------------------------------------------------

    def run(self, task: Job, state: StateIn | None) -> tuple[JobResult, Any]:
        """Run a task; return its result and the packed state that it left.

        Raises WorkerError if there is no process, and LateCall if a later task of the same trial
        arrived before.
        """
        self._runner = threading.get_ident()
        if self._local is None and self._data_trouble:
            return JobResult(_make_data_failure(task, self._trouble)), None
        if self._local is None:
            raise WorkerError(self._trouble)
        if isinstance(task, ShardTask):
            self._the_cache.make_room(task.nbytes)
        if not isinstance(task, Task):
            return JobResult(self._carry_out(task)), None
        if not task.may_follow(self._done) or (task.after is not None and self.is_leaving):
            return JobResult(None, is_dropped=True), None
        self._done = None
        if task.dispatch <= self._dispatched.get(task.trial, -1):
            raise LateCall(f"dispatch {task.dispatch} of trial {task.trial} arrives too late")
        self._dispatched[task.trial] = task.dispatch
        self._ended.update(task.ended)
        self._ended.discard(task.trial)
        fetched = 0
        if state is not None and self._made.get(task.trial) != task.position:
            try:
                packed = self._fetch(state)
                fetched = len(packed)
                task = self._write_state(task, state, packed)
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
        if self._passed is None and (task.after is not None or task.ended != ended):
            task = replace(task, ended=ended, after=None)
        for trial in ended:
            self._forget(trial)
        self._ended.clear()
        event = self._carry_out(task)
        packed = None
        if isinstance(event, UnitDone):
            packed = self._map_state(task)
            self._done = task.identity
            self._made[task.trial] = task.position + 1
        elif isinstance(event, UnitFailed) and event.kind == "data":
            del self._dispatched[task.trial]  # the unit is sent again once the data is here
        return JobResult(event, log=self._take_log(task.trial), fetched=fetched), packed

    def offer(self, task: Job) -> None:
        """Queue a unit at the process if it runs the unit before; `run` then awaits the answer.

        May be called by another thread than `run`.
        """
        if isinstance(task, Task) and task.after is not None:
            self._offered = task
            if threading.get_ident() != self._runner:
                self._wake_runner()

    @property
    def has_queue(self) -> bool:
        """Whether the process goes on with another unit by itself."""
        return self._passed is not None

    def read_piece(self, shard: int, name: str, offset: int, size: int) -> bytes:
        with (self._state_dir / shard_folder(shard) / name).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def drop_made(self, shard: int) -> None:
        shutil.rmtree(self._state_dir / shard_folder(shard), ignore_errors=True)

    def keep_made(self, manifest: bytes, shards: Sequence[int]) -> None:
        """Move the files of `ShardTask`s into the cache, as shards of the finished dataset."""
        with self._lock:
            self._the_cache.adopt(self._state_dir, manifest, shards)

    def restart(self) -> None:
        if self._local is not None:
            try:
                self._inner = self._local.replace(self._inner)
            except CerebroError as error:
                self._local, self._trouble = None, text_of(error)

    def cancel(self) -> None:
        if self._local is not None:
            with contextlib.suppress(KeyError):
                self._local.cancel(self._inner)

    def mark_agent_lost(self, agent: str) -> None:
        self._gone.add(agent)

    def ping(self) -> int:
        """Return the process id, to show that this supervisor is alive."""
        return os.getpid()

    def stop(self) -> None:
        """Have other threads end their calls soon; the process runs on."""
        self.is_ending = True  # before the wake-up: `run` checks it after each one
        with self._opening:
            if self._cache is not None:
                self._cache.stop()
        self._wake_runner()

    def end_process(self) -> None:
        """End the process. No other thread may be in `run`, which uses what is closed here."""
        if self._local is not None:
            self._local.close(kill=True)
            self._local = None

    def end(self) -> None:
        """End the process, as `end_process` does, and remove its files."""
        self.end_process()
        for trial in list(self._slots):
            self._forget(trial)
        if self._cache is not None:
            with self._lock:  # the cache is not receiving a shard
                self._cache.close()

    # --- what the cluster does -----------------------------------------------

    @abstractmethod
    def _get_node_id(self) -> str:
        """Return the node's id in the cluster."""

    @abstractmethod
    def _fetch(self, state: StateIn) -> Any:
        """Return a packed state; raise StateGone if it is lost."""

    @abstractmethod
    def _wait(self, local: LocalExecutor, running: Job) -> Sequence[Event]:
        """Queue the offered unit (`_queue_offered_unit`), and return the process's events.

        Returns none after `_wake_runner`.
        """

    @abstractmethod
    def _wake_runner(self) -> None:
        """Have `_wait` return; may be called by another thread."""

    def _find_gpu(self) -> Device:
        """Return the worker's GPU; raise DeviceError if it cannot be used."""
        raise DeviceError("this kind of cluster gives workers no GPU")

    # --- inside ------------------------------------------------------------

    @property
    def _the_cache(self) -> Cache:
        with self._opening:
            if self._cache is None:
                self._cache = Cache(cache_folder())
            return self._cache

    def _carry_out(self, task: Job) -> Event:
        """Run a task in the process, or await it if it was passed on; return its event."""
        assert self._local is not None
        passed, self._passed = self._passed, None
        if passed is None and not self.is_ending:
            self._local.submit(self._inner, task)
        while not self._answers:
            if self.is_ending:
                raise WorkerError("the worker's supervisor ends")
            self._answers.extend(self._wait(self._local, task))
        event = self._answers.popleft()
        if not isinstance(event, UnitDone):
            self._passed = None  # the process has dropped it
        return event

    def _queue_offered_unit(self, running: Job) -> None:
        assert self._local is not None
        offered = self._offered
        if not isinstance(running, Task) or offered is None:
            return
        if self._passed is not None or self.is_leaving:
            return
        if offered.may_follow(running.identity):
            self._passed = offered
            self._local.queue(self._inner, offered)

    def _write_state(self, task: Task, state: StateIn, packed: Any) -> Task:
        """Write a state to a file for the process; the file and its memory pages are reused."""
        file = self._folder / "state.in"
        fd = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
        with open(fd, "wb") as out:  # noqa: PTH123
            out.write(packed)
            out.truncate()
        if state.is_clone:
            return replace(task, clone_of=CloneOf(str(file), state.state_hash))
        return replace(task, origin=KeptState(str(file), state.state_hash))

    def _map_state(self, task: Task) -> Any:
        """Return the state that a unit has left, as a buffer that maps the slot."""
        slots = self._slots.get(task.trial)
        if slots is None:
            slots = self._slots[task.trial] = _core.Slots(
                slots_stem(self._state_dir, task.trial), False
            )
        return slots.view(task.position + 1)

    def _forget(self, trial: int) -> None:
        self._made.pop(trial, None)
        slots = self._slots.pop(trial, None)
        if slots is not None:
            slots.close()
        remove_slots(self._state_dir, trial)

    def _take_log(self, trial: int) -> bytes:
        """Return the trial's output, unless it is written into the run's folder."""
        if self._shares_run:
            return b""
        file = self._log_dir / f"{trial}.log"
        before = self._log_bytes.pop(trial, 0)
        try:
            with file.open("rb") as log:
                log.seek(before)
                text = log.read()
            if self.has_queue:  # the process is writing more of it
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


def _open_data(data: DataAt) -> Dataset:
    """Open a dataset; raise CorruptDataError if this fails."""
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
    """Return whether files that this process makes in a folder belong to the folder's owner.

    Otherwise the coordinator and this process might not be able to write each other's files.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid == os.stat(folder).st_uid  # noqa: PTH116
    except OSError:
        return False

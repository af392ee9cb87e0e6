"""Run the actor behind `cerebro.ray.trainable`: one for all proxies, with Cerebro's workers.

The actor belongs to the process that runs the Tuner and ends with it. It also closes its run and
ends if no proxy has used it for some time, which frees its cores. A run is a search, in a thread of
the actor, that trains the epochs requested by proxies.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cerebro.api.search import search
from cerebro.errors import CerebroError, InputError, text_of
from cerebro.executors.local import LocalExecutor
from cerebro.executors.wire import unpickle
from cerebro.integrations.ray_tune.requests import (
    Checkpoint,
    EpochRequest,
    RequestedTrials,
    TrainedEpoch,
    WakingExecutor,
)
from cerebro.machine.devices import CPU, Found, assign_devices, lookup
from cerebro.machine.guard import refuse
from cerebro.machine.libraries import apply_settings
from cerebro.machine.resources import available_memory
from cerebro.model import Info
from cerebro.run.owner import owner_of
from cerebro.run.recipe import WrappedBuild, call_build
from cerebro.run.records import EpochRecord
from cerebro.run.store import read_trials, reader

IDLE_SECONDS = 10.0
PROXY_BYTES = 120 << 20  # the memory of a proxy's process
CALLS = 10_000  # the most requests that may wait at the same time
UNKNOWN_EPOCHS = 1_000_000  # the epochs of a run if only Tune knows the actual number
WIDTH = 64  # the number of trials that train at a time; other proxies wait
CLOSE_SECONDS = 30.0
OWNER_SECONDS = 20.0
"""How long to wait for a process that still owns the run: Ray may start an engine again before the
process of the one that was killed has ended."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """The settings that all trials share."""

    build: Callable[..., Any]
    train: Any
    validation: Any
    workers: int
    threads: int
    epochs: int | None
    options: dict[str, Any] = field(default_factory=dict)  # more arguments of `cerebro.search`
    executor: Any = None  # None: `workers` processes on this machine
    gpus: int = 0  # how many of this machine's GPUs the workers use

    def make_executor(self) -> Any:
        """Return a new executor for one run; raise InputError if GPUs are missing."""
        if self.executor is not None:
            return copy.copy(self.executor)
        gpus = lookup() if self.gpus else Found()
        if len(gpus.devices) < self.gpus:
            raise InputError(
                f"Ray gives the engine of cerebro.ray.trainable {self.gpus} GPU(s), and "
                f"{len(gpus.devices)} can be used there ({gpus.problem}): give devices='cpu'"
            )
        names = gpus.names[: self.gpus] or [CPU]
        return LocalExecutor(self.workers, self.threads, seats=assign_devices(names, self.workers))


class Session:
    """A run that continues until it is closed; a run that is already in the folder is resumed."""

    def __init__(self, work: Work, folder: Path) -> None:
        self._work = work
        self._folder = folder
        self._requested = RequestedTrials(work.epochs, WIDTH)
        self.ask, self.shelve = self._requested.ask, self._requested.shelve
        self._result: Any = None
        self._thread = threading.Thread(target=self._search, name="search", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """End the run so that it can be resumed."""
        self._requested.close("the engine was closed")
        self._thread.join(CLOSE_SECONDS)

    def read_epoch(self, number: int, epoch: int) -> TrainedEpoch:
        record = self._read_record(number, epoch)
        return TrainedEpoch(Checkpoint(number, epoch, record.state_hash), dict(record.metrics))

    def keep(self, point: Checkpoint) -> None:
        """Keep a state; return when it is on disk."""
        self._requested.pin(point.trial, point.epoch)
        self.flush()

    def flush(self) -> None:
        """Wait until all trained epochs are stored."""
        if self._result is not None:
            self._result.saved.before_reading()

    def check(self, point: Checkpoint) -> None:
        """Raise InputError if a checkpoint's state is missing."""
        try:
            record = self._read_record(point.trial, point.epoch)
        except InputError:
            record = None
        if record is None or record.state_hash != point.state_hash or record.state_file is None:
            raise InputError(
                f"the checkpoint names trial {point.trial} after epoch {point.epoch}, whose state "
                f"is not in {self._folder}: checkpoints of cerebro.ray.trainable refer to "
                "states in that folder; give its current path as run="
            )

    def _read_record(self, number: int, epoch: int) -> EpochRecord:
        self.flush()
        with reader(self._folder) as connection:
            row = connection.execute("SELECT 1 FROM trials WHERE number = ?", (number,)).fetchone()
            records = [] if row is None else read_trials(connection, [number])
        stored = [done for record in records for done in record.epochs if done.epoch == epoch]
        if not stored:
            raise InputError(f"trial {number} has no stored epoch {epoch}")
        return stored[0]

    # --- the thread ------------------------------------------------------

    def _search(self) -> None:
        why = "the engine's run has ended"
        work, requested = self._work, self._requested
        try:
            end = time.monotonic() + OWNER_SECONDS
            while owner_of(self._folder) is not None and time.monotonic() < end:
                time.sleep(0.05)
            executor = work.make_executor()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the warnings would not be shown
                search(
                    work.build if work.epochs is not None else OpenEnded(work.build),
                    {},
                    work.train,
                    epochs=work.epochs or UNKNOWN_EPOCHS,
                    validation=work.validation,
                    searcher=requested,
                    workers=work.workers if work.executor is None else None,
                    threads=work.threads,
                    width=WIDTH,
                    run=self._folder,
                    if_exists="resume",
                    asynchronous=True,
                    progress=False,
                    callbacks=[requested, self],
                    executor=WakingExecutor(executor, requested.wake_pipe),
                    **work.options,
                )
        except BaseException as error:
            why = text_of(error, 2000) or type(error).__name__
        requested.close(why)
        requested.wake_pipe.close()

    def on_run_start(self, result: Any) -> None:
        self._result = result


class OpenEnded(WrappedBuild):
    """A ``build`` for trials whose number of epochs only Tune knows."""

    def __call__(self, config: Mapping[str, Any], info: Info) -> Any:
        return call_build(self.build, config, OpenInfo(info))


class OpenInfo:
    """An `Info` that raises InputError when `build` reads the number of epochs."""

    def __init__(self, info: Info) -> None:
        self._info = info

    def __getattr__(self, name: str) -> Any:
        if name in ("epochs", "total_steps"):
            raise InputError(
                f"build asks for info.{name}, which only Tune knows: give the epochs of a trial to "
                "cerebro.ray.trainable(..., epochs=)"
            )
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._info, name)


@dataclass(frozen=True)
class Spec:
    """The description of an engine; the same in every process that may start the engine.

    `name` is the actor's. `work` is a pickled `Work` that only the engine opens, so that proxies
    need no imports for it. `cpus` and `gpus` are those of all workers. `folder` is the run's; None:
    a folder in that of Tune's experiment.
    """

    name: str
    work: bytes
    cpus: int
    epochs: int | None
    folder: str | None
    cwd: str
    path: tuple[str, ...]
    variables: dict[str, str | None]
    """Environment variables that affect the bits; Ray sets some of them itself."""
    gpus: int = 0
    argv: tuple[str, ...] = ("",)  # the arguments of the program that runs the Tuner
    libraries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Process-wide settings of the program that runs the Tuner; its workers have them too."""


class Engine:
    """The actor that proxies call; they raise errors that it returns as ``{"error": ...}``."""

    def __init__(self, spec: Spec) -> None:
        os.chdir(spec.cwd)
        sys.path[:] = [*dict.fromkeys([*spec.path, *sys.path])]
        sys.argv[:] = spec.argv
        for name, value in spec.variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        apply_settings(spec.libraries)
        self._spec = spec
        self._sessions: dict[Path, Session] = {}
        self._proxies: dict[str, Path] = {}
        self._warned = False
        self._ending: asyncio.Future[None] | None = None

    @cached_property
    def _work(self) -> Work:
        work: Work = unpickle(self._spec.work)
        return work

    async def enter(self, proxy: str, folder: str) -> None:
        self._proxies[proxy] = Path(folder)
        need = len(self._proxies) * PROXY_BYTES
        if not self._warned and available_memory() < need // 2:
            self._warned = True
            logger.warning(
                "%d of Tune's trials are live, each a process of about 120 MB, and memory is "
                "running out: limit them with TuneConfig(max_concurrent_trials=), or use "
                "cerebro.ray.fit, which needs no processes",
                len(self._proxies),
            )

    async def leave(self, proxy: str, trial: int | None) -> None:
        """Remove a proxy that has ended or now runs a different trial."""
        folder = self._proxies.pop(proxy, None)
        session = None if folder is None else self._sessions.get(folder)
        if session is not None and trial is not None:
            session.shelve(trial)
        if not self._proxies:
            asyncio.get_running_loop().call_later(IDLE_SECONDS, self._end_if_idle)

    async def retire(self) -> None:
        """End this engine if no proxy uses it, so that a different one can start."""
        self._end_if_idle()

    async def train(self, proxy: str, folder: str, call: dict[str, Any]) -> dict[str, Any]:
        """Train an epoch, or return it from the store.

        Returns the fields of its `Checkpoint`, and ``metrics``; or ``error``.
        """
        self._proxies[proxy] = Path(folder)  # it may have registered before the engine restarted
        try:
            session = self._open_session(Path(folder))
            begin = Checkpoint(**call["begin"]) if call["begin"] is not None else None
            if begin is not None:
                await asyncio.to_thread(session.check, begin)
            request = EpochRequest(**{**call, "begin": begin})
            answer = await asyncio.wrap_future(session.ask(request))
            if isinstance(answer, TrainedEpoch):
                await asyncio.to_thread(session.flush)  # so that Tune knows only stored epochs
            else:
                answer = await asyncio.to_thread(session.read_epoch, answer, request.target - 1)
            return {**vars(answer.point), "metrics": answer.metrics}
        except CerebroError as error:
            return {"error": text_of(error, 2000)}

    async def keep(self, proxy: str, folder: str, point: dict[str, Any]) -> None:
        """Keep a state until the run's folder is deleted."""
        await asyncio.to_thread(self._open_session(Path(folder)).keep, Checkpoint(**point))

    def _end_if_idle(self) -> None:
        if not self._proxies and self._ending is None:
            self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        """Close the runs, and end this process unless a proxy has registered meanwhile."""
        import ray

        await asyncio.to_thread(self._close)
        self._ending = None
        if not self._proxies:
            ray.kill(ray.get_runtime_context().current_actor)

    def _open_session(self, folder: Path) -> Session:
        session = self._sessions.get(folder)
        if session is None or not session.is_open:
            session = self._sessions[folder] = Session(self._work, folder)
        return session

    def _close(self) -> None:
        for folder, session in list(self._sessions.items()):
            session.close()
            del self._sessions[folder]


_held: dict[str, Any] = {}
"""This process's handles: an actor ends with the last handle in the process that started it."""


def get_engine(spec: Spec, *, owner: bool) -> Any:
    """Return the engine; start it if it is not running.

    `owner` says whether this process runs the Tuner, on the machine with the data and the run.
    Raises InputError if the engine needs more cores or GPUs than its node has.
    """
    if owner:
        refuse("tune.Tuner(cerebro.ray.trainable(...)).fit")
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with contextlib.suppress(ValueError):  # the engine does not exist or has ended
        handle = ray.get_actor(spec.name)
        return _held.get(spec.name, handle)  # the engine ends with the handle that started it
    node = ray.get_runtime_context().get_node_id()
    for name in list(_held):
        try:
            ray.get_actor(name).retire.remote()
        except ValueError:
            del _held[name]
    if owner:
        _check_room(spec, node)
    actor = ray.remote(Engine).options(
        name=spec.name,
        get_if_exists=True,
        num_cpus=spec.cpus,
        num_gpus=spec.gpus,
        max_restarts=3,
        max_task_retries=3,  # the store answers a repeated call
        max_concurrency=CALLS,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=not owner),
    )
    engine = _held[spec.name] = actor.remote(spec)
    return engine


def _check_room(spec: Spec, node: str) -> None:
    import ray

    resources = [n["Resources"] for n in ray.nodes() if n["NodeID"] == node]
    there = resources[0] if resources else {"CPU": spec.cpus, "GPU": spec.gpus}
    cores, gpus = (int(there.get(name, 0)) for name in ("CPU", "GPU"))
    if spec.gpus > gpus:
        raise InputError(
            f"cerebro.ray.trainable: its workers need {spec.gpus} GPU(s), but Ray has "
            f"{gpus} on this node: give devices='cpu', or ray.init(num_gpus=)"
        )
    if spec.cpus > cores:
        raise InputError(
            f"cerebro.ray.trainable: its workers need {spec.cpus} CPUs, but Ray has {cores} on "
            f"this node: give workers={max(1, cores)} or less (times threads), or "
            "ray.init(num_cpus=)"
        )

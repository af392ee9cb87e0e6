"""Run a search in a thread that trains the epochs requested by proxies of Ray Tune."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cerebro.api.search import search
from cerebro.errors import InputError, text_of
from cerebro.executors.local import LocalExecutor
from cerebro.integrations.ray_tune.requests import (
    Checkpoint,
    RequestedTrials,
    TrainedEpoch,
    WakingExecutor,
)
from cerebro.machine.devices import CPU, Found, assign_devices, lookup
from cerebro.model import Info
from cerebro.run.owner import owner_of
from cerebro.run.recipe import WrappedBuild, call_build
from cerebro.run.records import EpochRecord
from cerebro.run.store import read_trials, reader

UNKNOWN_EPOCHS = 1_000_000
"""The number of epochs of a run if only Tune knows the actual number."""
WIDTH = 64
"""The number of trials that train at a time; other proxies wait."""
CLOSE_SECONDS = 30.0
OWNER_SECONDS = 20.0
"""How long to wait for a process that still owns the run: Ray may start an engine again before the
process of the one that was killed has ended."""


@dataclass(frozen=True)
class Work:
    """The settings that all trials share."""

    build: Callable[..., Any]
    train: Any
    validation: Any
    workers: int
    threads: int
    epochs: int | None
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `cerebro.search`."""
    executor: Any = None
    """The executor; None: `workers` processes on this machine."""
    gpus: int = 0
    """How many of this machine's GPUs the workers use."""

    def make_executor(self) -> Any:
        """Return a new executor for one run.

        Raises InputError if there are fewer GPUs than Ray has assigned to this process.
        """
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
        self._result: Any = None
        self._thread = threading.Thread(target=self._search, name="search", daemon=True)
        self.ask = self._requested.ask
        self.shelve = self._requested.shelve
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """End the run so that it can be resumed."""
        self._requested.close("the engine was closed")
        self.join(CLOSE_SECONDS)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

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

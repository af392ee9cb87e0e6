"""Agents as long tasks of a Dask cluster, for `cerebro.dask.Executor`."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import Any

from cerebro.cluster.connected_executor import EngineExecutor
from cerebro.cluster.engine import Engine, count_fitting_workers, format_visible_gpu, run_agent
from cerebro.cluster.keys import Ticket
from cerebro.errors import InputError, text_of
from cerebro.machine.imports import import_extra
from cerebro.worker.messages import RunContext

LOOK_SECONDS = 1.0  # how often, in seconds, to look for workers that have joined or left
RETRIES = 3
END_SECONDS = 10.0


class Executor(EngineExecutor):
    """Runs a search on a Dask cluster; pass it to `cerebro.search` as ``executor=``.

    A Dask worker with t threads gets t / `threads` workers of the search, at least one. Dask
    workers that join later, or that replace lost ones, are used up to the number of workers.

    Parameters
    ----------
    client
        A connected `dask.distributed.Client` that is not asynchronous. It stays open.
    workers
        The number of workers; None: as many as fit on the existing Dask workers.
    replicas, shared_path
        As for `cerebro.cluster.Executor`.
    gpus
        1: each worker trains on a GPU of its Dask worker, which it sees alone, as ``cuda:0``. A
        Dask worker has as many as its resource ``GPU`` says, the first ones in its
        ``CUDA_VISIBLE_DEVICES``; without this resource, it has one. A part of one, such as 0.5:
        several workers share a GPU. None: on the CPU.

    Attributes
    ----------
    traffic
        The bytes moved so far; see `cerebro.cluster.messages.Traffic`.

    Raises
    ------
    InputError
        If an argument is invalid, or if Dask is not installed. At the start of a search: if the
        client is closed, if there are no Dask workers, if no agent connects, if agents have other
        versions, if nodes would compute different results, or if a node cannot read the data.
    """

    public_name = "cerebro.dask.Executor"

    def __init__(
        self,
        client: Any,
        workers: int | None = None,
        *,
        replicas: int = 1,
        shared_path: str | os.PathLike[str] | None = None,
        gpus: float | None = None,
    ) -> None:
        super().__init__(workers, replicas, shared_path, gpus)
        if not isinstance(client, _import_distributed().Client):
            raise InputError(
                f"client must be a dask.distributed.Client, not {type(client).__name__}"
            )
        if client.asynchronous:
            raise InputError("client is asynchronous: give one made without asynchronous=True")
        self._client = client
        self._arguments |= {"client": client, "gpus": gpus}

    def _make_engine(self, context: RunContext) -> LongTasks:
        if self._client.status != "running":
            raise InputError(f"the Dask client is {self._client.status}: give a connected one")
        share = self._find_gpu_share(context)
        return LongTasks(self._client, self.workers, context.exactness.threads, share)

    def _find_own_host(self) -> str:
        way, _, rest = self._client.scheduler.address.partition("://")
        if way == "inproc":  # the workers are threads in this process
            return super()._find_own_host()
        return _find_own_address(rest.rpartition(":")[0].strip("[]"))


def _find_own_address(peer: str) -> str:
    """Return this machine's address on the way to another host, or raise InputError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as way:
            way.connect(address)
            return str(way.getsockname()[0])
    except OSError as error:
        raise InputError(f"this machine cannot reach {peer!r} ({text_of(error)})") from error


def _import_distributed() -> Any:
    return import_extra("distributed", "dask", "cerebro.dask.Executor needs Dask")


class LongTasks(Engine):
    """Agents as Dask tasks, each pinned to a worker.

    Dask repeats a task whose agent fails up to `RETRIES` times. When a worker is lost, its tasks
    are released, and other tasks start on free workers. `gpu_share` is each agent's share of a GPU.
    """

    def __init__(self, client: Any, wanted: int | None, threads: int, gpu_share: float) -> None:
        self._client = client
        self._threads = threads
        self._gpu_share = gpu_share
        slots = self._list_slots()
        if not slots:
            others = client.scheduler_info(n_workers=-1)["workers"]
            what = "workers with GPUs" if gpu_share and others else "workers"
            raise InputError(f"the Dask cluster has no {what}: start some, or scale the cluster")
        self.size = len(slots) if wanted is None else wanted
        self._tasks: dict[tuple[int, str], Any] = {}
        self._text = ""
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cerebro-dask", daemon=True)

    def start(self, ticket: Ticket) -> None:
        self._text = ticket.to_json()
        self._fill_slots()
        self._thread.start()

    def failure(self) -> str | None:
        tasks = dict(self._tasks)
        if not tasks or any(task.status != "error" for task in tasks.values()):
            return None
        if not set(tasks) <= set(self._list_slots()):  # a lost worker, for which another may come
            return None
        return text_of(next(iter(tasks.values())).exception())

    def stop(self) -> None:
        self._is_ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def close(self) -> None:
        self.stop()
        tasks = list(self._tasks.values())
        self._tasks.clear()
        if not tasks or self._client.status != "running":
            return
        # Tasks on a lost worker, or without a connection, are forgotten by Dask.
        with contextlib.suppress(TimeoutError):
            _import_distributed().wait(tasks, timeout=END_SECONDS)
        self._client.cancel(tasks, force=True)

    def _list_slots(self) -> dict[tuple[int, str], int | None]:
        """Return each slot, a number and a worker's address, with its GPU, in the order of use."""
        slots: dict[tuple[int, str], int | None] = {}
        for address, worker in self._client.scheduler_info(n_workers=-1)["workers"].items():
            room = max(1, int(worker["nthreads"]) // self._threads)
            gpus = 0
            if self._gpu_share:
                gpus = int(worker.get("resources", {}).get("GPU", 1))
                room = min(room, count_fitting_workers(gpus, self._gpu_share))
            for number in range(room):
                slots[number, address] = number % gpus if gpus else None
        return dict(sorted(slots.items()))

    def _fill_slots(self) -> None:
        """Release the tasks of lost workers, and start agents on free ones."""
        slots = self._list_slots()
        for slot in [slot for slot in self._tasks if slot not in slots]:
            self._client.cancel(self._tasks.pop(slot), force=True)
        for slot, gpu in slots.items():
            if slot not in self._tasks and len(self._tasks) < (self.size or 0):
                _, address = slot
                self._tasks[slot] = self._client.submit(
                    _run_long_task,
                    self._text,
                    gpu,
                    key=f"cerebro-agent-{os.urandom(8).hex()}",
                    workers=[address],
                    allow_other_workers=False,
                    pure=False,
                    retries=RETRIES,
                )

    def _watch(self) -> None:
        while not self._is_ending.wait(LOOK_SECONDS):
            try:
                self._fill_slots()
            except Exception:  # the scheduler is away; connected agents stay connected
                if self._client.status == "closed":
                    return


def _run_long_task(text: str, gpu: int | None = None) -> None:
    """Run an agent in a Dask worker; `gpu` is its number among those seen there; None: no GPU."""
    _import_distributed().secede()  # the worker's thread stays free for other tasks
    run_agent(text, None if gpu is None else format_visible_gpu(gpu))

"""Cerebro with Spark: a search on the executors of a Spark application.

    spark = SparkSession.builder.getOrCreate()
    result = cerebro.search(build, space, train, ..., executor=cerebro.spark.Executor(spark))

Agents run as the tasks of one Spark job, and connect to the driver (docs/guide/cluster.md). The
stage is a plain one, not a barrier stage: Spark runs the task of a lost executor again, and its
agent joins the search. A barrier stage would end all agents instead. Spark only starts them: data,
states and messages use Cerebro's own connections.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

from cerebro.cluster.dialed import ConnectionExecutor
from cerebro.cluster.engine import be_agent
from cerebro.cluster.keys import Ticket
from cerebro.errors import InputError, text_of
from cerebro.machine.imports import import_extra
from cerebro.worker.messages import RunContext

__all__ = ["Executor"]

END_SECONDS = 10.0
TASK_GPUS = "spark.task.resource.gpu.amount"


class Executor(ConnectionExecutor):
    """Runs a search on a Spark application; pass it to `cerebro.search` as ``executor=``.

    Each worker of the search is one Spark task. Set ``spark.task.cpus`` to the search's
    ``threads``, and ``spark.task.maxFailures`` to how often a lost worker may be replaced.

    Parameters
    ----------
    spark
        A `pyspark.sql.SparkSession` whose driver is this process. It stays open.
    workers
        The number of workers; None: as many as the application has task slots now. If Spark runs
        fewer tasks at once, the search starts with these, and uses the others when they start.
    replicas
        The number of nodes that get each shard.
    shared_path
        A path at which all nodes can read the data, such as on a network file system: the data
        set's folder or its parent; or a URL in object storage, from which each node copies the
        shards that it works on. None: each node receives them, once, and keeps them for later
        searches; of a data set that is in object storage, it copies them from there.
    gpus
        1: each worker trains on the GPU that Spark gives its task, which it sees alone, as
        ``cuda:0``. The application must be configured for it, with
        ``spark.task.resource.gpu.amount`` and ``spark.executor.resource.gpu.amount``. A part of
        one, such as 0.5, which must be that amount: several workers share a GPU. None: on the CPU.

    Attributes
    ----------
    traffic
        The bytes moved so far; see `cerebro.cluster.messages.Traffic`.

    Raises
    ------
    InputError
        If an argument is invalid, if PySpark is not installed, or if the session is a Spark Connect
        session, whose driver is elsewhere. At the start of a search: if the session is stopped, if
        no agent connects, if agents have other versions, if nodes would compute different results,
        or if a node cannot read the data.
    """

    def __init__(
        self,
        spark: Any,
        workers: int | None = None,
        *,
        replicas: int = 1,
        shared_path: str | os.PathLike[str] | None = None,
        gpus: float | None = None,
    ) -> None:
        super().__init__(spark, workers, replicas, shared_path, gpus)
        import_extra("pyspark.sql", "spark", "cerebro.spark.Executor needs PySpark")
        self._spark_context()  # rejects anything that is not a session

    def _engine(self, context: RunContext) -> PlainStage:
        running, share = self._running(), self._share_in(context)
        amount = running.getConf().get(TASK_GPUS)
        if share and float(amount or 0) != share:
            raise InputError(
                f"gpus={share:g}, but {TASK_GPUS} of this application is {amount}: make them "
                "equal, and set spark.executor.resource.gpu.amount, too"
            )
        return PlainStage(running, self.workers, on_gpus=share > 0)

    def _listen(self) -> tuple[str, int, str]:
        host = self._running().getConf().get("spark.driver.host")
        local = host in ("localhost", "127.0.0.1")
        return ("127.0.0.1", 0, "127.0.0.1") if local else ("0.0.0.0", 0, host)

    def _spark_context(self) -> Any:
        from pyspark.sql import SparkSession

        if type(self._connection).__module__.startswith("pyspark.sql.connect"):
            raise InputError(
                "spark is a Spark Connect session, whose driver is not in this process: run the "
                "search in the driver, with a classic session"
            )
        if not isinstance(self._connection, SparkSession):
            raise InputError(
                f"spark must be a pyspark.sql.SparkSession, not {type(self._connection).__name__}"
            )
        try:
            return self._connection.sparkContext
        except Exception as error:  # serverless sessions
            raise InputError(
                f"spark has no SparkContext in this process ({_first_line(text_of(error))}): run "
                "the search in a driver, with a classic session"
            ) from error

    def _running(self) -> Any:
        context = self._spark_context()
        if context._jsc is None or context._jsc.sc().isStopped():
            raise InputError("the Spark session is stopped: give a running one")
        return context


class PlainStage:
    """Agents as the tasks of a Spark job, in its own job group; an `Engine`.

    Parameters
    ----------
    on_gpus
        Whether each agent uses the GPU that Spark gives its task.
    """

    def __init__(self, context: Any, wanted: int | None, *, on_gpus: bool = False) -> None:
        from pyspark import InheritableThread

        self._context = context
        self._on_gpus = on_gpus
        cpus = int(context.getConf().get("spark.task.cpus", "1"))
        slots = max(1, context.defaultParallelism // cpus)
        self.size: int | None = slots if wanted is None else wanted
        self._group = f"cerebro-{uuid.uuid4().hex}"
        self._text = ""
        self._error: str | None = None
        self._is_ending = False
        self._thread = InheritableThread(target=self._run, name="cerebro-spark", daemon=True)

    def start(self, ticket: Ticket) -> None:
        self._text = ticket.to_json()
        self._thread.start()

    def failure(self) -> str | None:
        return self._error

    def stop(self) -> None:
        self._is_ending = True

    def close(self) -> None:
        self._is_ending = True
        if self._thread.ident is None:
            return
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():  # tasks that wait for an executor or for a connection
            with contextlib.suppress(Exception):
                self._context.cancelJobGroup(self._group)
            self._thread.join(END_SECONDS)

    def _run(self) -> None:
        context, count = self._context, self.size or 1
        try:
            context.setJobGroup(self._group, "Cerebro: workers of a search", interruptOnCancel=True)
            numbers = context.parallelize(range(count), count)
            numbers.mapPartitionsWithIndex(partial(_task, self._text, self._on_gpus)).collect()
            self._error = "Spark's job has ended"
        except Exception as error:
            self._error = f"Spark's job has failed: {_cause(text_of(error))}"


def _task(text: str, on_gpu: bool, number: int, rows: Iterator[Any]) -> Iterator[Any]:
    """Run an agent in a Spark task."""
    be_agent(text, _gpu_of_task() if on_gpu else None)
    return iter(())


def _gpu_of_task() -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` for the GPU that Spark has given this task.

    Raises
    ------
    InputError
        If it has given none.
    """
    from pyspark import TaskContext

    task = TaskContext.get()
    found = None if task is None else task.resources().get("gpu")
    if found is None or not found.addresses:
        raise InputError(f"Spark has given the task no GPU: set {TASK_GPUS}")
    return str(found.addresses[0])


_RAISED = re.compile(r"^(?:Caused by: )?((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE)


def _cause(text: str) -> str:
    """Return the line of Spark's long message that names the exception raised in Python."""
    found = [line for line in _RAISED.findall(text) if not line.startswith(("org.", "java."))]
    return str(found[0]) if found else _first_line(text)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]

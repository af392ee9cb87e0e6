"""Agents as the tasks of a Spark job, for `cerebro.spark.Executor`.

The stage is a plain one, not a barrier stage: Spark runs the task of a lost executor again, and its
agent joins the search. A barrier stage would end all agents instead.

A task needs the cores and the GPU of a worker. If the application's configuration gives tasks less,
the stage gets its own resource profile (Spark's stage-level scheduling).
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

from cerebro.cluster.connected_executor import EngineExecutor
from cerebro.cluster.engine import Engine, run_agent
from cerebro.cluster.keys import Ticket
from cerebro.errors import InputError, one_line, text_of
from cerebro.machine.imports import import_extra
from cerebro.worker.messages import RunContext

END_SECONDS = 10.0
TASK_CPUS = "spark.task.cpus"
TASK_GPUS = "spark.task.resource.gpu.amount"
EXECUTOR_CPUS = "spark.executor.cores"
EXECUTOR_GPUS = "spark.executor.resource.gpu.amount"
GPU = "gpu"  # the name that Spark gives the resource


class Executor(EngineExecutor):
    """Runs a search on a Spark application; pass it to `cerebro.search` as ``executor=``.

    Each worker of the search is one Spark task, with as many cores as the search's ``threads`` if
    an executor has them. If ``spark.task.cpus`` is smaller, or ``spark.task.resource.gpu.amount``
    is not `gpus`, the tasks get a resource profile for this stage. Set ``spark.task.maxFailures``
    to how often a lost worker may be replaced.

    Parameters
    ----------
    spark
        A `pyspark.sql.SparkSession` whose driver is this process. It stays open.
    workers
        The number of workers; None: as many as the application has task slots now. If Spark runs
        fewer tasks at once, the search starts with these, and uses the others when they start.
    replicas, shared_path
        As for `cerebro.cluster.Executor`.
    gpus
        1: each worker trains on the GPU that Spark gives its task, which it sees alone, as
        ``cuda:0``. The executors must have GPUs, by ``spark.executor.resource.gpu.amount`` or by
        `profile`. A part of one, such as 0.5: several workers share a GPU. None: on the CPU.
    profile
        A `pyspark.resource.ResourceProfile` for the stage, such as one that asks for executors of
        another kind than the application's, for which Spark needs dynamic allocation. Its tasks
        must have the share of a GPU in `gpus`. None: the application's executors, see above.

    Attributes
    ----------
    traffic
        The bytes moved so far; see `cerebro.cluster.messages.Traffic`.

    Raises
    ------
    InputError
        If an argument is invalid, if PySpark is not installed, or if the session is a Spark Connect
        session, whose driver is elsewhere. At the start of a search: if the session is stopped, if
        Spark refuses the profile or the executors have no GPUs, if no agent connects, if agents
        have other versions, if nodes would compute different results, or if a node cannot read the
        data.
    """

    public_name = "cerebro.spark.Executor"

    def __init__(
        self,
        spark: Any,
        workers: int | None = None,
        *,
        replicas: int = 1,
        shared_path: str | os.PathLike[str] | None = None,
        gpus: float | None = None,
        profile: Any = None,
    ) -> None:
        super().__init__(workers, replicas, shared_path, gpus)
        import_extra("pyspark.sql", "spark", "cerebro.spark.Executor needs PySpark")
        self._spark = spark
        self._get_context()  # rejects anything that is not a session
        _check_profile(profile, self._gpu_share)
        self._profile = profile
        self._arguments |= {"spark": spark, "gpus": gpus, "profile": profile}

    def _make_engine(self, context: RunContext) -> PlainStage:
        running, share = self._get_running_context(), self._find_gpu_share(context)
        if self._profile is None:
            profile = _make_profile(running, context.exactness.threads, share)
        else:
            profile = _register_profile(running, self._profile)
        return PlainStage(running, self.workers, profile, on_gpus=share > 0)

    def _find_own_host(self) -> str:
        host: str = self._get_running_context().getConf().get("spark.driver.host")
        return "127.0.0.1" if host == "localhost" else host.strip("[]")  # around an IPv6 address

    def _get_context(self) -> Any:
        from pyspark.sql import SparkSession

        if type(self._spark).__module__.startswith("pyspark.sql.connect"):
            raise InputError(
                "spark is a Spark Connect session, whose driver is not in this process: run the "
                "search in the driver, with a classic session"
            )
        if not isinstance(self._spark, SparkSession):
            kind = type(self._spark).__name__
            raise InputError(f"spark must be a pyspark.sql.SparkSession, not {kind}")
        try:
            return self._spark.sparkContext
        except Exception as error:  # serverless sessions
            raise InputError(
                f"spark has no SparkContext in this process ({text_of(error)}): run "
                "the search in a driver, with a classic session"
            ) from error

    def _get_running_context(self) -> Any:
        context = self._get_context()
        if context._jsc is None or context._jsc.sc().isStopped():
            raise InputError("the Spark session is stopped: give a running one")
        return context


class PlainStage(Engine):
    """Agents as the tasks of a Spark job, in its own job group.

    `wanted` is the number of agents; None: as many as there are task slots now. `profile` is the
    stage's registered resource profile; None: the application's default. `on_gpus` says whether
    each agent uses the GPU of its task.
    """

    def __init__(
        self, context: Any, wanted: int | None, profile: Any = None, *, on_gpus: bool = False
    ) -> None:
        from pyspark import InheritableThread

        self._context = context
        self._profile = profile
        self._on_gpus = on_gpus
        self.size = _count_slots(context, profile) if wanted is None else wanted
        self._group = f"cerebro-{uuid.uuid4().hex}"
        self._text = ""
        self._error: str | None = None
        self._thread = InheritableThread(target=self._run, name="cerebro-spark", daemon=True)

    def start(self, ticket: Ticket) -> None:
        self._text = ticket.to_json()
        self._thread.start()

    def failure(self) -> str | None:
        return self._error

    def close(self) -> None:
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
            if self._profile is not None:
                numbers = numbers.withResources(self._profile)
            numbers.mapPartitionsWithIndex(partial(_run_task, self._text, self._on_gpus)).collect()
            self._error = "Spark's job has ended"
        except Exception as error:
            self._error = f"Spark's job has failed: {_find_cause(error)}"


# --- what a task needs --------------------------------------------------------


def _check_profile(profile: Any, share: float) -> None:
    """Raise InputError unless a profile's tasks have the share of a GPU that workers use."""
    if profile is None:
        return
    from pyspark.resource import ResourceProfile

    if not isinstance(profile, ResourceProfile):
        raise InputError(
            f"profile must be a pyspark.resource.ResourceProfile, not {type(profile).__name__}: "
            "`build` of a ResourceProfileBuilder makes one"
        )
    gpu = profile.taskResources.get(GPU)
    amount = 0.0 if gpu is None else float(gpu.amount)
    if amount != share:
        raise InputError(
            f"profile= gives each task {amount:g} GPU, and gpus={share or None}: make them equal, "
            f'with TaskResourceRequests().resource("{GPU}", ...) and gpus='
        )


def _make_profile(context: Any, threads: int, share: float) -> Any:
    """Return a profile whose tasks have what a worker needs; None: the application's suffice.

    Raises InputError if the executors have too few GPUs, or Spark refuses the profile.
    """
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    conf = context.getConf()
    cpus = int(conf.get(TASK_CPUS, "1"))
    # More cores than an executor has would never be free. If their number is unknown, tasks keep
    # the application's.
    cores = max(cpus, min(threads, _count_executor_cores(context)))
    gpus_per_task = float(conf.get(TASK_GPUS, "0"))
    if share in (0, gpus_per_task) and cores == cpus:
        return None
    requests = TaskResourceRequests().cpus(cores)
    if share:
        gpus = float(conf.get(EXECUTOR_GPUS, "0"))
        if gpus < 1:
            raise InputError(
                f"gpus={share:g}, but the executors of this application have no GPUs: set "
                f"{EXECUTOR_GPUS} and its discoveryScript, or give a profile= that asks for "
                "executors with GPUs"
            )
        requests = requests.resource(GPU, share)
    elif gpus_per_task:
        # An executor's GPUs bound its tasks as before.
        requests = requests.resource(GPU, gpus_per_task)
    profile = ResourceProfileBuilder().require(requests).build
    try:
        return _register_profile(context, profile)
    except InputError as error:
        if share in (0, gpus_per_task):  # only the cores differ, which do not change results
            return None
        raise InputError(
            f"gpus={share:g}, but {TASK_GPUS} of this application is {conf.get(TASK_GPUS)}, and "
            f"Spark refuses another amount for the search ({error}): make them equal"
        ) from error


def _count_executor_cores(context: Any) -> int:
    """Return the cores of each executor of the application; 0: unknown."""
    cores = context.getConf().get(EXECUTOR_CPUS)
    if cores is not None:
        return int(cores)
    match = re.fullmatch(r"local-cluster\[\s*\d+\s*,\s*(\d+)\s*,.*\]", context.master)
    return int(match[1]) if match else 0


def _register_profile(context: Any, profile: Any) -> Any:
    """Return a profile as Spark has registered it; raise InputError if it refuses."""
    try:
        return context.parallelize([0], 1).withResources(profile).getResourceProfile()
    except Exception as error:
        java = getattr(error, "java_exception", None)
        text = text_of(error) if java is None else one_line(str(java.getMessage()))
        raise InputError(f"Spark refuses the resource profile: {text}") from error


def _count_slots(context: Any, profile: Any) -> int:
    """Return how many tasks the application can run at once, at least one."""
    running = context._jsc.sc()
    default = running.resourceProfileManager().resourceProfileFromId(0)
    slots = running.maxNumConcurrentTasks(
        default if profile is None else profile._java_resource_profile
    )
    if slots == 0 and profile is None:  # no executor has started yet
        slots = context.defaultParallelism // int(context.getConf().get(TASK_CPUS, "1"))
    return max(1, int(slots))


def _run_task(text: str, on_gpu: bool, number: int, rows: Iterator[Any]) -> Iterator[Any]:
    """Run an agent in a Spark task, on the task's GPU if it uses one."""
    from pyspark import TaskContext

    gpu = None
    if on_gpu:
        task = TaskContext.get()
        resource = None if task is None else task.resources().get(GPU)
        if resource is None or not resource.addresses:
            raise InputError(f"Spark has given the task no GPU: set {TASK_GPUS}")
        gpu = str(resource.addresses[0])
    run_agent(text, gpu)
    return iter(())


# --- what Spark says ----------------------------------------------------------


_RAISED = re.compile(r"^(?:Caused by: )?((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE)


def _find_cause(error: Exception) -> str:
    """Return the line of Spark's long message that names the exception raised in Python."""
    try:
        text = str(error)
    except Exception:  # the session has ended, which would have to be asked
        return text_of(error)
    lines = [line for line in _RAISED.findall(text) if not line.startswith(("org.", "java."))]
    return one_line(str(lines[0]) if lines else text.strip().partition("\n")[0])

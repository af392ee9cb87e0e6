"""Searches in stages of Spark with resource profiles: the cores and GPUs of their tasks.

Spark finds the GPUs of its workers by a script. Workers see them over the stand-in for the CUDA
runtime, on which the native network trains.
"""

from __future__ import annotations

import copy
import os
import shutil
from types import SimpleNamespace

import pytest

pytest.importorskip("zmq")
pytest.importorskip("pyspark")
if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
    pytest.skip("Spark needs Java", allow_module_level=True)

import pictures
import sparks
from clusters import wait_until
from pyspark.resource import (
    ExecutorResourceRequests,
    ResourceProfile,
    ResourceProfileBuilder,
    TaskResourceRequests,
)
from sparks import ALL, running

import cerebro
from cerebro.cluster.engines import spark as module
from cerebro.errors import InputError
from cerebro.run.settings import Exactness

standin, script = sparks.standin, sparks.script
data, expected, all_come = sparks.data, sparks.expected, sparks.all_come


def amounts(profile):
    return {name: request.amount for name, request in profile.taskResources.items()}


@pytest.fixture(scope="module")
def spark(script, tmp_path_factory):
    """An executor with four cores and two GPUs; its tasks have one core and no GPU."""
    settings = {
        "worker.resource.gpu.amount": "2",
        "worker.resource.gpu.discoveryScript": script,
        "executor.resource.gpu.amount": "2",
    }
    folder = tmp_path_factory.mktemp("spark")
    with running("local-cluster[1,4,1024]", folder, settings) as session:
        session.range(1).count()  # the executor has started
        yield session


@pytest.mark.parametrize(
    ("threads", "share", "tasks", "slots"),
    [
        (1, 0.0, None, 4),
        (2, 0.0, {"cpus": 2}, 2),
        (8, 0.0, {"cpus": 4}, 1),  # more than there are
        (1, 1.0, {"cpus": 1, "gpu": 1}, 2),
        (1, 0.5, {"cpus": 1, "gpu": 0.5}, 4),
        (3, 1.0, {"cpus": 3, "gpu": 1}, 1),
    ],
)
def test_tasks_get_the_requested_cores_and_gpus(spark, threads, share, tasks, slots):
    """And how many of them run at once, as Spark counts them."""
    executor = cerebro.spark.Executor(spark, gpus=share or None)
    exactness = Exactness(threads=threads)
    context = SimpleNamespace(exactness=exactness, device="cuda:0" if share else "cpu")
    stage = executor._make_engine(context)
    assert (stage._profile and amounts(stage._profile)) == tasks
    assert stage.size == slots


def test_each_task_has_its_own_gpu(spark, data, tmp_path, expected):
    """With two cores, and without a word of GPUs in the configuration of tasks."""
    executor = cerebro.spark.Executor(spark, gpus=1)
    result = pictures.search(data, tmp_path / "run", executor=executor, threads=2)
    here = pictures.search(data, tmp_path / "here", workers=1, devices="cuda:0", threads=2)
    assert pictures.hashes(result) == pictures.hashes(here) == expected
    assert pictures.printed(result) == ALL
    assert spark.range(5).count() == 5  # other stages are as before


def test_a_profile_with_executors_needs_dynamic_allocation(spark, script, data, tmp_path):
    requests = ExecutorResourceRequests().cores(2).resource("gpu", 1, script)
    tasks = TaskResourceRequests().cpus(2).resource("gpu", 1)
    profile = ResourceProfileBuilder().require(requests).require(tasks).build
    executor = cerebro.spark.Executor(spark, 1, gpus=1, profile=profile)
    with pytest.raises(InputError, match=r"Spark refuses the resource profile: .*dynamic alloc"):
        pictures.search(data, tmp_path / "run", executor=executor)


def test_a_profile_of_tasks_is_used_as_it_is(spark, data, tmp_path):
    """It is made without the session's Java objects, as before the session starts."""
    tasks = TaskResourceRequests().cpus(3)
    profile = ResourceProfile(_task_req=tasks.requests)
    executor = copy.deepcopy(cerebro.spark.Executor(spark, profile=profile))
    stage = executor._make_engine(SimpleNamespace(exactness=Exactness(), device="cpu"))
    assert amounts(stage._profile) == {"cpus": 3} and stage.size == 1
    result = pictures.search(data, tmp_path / "run", executor=executor)
    assert {line.split()[1] for line in pictures.printed(result)} == {"cpu"}


@pytest.mark.parametrize(
    ("gpus", "of_tasks", "says"),
    [
        (None, 1, "profile= gives each task 1 GPU, and gpus=None: make them equal"),
        (1, 0, "profile= gives each task 0 GPU, and gpus=1.0: make them equal"),
        (0.5, 1, "profile= gives each task 1 GPU, and gpus=0.5: make them equal"),
    ],
)
def test_a_profile_that_contradicts_the_gpus_is_refused(spark, gpus, of_tasks, says):
    tasks = TaskResourceRequests().cpus(1)
    if of_tasks:
        tasks = tasks.resource("gpu", of_tasks)
    profile = ResourceProfileBuilder().require(tasks).build
    with pytest.raises(InputError, match=says):
        cerebro.spark.Executor(spark, gpus=gpus, profile=profile)


def test_what_is_not_a_profile_is_refused(spark):
    with pytest.raises(InputError, match=r"pyspark.resource.ResourceProfile, not dict: `build`"):
        cerebro.spark.Executor(spark, profile={"gpu": 1})


def test_a_failed_job_reports_the_python_error(spark):
    stage = module.PlainStage(spark.sparkContext, 1)
    stage.start(SimpleNamespace(to_json=lambda: "no ticket"))
    wait_until(lambda: stage.failure() is not None)
    stage.close()
    assert stage.failure() == (
        "Spark's job has failed: cerebro.errors.InputError: this is not a ticket of a cluster"
    )

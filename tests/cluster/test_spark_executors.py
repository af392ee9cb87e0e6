"""A search on executors that Spark starts for it, and one without profiles.

Each test has its own session: a process can have one at a time.
"""

from __future__ import annotations

import os
import shutil

import pytest

pytest.importorskip("zmq")
pytest.importorskip("pyspark")
if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
    pytest.skip("Spark needs Java", allow_module_level=True)

import pictures
import sparks
from pyspark.resource import (
    ExecutorResourceRequests,
    ResourceProfileBuilder,
    TaskResourceRequests,
)
from sparks import ALL, running

import cerebro
from cerebro.cluster.engines import spark as module
from cerebro.errors import InputError

standin, script = sparks.standin, sparks.script
data, expected, all_come = sparks.data, sparks.expected, sparks.all_come


# --- executors that Spark starts for the search ---------------------------------------


def test_executors_with_gpus_are_started_for_the_search(
    script, data, tmp_path, tmp_path_factory, expected
):
    """The application's own have no GPU."""
    settings = {
        "worker.resource.gpu.amount": "2",
        "worker.resource.gpu.discoveryScript": script,
        "dynamicAllocation.enabled": "true",
        "dynamicAllocation.shuffleTracking.enabled": "true",
        "dynamicAllocation.minExecutors": "0",
        "executor.cores": "1",
        "executor.memory": "512m",
    }
    requests = ExecutorResourceRequests().cores(1).memory("512m").resource("gpu", 1, script)
    tasks = TaskResourceRequests().cpus(1).resource("gpu", 1)
    with running("local-cluster[1,4,2048]", tmp_path_factory.mktemp("spark"), settings) as session:
        without = cerebro.spark.Executor(session, 1, gpus=1)
        with pytest.raises(InputError, match=r"executors of this application have no GPUs: set"):
            pictures.search(data, tmp_path / "run", executor=without)
        profile = ResourceProfileBuilder().require(requests).require(tasks).build
        executor = cerebro.spark.Executor(session, 2, gpus=1, profile=profile)
        result = pictures.search(data, tmp_path / "run", executor=executor)
    assert pictures.hashes(result) == expected
    assert pictures.printed(result) == ALL


# --- without executors ----------------------------------------------------------------


def test_a_local_master_keeps_its_configuration(tmp_path_factory):
    """Spark has no profiles there: cores are as configured, and GPUs are refused."""
    settings = {"executor.cores": "2", "executor.resource.gpu.amount": "1"}
    with running("local[2]", tmp_path_factory.mktemp("spark"), settings) as session:
        context = session.sparkContext
        assert module._make_profile(context, 2, 0.0) is None
        assert module._count_slots(context, None) == 2
        with pytest.raises(InputError, match=r"gpus=1, but spark.task.resource.gpu.amount .*None"):
            module._make_profile(context, 1, 1.0)

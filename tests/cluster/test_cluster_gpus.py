"""Searches on Ray's GPUs: each worker has the one that Ray gives it, alone."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

ray = pytest.importorskip("ray")

import gpus_by_name  # noqa: E402

import cerebro  # noqa: E402
from cerebro.cluster.admission import Admission  # noqa: E402
from cerebro.cluster.engines.ray import find_assigned_gpu  # noqa: E402
from cerebro.cluster.messages import NodeReport  # noqa: E402
from cerebro.errors import InputError  # noqa: E402
from cerebro.machine import (  # noqa: E402
    devices,
    environment,
)
from cerebro.machine.devices import Found  # noqa: E402
from cerebro.run.settings import Exactness  # noqa: E402

SPACE = {"rate": [0.1, 0.2, 0.3, 0.4]}


@pytest.fixture(scope="module")
def two_gpus():
    """A node with two of them, whatever this machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        ray.init(
            address="local",
            num_cpus=3,
            num_gpus=2,
            include_dashboard=False,
            object_store_memory=100_000_000,
            logging_level="ERROR",
            log_to_driver=False,
            runtime_env={"worker_process_setup_hook": "gpus_by_name.pretend"},
        )
        try:
            yield
        finally:
            ray.shutdown()


@pytest.fixture(autouse=True)
def none_here(monkeypatch):
    """The coordinator's machine has no GPU."""
    found = Found(problem="no NVIDIA driver is loaded")
    monkeypatch.setattr(devices, "lookup", lambda: found)


def search(data, run, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the model computes on the CPU")
        return cerebro.search(
            gpus_by_name.build, SPACE, data, epochs=2, validation=0.2, searcher="grid",
            batch_size=16, run=run, progress=False, **options,
        )  # fmt: skip


def hashes(result):
    return [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]


def printed(result):
    return {line for trial in result.trials for line in trial.log.splitlines()}


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    return hashes(search(data, tmp_path_factory.mktemp("runs") / "here", workers=0))


def test_each_worker_sees_the_gpu_that_ray_gives_it(two_gpus, data, tmp_path, expected):
    executor = cerebro.ray.Executor(workers=2, resources={"GPU": 1})
    assert executor.devices == ("cuda",)
    result = search(data, tmp_path / "run", executor=executor)
    assert hashes(result) == expected
    assert printed(result) == {"device cuda:0 '0'", "device cuda:0 '1'", "cublas :4096:8"}
    assert result.saved.settings["devices"] == ("cuda",)
    assert result.environment["device"] == "cuda"


def test_two_workers_share_a_gpu(two_gpus, data, tmp_path, expected):
    executor = cerebro.ray.Executor(workers=3, resources={"GPU": 0.5})
    result = search(data, tmp_path / "run", executor=executor, devices="cuda")
    assert hashes(result) == expected
    assert {"device cuda:0 '0'", "device cuda:0 '1'"} <= printed(result)
    assert {unit["worker"] for unit in result.saved.units()} == {0, 1, 2}


def test_devices_cpu_leaves_the_gpus_of_workers_unused(two_gpus, data, tmp_path, expected):
    executor = cerebro.ray.Executor(workers=1, resources={"GPU": 1})
    result = search(data, tmp_path / "run", executor=executor, devices="cpu")
    assert hashes(result) == expected
    assert "device cpu '0'" in printed(result)
    assert result.saved.settings["devices"] == ("cpu",)


def test_workers_that_asked_for_no_gpu_train_on_the_cpu(two_gpus, data, tmp_path, expected):
    result = search(data, tmp_path / "run", executor=cerebro.ray.Executor(workers=1))
    assert hashes(result) == expected
    assert {line.split()[1] for line in printed(result) if "device" in line} == {"cpu"}


@pytest.mark.parametrize("workers, need", [(3, 1), (5, 0.5)])
def test_more_workers_than_gpus_are_refused(two_gpus, data, tmp_path, workers, need):
    executor = cerebro.ray.Executor(workers=workers, resources={"GPU": need, "CPU": 0.1})
    with pytest.raises(InputError, match=rf"{workers} worker.s. with 0.1 CPU, {need:g} GPU each"):
        search(data, tmp_path / "run", executor=executor)


def test_a_gpu_run_resumes_on_the_cpu_and_on_gpus_again(two_gpus, data, tmp_path):
    def resumed(epochs, **options):
        return cerebro.resume(
            tmp_path / "run", gpus_by_name.build, epochs=epochs, progress=False, **options
        )

    gpus = {"workers": 1, "resources": {"GPU": 1}}
    search(data, tmp_path / "run", executor=cerebro.ray.Executor(**gpus))
    with pytest.warns(UserWarning, match=r"different environment.*device was cuda, is cpu"):
        here = resumed(3, workers=0)
    assert "device cpu None" in printed(here)
    there = resumed(4, executor=cerebro.ray.Executor(**gpus))
    assert [trial.epoch for trial in there.trials] == [4] * 4
    assert there.saved.settings["devices"] == ("cpu",)  # where it was the last time
    assert not cerebro.replay(there, 1, gpus_by_name.build).first_difference


def test_a_tuner_trains_on_the_gpus(two_gpus, data, tmp_path, expected, monkeypatch):
    """The engine has as many as the Tuner's machine, chosen by Ray."""
    pytest.importorskip("pandas")
    from ray import tune

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(devices, "lookup", gpus_by_name.find)
    options = {"validation": 0.2, "batch_size": 16, "epochs": 2}
    trainable = cerebro.ray.trainable(gpus_by_name.build, data, **options)
    results = tune.Tuner(
        trainable,
        param_space={"rate": tune.grid_search(SPACE["rate"])},
        run_config=tune.RunConfig(storage_path=str(tmp_path), name="exp", verbose=0),
    ).fit()
    assert len(results) == 4 and not results.num_errors
    run = cerebro.open(tmp_path / "exp" / "cerebro", build=gpus_by_name.build)
    assert printed(run) == {"device cuda:0 '0'", "device cuda:0 '1'", "cublas :4096:8"}
    assert run.saved.settings["devices"] == ("cuda:0", "cuda:1")
    assert sorted(trial.config["rate"] for trial in run.trials) == SPACE["rate"]
    assert [trial.epoch for trial in run.trials] == [2] * 4


@pytest.mark.parametrize(
    ("options", "gpus", "cpus"),
    [
        ({}, 2, 2),
        ({"devices": "cuda", "workers_per_device": 3, "threads": 2}, 2, 12),
        ({"devices": "cpu", "workers": 3}, 0, 3),
        ({"workers": 1}, 2, 1),
    ],
)
def test_an_engine_requests_its_gpus_and_cpus_from_ray(
    two_gpus, data, monkeypatch, options, gpus, cpus
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr(devices, "lookup", gpus_by_name.find)
    spec = cerebro.ray.trainable(gpus_by_name.build, data, batch_size=16, **options).spec
    assert (spec.gpus, spec.cpus) == (gpus, cpus)


def test_gpus_that_ray_cannot_give_to_an_engine_are_refused(two_gpus, data, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setattr(devices, "lookup", gpus_by_name.find)

    def trainable(**options):
        return cerebro.ray.trainable(gpus_by_name.build, data, batch_size=16, **options)

    with pytest.raises(InputError, match=r"Ray chooses the GPUs of the engine"):
        trainable(devices="cuda:1")
    with pytest.raises(InputError, match=r"need 3 GPU.s., but Ray has 2 on this node"):
        trainable(devices="cuda").default_resource_request({})
    assert trainable().spec.gpus == 2  # as far as Ray has them
    with pytest.raises(InputError, match="workers_per_device is for GPUs of this machine"):
        trainable(executor=cerebro.ray.Executor(), workers_per_device=2)


# --- what nodes say -----------------------------------------------------------------


def reports(*gpus):
    return [
        NodeReport(str(n), f"host-{n}", "", "", environment.describe(1), True, (), *gpu)
        for n, gpu in enumerate(gpus)
    ]


def admission(device="cuda:0", one_kind=None):
    context = SimpleNamespace(device=device, exactness=Exactness(threads=1))
    return Admission(None, None, context, None, one_kind)


def test_a_gpu_that_cannot_be_used_is_refused_by_its_nodes_name():
    found = reports(("GPU A",), ("", "PyTorch 2.9 is built without CUDA"))
    with pytest.raises(InputError, match=r"node host-1 .*built without CUDA.*devices='cpu'"):
        admission().check(found)
    assert admission("cpu").check(found) == []


def test_a_node_may_lack_the_variable_that_its_workers_get(monkeypatch):
    """This process has it once it has computed on a GPU; Ray does not hand it on."""
    found = reports(("GPU A",))
    monkeypatch.setenv(devices.CUBLAS_VARIABLE, devices.CUBLAS_WORKSPACE)
    assert admission().check(found) == admission("cpu").check(found) == []
    monkeypatch.setenv(devices.CUBLAS_VARIABLE, ":16:8")
    with pytest.raises(InputError, match=r"CUBLAS_WORKSPACE_CONFIG is :16:8 here and :4096:8 ther"):
        admission().check(found)


def test_gpus_of_different_kinds_are_noted():
    (note,) = admission().check(reports(("GPU A",), ("GPU B",), ("GPU A",)))
    assert "of different kinds (GPU A, GPU B)" in note.text
    assert admission().check(reports(("GPU A",), ("GPU A",))) == []


@pytest.mark.parametrize(
    ("wanted", "gpus", "refused"),
    [
        ("", ["GPU A", "GPU A"], None),
        ("", ["GPU A", "GPU B"], r"host-1 .* has the GPU 'GPU B' and not 'GPU A'"),
        ("GPU B", ["GPU A"], r"host-0 .* has the GPU 'GPU A' and not 'GPU B'"),
    ],
)
def test_derive_requires_gpus_of_one_kind(wanted, gpus, refused):
    here = admission(one_kind=wanted)
    found = reports(*[(gpu,) for gpu in gpus])
    if refused is None:
        assert here.check(found) == []
        with pytest.raises(InputError, match="has the GPU 'GPU C' and not 'GPU A'"):
            here.check(reports(("GPU C",)))  # it joins later
    else:
        with pytest.raises(InputError, match=refused):
            here.check(found)


@pytest.mark.parametrize(
    ("visible", "given", "found"),
    [
        ("4", ["4"], "cuda:0"),  # Ray has made the others invisible
        ("0,1,2", ["1"], "cuda:1"),  # and here not
        ("0,1,2", [], "cuda:0"),
        ("GPU-a", ["GPU-a"], "cuda:0"),
        ("0,1", ["7"], "there is no GPU 7"),
        ("", ["0"], "no NVIDIA driver is loaded"),
    ],
)
def test_an_actor_finds_its_assigned_gpu(monkeypatch, visible, given, found):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(devices, "lookup", gpus_by_name.find)
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": given})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    try:
        assert find_assigned_gpu().name == found
    except cerebro.DeviceError as error:
        assert str(error) == found


@pytest.mark.parametrize("need", [2, 1.5])
def test_a_worker_has_one_gpu(need):
    with pytest.raises(
        InputError, match=r"a worker uses one GPU, or a fraction of one: give {'GPU'"
    ):
        cerebro.ray.Executor(resources={"GPU": need})


def test_an_executor_says_whether_it_has_gpus():
    assert cerebro.ray.Executor(resources={"GPU": 0.25}).devices == ("cuda",)
    assert cerebro.ray.Executor(resources={"fast": 1}).devices == ("cpu",)

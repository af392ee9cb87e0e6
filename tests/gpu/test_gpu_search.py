"""Searches on a GPU: the same states whatever the number of workers, and after kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest

import cerebro
import cerebro._core as _core
from cerebro.machine import devices

torch = pytest.importorskip("torch")
import small_cnns  # noqa: E402
from small_cnns import EPOCHS, SHARDS, hashes, search  # noqa: E402
from torch.nn import functional  # noqa: E402


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_cnns.shards(tmp_path_factory.mktemp("gpu") / "data")


@pytest.fixture(scope="module")
def one(data, tmp_path_factory):
    """The search by one worker, which the others are compared with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)  # the workers have it all the same
        return search(tmp_path_factory.mktemp("gpu") / "one", data)


def test_the_search_learns_and_is_exact(one):
    assert [trial.status for trial in one.trials] == ["finished"] * 4
    assert [trial.not_exact for trial in one.trials] == [[]] * 4
    losses = [epoch["metrics"]["train_loss"] for epoch in one.best.history]
    assert losses[-1] < 0.95 * losses[0]


def test_two_workers_on_the_device_give_the_same_states(one, data, tmp_path):
    two = search(tmp_path / "two", data, workers_per_device=2)
    assert hashes(two) == hashes(one)
    units = [unit for unit in two.saved.units() if unit["kind"] == "train"]
    assert len({unit["worker"] for unit in units}) == 2


@pytest.mark.parametrize("options", [{"live_models": 1}, {"stagger": False}, {"workers": 3}])
def test_states_do_not_depend_on_how_trials_are_scheduled(one, data, tmp_path, options):
    if options == {"stagger": False}:  # visits shards in another order
        expected = hashes(search(tmp_path / "expected", data, stagger=False))
        options = {"stagger": False, "workers_per_device": 2}
    else:
        expected = hashes(one)
    assert hashes(search(tmp_path / "run", data, **options)) == expected


def test_training_in_this_process_gives_the_same_states(one, data, tmp_path):
    script = (
        "import sys, small_cnns, cerebro\n"
        "small_cnns.search(sys.argv[1], cerebro.Dataset(sys.argv[2]), workers=0)\n"
    )
    run = tmp_path / "inline"
    here = os.path.dirname(small_cnns.__file__)  # noqa: PTH120
    command = [sys.executable, "-c", script, str(run), str(data.path)]
    subprocess.run(command, check=True, cwd=here, timeout=280)
    assert hashes(cerebro.open(run)) == hashes(one)


def test_a_worker_that_is_killed_changes_nothing(one, data, tmp_path):
    flag = tmp_path / "killed"
    result = search(tmp_path / "run", data, small_cnns.dying(flag), workers_per_device=2)
    assert flag.exists()
    assert hashes(result) == hashes(one)


def test_a_killed_search_resumes_to_the_same_states(one, data, tmp_path):
    run, program = tmp_path / "run", small_cnns.__file__
    command = [sys.executable, program, str(run), str(data.path), str(EPOCHS * SHARDS + 1)]
    done = subprocess.run(command, timeout=280)
    assert done.returncode == -signal.SIGKILL
    left = cerebro.open(run)
    assert left.status == "interrupted"
    result = cerebro.resume(run, small_cnns.build, progress=False)
    assert hashes(result) == hashes(one)


def test_replay_of_a_gpu_search_is_identical(one):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is known to differ
        replay = cerebro.replay(one, one.best.number, small_cnns.build)
    assert replay.identical


def test_the_gpu_and_its_settings_are_recorded(one):
    record = one.environment
    name = devices.lookup().devices[0].label
    assert record["device"] == "cuda" and record["cuda"]["device"] == name
    assert record["cuda"]["runtime"] == torch.version.cuda
    assert record["variables"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert one.saved.settings["devices"] == ("cuda:0",)


def test_the_coordinator_describes_the_gpu_as_its_workers_do(one):
    """By which `resume` compares them, without starting CUDA."""
    assert devices.describe_device(("cuda:0",)) == one.environment["cuda"]


def test_evaluating_without_the_cublas_setting_warns_once(one):
    script = (
        "import sys, warnings, torch, cerebro\n"
        "torch.ones(2, 2, device='cuda') @ torch.ones(2, 2, device='cuda')\n"
        "result = cerebro.open(sys.argv[1])\n"
        "with warnings.catch_warnings(record=True) as told:\n"
        "    warnings.simplefilter('always')\n"
        "    found = result.best.evaluate()\n"
        "    result.best.evaluate()\n"
        "print(sum('without CUBLAS_WORKSPACE_CONFIG' in str(w.message) for w in told))\n"
    )
    here = os.path.dirname(small_cnns.__file__)  # noqa: PTH120
    variables = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(one.path)],
        cwd=here, env=variables, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "1"


def test_plan_and_check_describe_the_gpu(data):
    its = torch.cuda.get_device_properties(0)
    plan = cerebro.plan(small_cnns.SPACE, data, epochs=1, n_trials=4, devices="cuda:0")
    assert (plan.workers, plan.devices) == (1, ("cuda:0",))
    assert plan.device_bytes == its.total_memory
    assert plan.resident_bytes == data.nbytes
    found = cerebro.check(small_cnns.build, small_cnns.SPACE, data, validation=0.25)
    assert found.ok and (found.device, found.not_exact) == ("cuda:0", [])
    assert "val_accuracy" in found.metrics


def test_a_model_for_the_cpu_is_trained_on_the_cpu(data, tmp_path):
    pytest.importorskip("sklearn")

    def build(config):
        from sklearn.linear_model import SGDClassifier

        return cerebro.sklearn.Model(SGDClassifier(loss="log_loss"))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = cerebro.search(
            build, {}, data, epochs=1, validation=0.25, n_trials=1, batch_size=32, workers=1,
            run=tmp_path / "run", progress=False,
        )  # fmt: skip
    assert result.saved.settings["devices"] == ("cpu",)


def test_jax_on_the_gpu_is_known():
    pytest.importorskip("jax")
    script = (
        "import jax\nfrom cerebro.machine import environment\njax.numpy.zeros(1)\n"
        "print(jax.default_backend(), environment.uses_gpu(environment.describe()))\n"
    )
    variables = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=variables, capture_output=True, text=True, check=True, timeout=280,
    )  # fmt: skip
    backend, known = done.stdout.split()[-2:]
    assert known == str(backend == "gpu")


def test_an_actor_of_ray_trains_on_its_gpu(one, data, tmp_path):
    pytest.importorskip("ray")
    executor = cerebro.ray.Executor(workers=1, resources={"GPU": 1})
    result = search(tmp_path / "run", data, executor=executor, devices="auto")
    assert hashes(result) == hashes(one)
    assert result.environment["cuda"] == one.environment["cuda"]
    assert result.saved.settings["devices"] == ("cuda",)


# --- graphs ---------------------------------------------------------------------


def weights(result):
    found = []
    for trial in result.trials:
        state = _core.unpack_state(trial.state_path("last").read_bytes(), "numpy")
        found.append(_core.hash_state(_core.pack_state(state["model"])))
    return found


def test_graphs_change_nothing_wherever_they_are_captured(data, tmp_path):
    one = search(tmp_path / "one", data, small_cnns.build_graph, workers_per_device=1)
    two = search(tmp_path / "two", data, small_cnns.build_graph, workers_per_device=2)
    assert hashes(two) == hashes(one)
    logs = "".join(trial.log for trial in one.trials)
    assert "not replayed" not in logs, logs
    refused = search(tmp_path / "refused", data, small_cnns.build_refused)
    assert (
        "not replayed as a CUDA graph: it waits for the GPU at small_cnns" in refused.trials[0].log
    )
    assert weights(refused) == weights(one)


# --- afterwards, elsewhere ----------------------------------------------------------


def test_a_model_that_was_trained_on_the_gpu_is_of_use_on_the_cpu(one, data):
    model = one.best.load()
    assert next(model.net.parameters()).device.type == "cpu"
    _, valid = data.split(0.75, 0.25)
    on_cpu = model.evaluate(valid)
    assert on_cpu["accuracy"] == pytest.approx(one.best.metrics["val_accuracy"], abs=0.02)
    assert one.best.predict(valid).shape == (valid.num_rows, 10)
    x = np.concatenate([valid.shard(i)["x"] for i in range(valid.num_shards)])
    predicted = model.predict(x)
    model.net.to("cuda")
    with torch.no_grad():
        again = model.net(torch.as_tensor(x).to("cuda")).cpu()
    torch.testing.assert_close(predicted, again, rtol=1e-2, atol=1e-2)


def test_evaluation_gives_the_recorded_metrics_bit_for_bit(one):
    recorded = one.best.metrics
    found = one.best.evaluate()
    assert found == {name: recorded[f"val_{name}"] for name in found}


def test_a_run_can_be_resumed_on_another_device(data, tmp_path, monkeypatch):
    run = tmp_path / "run"
    search(run, data, devices="cpu", workers=1)
    result = search(run, data, if_exists="resume")  # it is over: nothing is trained
    assert result.saved.settings["devices"] == ("cpu",)
    gpu = tmp_path / "gpu"
    search(gpu, data)
    monkeypatch.setattr(devices, "lookup", lambda: devices.Found(problem="taken away"))
    with pytest.warns(UserWarning, match="device was cuda, is cpu"):
        result = cerebro.resume(gpu, small_cnns.build, epochs=EPOCHS + 1, progress=False)
    assert all(trial.epoch == EPOCHS + 1 for trial in result.trials)


# --- what is not exact, and what breaks ---------------------------------------------


def build_bicubic(config, info):
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.Upsample(scale_factor=2, mode="bicubic"),
        torch.nn.Flatten(),
        torch.nn.LazyLinear(10),
    )
    net(torch.zeros(1, 3, 16, 16))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    return cerebro.torch.Model(net, optimizer=optimizer, loss=torch.nn.functional.cross_entropy)


def test_an_operation_without_a_deterministic_version_marks_the_trial(data, tmp_path):
    with pytest.warns(UserWarning, match=r"not exact: \S*bicubic\S* has no deterministic"):
        result = cerebro.search(
            build_bicubic, {}, data, epochs=1, validation=0.25, n_trials=1, batch_size=32,
            run=tmp_path / "run", progress=False, devices="cuda:0",
        )  # fmt: skip
    (name,) = result.trials[0].not_exact
    assert "bicubic" in name
    assert cerebro.open(tmp_path / "run").trials[0].not_exact == [name]


def test_check_names_an_operation_that_is_not_deterministic(data):
    found = cerebro.check(build_bicubic, {}, data, batch_size=32)
    (name,) = found.not_exact
    assert found.ok and "bicubic" in name and str(found).startswith("not exact on cuda:0: ")
    with pytest.raises(cerebro.InputError, match="bicubic"):
        cerebro.check(build_bicubic, {}, data, batch_size=32, deterministic=True)


def test_deterministic_true_refuses_an_operation_that_is_not(data, tmp_path):
    with pytest.raises(cerebro.RunError, match="bicubic"):
        cerebro.search(
            build_bicubic, {}, data, epochs=1, validation=0.25, n_trials=1, batch_size=32,
            run=tmp_path / "run", progress=False, devices="cuda:0", deterministic=True,
        )  # fmt: skip


def build_out_of_range(config, info):
    model = small_cnns.build(config, info)
    if info.trial == 2:
        train_batch = model.train_batch
        model.train_batch = lambda batch: train_batch({**batch, "y": batch["y"] + 1000})
    return model


def test_an_assertion_on_the_gpu_costs_its_trial_alone(one, data, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = search(tmp_path / "run", data, build_out_of_range, max_retries=1)
    assert [trial.status for trial in result.trials] == [
        *["finished", "finished", "failed", "finished"]
    ]
    # PyTorch's words or the loader's, whichever came upon it.
    assert "device-side assert" in result.trials[2].error
    expected = hashes(one)
    assert [h for i, h in enumerate(hashes(result)) if i != 2] == [
        h for i, h in enumerate(expected) if i != 2
    ]


def test_a_trial_that_runs_out_of_gpu_memory_fails_alone(data, tmp_path):
    def build(config, info):
        model = small_cnns.make(config, info)
        if info.trial == 1:
            torch.empty(10**15, device=info.device)
        return model

    result = search(tmp_path / "run", data, build)
    assert [trial.status for trial in result.trials] == [
        *["finished", "failed", "finished", "finished"]
    ]
    assert "out of memory" in result.trials[1].error


def test_models_that_were_dropped_make_room_for_another(one, data, tmp_path):
    """Two of them do not fit: each is found too large once, and trained after the other's end."""

    def build(config, info):
        torch.cuda.set_per_process_memory_fraction(0.03, info.device)
        model = small_cnns.make(config, info)
        total = torch.cuda.get_device_properties(info.device).total_memory
        model.ballast = torch.empty(int(0.016 * total), dtype=torch.uint8, device=info.device)
        return model

    result = search(tmp_path / "run", data, build)
    assert hashes(result) == hashes(one)


def test_large_models_that_were_dropped_are_freed(data, tmp_path):
    """Without a shortage of memory, too."""

    def build(config, info):
        print("allocated before", torch.cuda.memory_allocated())
        with torch.device(info.device):
            net = torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.Linear(768, 30_000), torch.nn.Linear(30_000, 10)
            )
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        return cerebro.torch.Model(net, optimizer=optimizer, loss=functional.cross_entropy)

    result = search(tmp_path / "run", data, build, live_models=1)
    size = 4 * (769 * 30_000 + 60_001 * 10)
    logs = "".join(trial.log for trial in result.trials)
    found = [int(line.split()[-1]) for line in logs.splitlines() if line.startswith("allocated")]
    assert len(found) > 4  # dropped, and built again
    # Two models with gradients, and what cuBLAS keeps.
    assert max(found) < 5 * size, [n / size for n in found]


class Attention(torch.nn.Module):
    """One layer over rows of pixels, long enough for sums of several blocks."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(1, 96)
        self.head = torch.nn.Linear(32, 10)

    def forward(self, x):
        q, k, v = (
            self.embed(x.flatten(1)[..., None])
            .view(len(x), -1, 2, 48)
            .transpose(1, 2)
            .chunk(3, dim=-1)
        )
        return self.head(
            functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1)
        )


def build_attention(config, info, amp=None):
    net = Attention()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    return cerebro.torch.Model(net, optimizer=optimizer, loss=functional.cross_entropy, amp=amp)


def build_attention_bf16(config, info):
    return build_attention(config, info, amp="bf16")


@pytest.mark.parametrize("build", [build_attention, build_attention_bf16])
def test_attention_is_exact(data, tmp_path, build):
    """PyTorch takes the deterministic versions only if nothing is tolerated."""
    found = [search(tmp_path / str(i), data, build) for i in range(2)]
    assert [trial.not_exact for trial in found[0].trials] == [[]] * 4
    assert hashes(found[0]) == hashes(found[1])
    best = found[0].best
    assert best.evaluate(build=build) == {"loss": best.metrics["val_loss"]}

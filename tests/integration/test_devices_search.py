"""Searches on GPUs that are there by name only: who works where, what is on record, what goes on.

The list of GPUs says that there are two; models are of NumPy, whose batches stay in host memory.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from meeting import Meet, meet

import cerebro
from cerebro.errors import InputError
from cerebro.executors.process import warm_workers
from cerebro.machine import devices, environment, generators
from cerebro.machine.devices import Device, Found
from cerebro.machine.resources import usable_cores
from cerebro.report.summary import render_trial

GPUS = Found((Device("cuda:0", "GPU A", 10**9, "3"), Device("cuda:1", "GPU A", 10**9, "5")))
SHARDS, EPOCHS = 5, 2


class Line:
    """Fits a number, and notes where it was built and trained."""

    framework = "numpy"

    def __init__(self, config, info):
        self.rate, self.end, self.met = config["rate"], config.get("end"), config.get("met")
        self.value = np.zeros(1)
        print("device", info.device, os.environ.get("CUDA_VISIBLE_DEVICES"))
        print("cublas", os.environ.get("CUBLAS_WORKSPACE_CONFIG"))

    def train_batch(self, batch):
        if self.met is not None:
            meet(Path(self.met))
        if self.end is not None and not Path(self.end).exists():
            Path(self.end).touch()
            os._exit(3)
        error = self.value - batch["x"].mean()
        self.value = self.value - self.rate * error
        return {"loss": float(error[0] ** 2)}

    def eval_batch(self, batch):
        return {"loss": float((self.value[0] - batch["x"].mean()) ** 2)}

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = np.array(state["value"])


def build(config, info):
    return Line(config, info)


def build_linear(config):
    import torch

    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])

    def step(net, batch):
        x = batch["x"].float()[:, None]
        return {"loss": (torch.nn.functional.dropout(net(x)) - x).square().mean()}

    return cerebro.torch.Model(net, optimizer=optimizer, step=step)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(devices, "lookup", lambda: GPUS)
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def data(tmp_path):
    x = np.random.default_rng(0).normal(size=100)
    return cerebro.shard({"x": x}, tmp_path / "data", shards=SHARDS, progress=False)


@pytest.fixture
def pools(tmp_path):
    """Four pools of shards, which may stay with their GPUs."""
    x = np.random.default_rng(0).normal(size=260)
    return cerebro.shard({"x": x}, tmp_path / "pools", shards=130, progress=False)


def search(data, run, *, ends=(), meets=None, model=None, **options):
    """Search; workers wait for each other in the folder `meets`, so that both train."""
    more = {"end": list(ends)} if ends else {}
    if meets is not None:
        more["met"], options["callbacks"] = str(meets), [Meet(meets)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the model computes on the CPU")
        return cerebro.search(
            model or build,
            {"rate": [0.1, 0.2, 0.3, 0.4], **more},
            data,
            **{"epochs": EPOCHS, "progress": False, **options},
            validation=0.2,
            searcher="grid",
            batch_size=4,
            run=run,
        )


def hashes(result):
    return [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]


def units(result, kind="train"):
    return [unit for unit in result.saved.units() if unit["kind"] == kind]


def test_states_equal_the_cpus_and_shards_stay_on_one_gpu(two_gpus, pools, tmp_path):
    options = {"shuffle": "shards"}
    expected = hashes(search(pools, tmp_path / "cpu", devices="cpu", workers=0, **options))
    result = search(pools, tmp_path / "gpus", workers_per_device=2, **options)
    assert hashes(result) == expected
    where: dict[int, set[int]] = {}
    for unit in units(result):
        where.setdefault(unit["part"], set()).add(unit["worker"])
    # The workers of a GPU hold each group together; they are assigned to the GPUs in turn.
    assert all(len({worker % 2 for worker in workers}) == 1 for workers in where.values())
    assert len(set().union(*where.values())) == 4  # two GPUs, two workers each
    assert len(units(result)) == 4 * EPOCHS * 34  # two pools of 32 shards, two of 33


def test_workers_see_their_own_gpu_only(two_gpus, data, tmp_path):
    result = search(data, tmp_path / "run", meets=tmp_path)
    logs = "".join(trial.log for trial in result.trials)
    assert {line for line in logs.splitlines() if line.startswith("device")} == {
        "device cuda:0 3",
        "device cuda:0 5",
    }
    assert "cublas :4096:8" in logs
    assert result.saved.settings["devices"] == ("cuda:0", "cuda:1")
    assert result.saved.settings["workers"] == 2
    assert result.environment["device"] == "cuda"


def test_one_gpu_of_two(two_gpus, data, tmp_path):
    result = search(data, tmp_path / "run", devices="cuda:1", workers_per_device=2)
    logs = "".join(trial.log for trial in result.trials)
    assert "device cuda:0 5" in logs and "device cuda:0 3" not in logs
    assert result.saved.settings["workers"] == 2


def test_a_replacement_worker_takes_the_lost_workers_shards(two_gpus, pools, tmp_path):
    options = {"shuffle": "shards"}
    expected = hashes(search(pools, tmp_path / "cpu", devices="cpu", workers=0, **options))
    result = search(pools, tmp_path / "run", ends=[str(tmp_path / "ended")], **options)
    assert (tmp_path / "ended").exists()
    assert hashes(result) == expected
    by_worker: dict[int, set[int]] = {}
    for unit in units(result):
        by_worker.setdefault(unit["worker"], set()).add(unit["part"])
    assert set(by_worker) <= {0, 1, 2}
    held = list(by_worker.values())
    # Whoever came has the shards of who went, and only those.
    assert all(a <= b or b <= a or not a & b for a in held for b in held)
    logs = "".join(trial.log for trial in result.trials)
    assert "device cuda:0 3" in logs and "device cuda:0 5" in logs


def test_shards_that_do_not_fit_are_read_by_all(monkeypatch, data, tmp_path):
    small = Found(tuple(Device(d.name, d.label, 100, d.visible) for d in GPUS.devices))
    monkeypatch.setattr(devices, "lookup", lambda: small)
    expected = hashes(search(data, tmp_path / "cpu", devices="cpu", workers=0))
    result = search(data, tmp_path / "gpus", live_models=1)
    assert hashes(result) == expected


def test_a_cpu_model_on_a_gpu_worker_warns(two_gpus, data, tmp_path):
    with pytest.warns(UserWarning, match=r"computes on the CPU.*devices='cpu'"):
        cerebro.search(
            build, {"rate": 0.1}, data, epochs=1, validation=0.2, batch_size=4, n_trials=1,
            run=tmp_path / "run", progress=False, devices="cuda",
        )  # fmt: skip


class OnTheCpu(Line):
    cpu_only = True


@pytest.fixture
def own_workers():
    """Workers that a test's models change are nobody else's."""
    warm_workers.close()
    yield
    warm_workers.close()


def search_quietly(build, data, run, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return cerebro.search(
            build, {"rate": [0.1, 0.2]}, data, epochs=1, validation=0.2, searcher="grid",
            batch_size=4, run=run, progress=False, **options,
        )  # fmt: skip


def test_a_cpu_model_stays_on_the_cpu_unless_gpus_are_requested(two_gpus, data, tmp_path):
    result = search_quietly(OnTheCpu, data, tmp_path / "auto", threads=2)
    settings = result.saved.settings
    assert (settings["devices"], settings["workers"]) == (("cpu",), max(1, usable_cores() // 2))
    assert all("device cpu None" in trial.log for trial in result.trials)
    assert result.environment["device"] == "cpu"
    again = search_quietly(OnTheCpu, data, tmp_path / "auto", threads=2, if_exists="resume")
    assert again.saved.settings["devices"] == ("cpu",)
    few = search_quietly(OnTheCpu, data, tmp_path / "few", workers=1)
    assert (few.saved.settings["devices"], few.saved.settings["workers"]) == (("cpu",), 1)
    assert cerebro.check(OnTheCpu, {"rate": 0.1}, data).device == "cpu"
    assert cerebro.check(OnTheCpu, {"rate": 0.1}, data, devices="cuda").device == "cuda:0"
    for options in ({"devices": "cuda"}, {"workers_per_device": 1}):
        with pytest.warns(UserWarning, match="computes on the CPU, but 2 worker"):
            asked = cerebro.search(
                OnTheCpu, {"rate": 0.1}, data, epochs=1, validation=0.2, batch_size=4, n_trials=1,
                run=tmp_path / "-".join(options), progress=False, **options,
            )  # fmt: skip
        assert asked.saved.settings["devices"] == ("cuda:0", "cuda:1")


def test_scikit_learn_models_run_on_the_cpu(two_gpus, data, tmp_path):
    pytest.importorskip("sklearn")

    def build(config):
        from sklearn.cluster import MiniBatchKMeans

        return cerebro.sklearn.Model(MiniBatchKMeans(2, random_state=0), inputs="x")

    result = search_quietly(build, data, tmp_path / "run", workers=1)
    assert result.saved.settings["devices"] == ("cpu",)
    assert cerebro.native.Model((1, 4, 4), 2).cpu_only


class Replayed(Line):
    """Trains as if its steps were replayed as graphs."""

    overlaps = replays_graphs = True


def test_a_search_trains_as_many_trials_at_once_as_each_gpu_has(two_gpus, data, tmp_path, capsys):
    """Two of four trials on each of two GPUs; a given number is obeyed, and so is a record."""

    def train(name, **options):
        options = {"model": Replayed, "progress": "lines", **options}
        result = search(data, tmp_path / name, **options)
        shown = capsys.readouterr()
        started = [line for line in (shown.out + shown.err).splitlines() if "starting" in line]
        return result, started

    expected = hashes(search(data, tmp_path / "cpu", devices="cpu", workers=0))
    result, started = train("default")
    assert hashes(result) == expected
    assert result.saved.settings["workers"] == 4
    assert len(started) == 2 and started[0].endswith("starting workers ...")
    assert started[1].endswith("starting 4 workers (2 lanes on each GPU) ...")
    _, again = train("default", if_exists="resume", epochs=EPOCHS + 1)
    assert again[0].endswith("starting 4 workers (2 lanes on each GPU) ...")
    one, _ = train("one", devices="cuda:1")
    assert one.saved.settings["workers"] == 4
    for options in ({"workers": 2}, {"workers_per_device": 1}):
        given, _ = train("-".join(options), **options)
        assert given.saved.settings["workers"] == 2
    ordinary, started = train("ordinary", model=build, devices="cuda")
    assert ordinary.saved.settings["workers"] == 2
    assert started[-1].endswith("starting 2 workers ...")


def test_a_check_says_how_many_trials_are_trained_at_once(two_gpus, data):
    found = cerebro.check(Replayed, {"rate": 0.1}, data)
    assert found.lanes == 16
    assert "a search trains up to 16 trials at once on each GPU" in str(found)
    for model, where in ((build, "cuda"), (Replayed, "cpu")):
        found = cerebro.check(model, {"rate": 0.1}, data, devices=where)
        assert found.lanes == 1 and "at once" not in str(found)


class ByJax(Line):
    """Says what JAX does that has taken a GPU."""

    def __init__(self, config, info):
        super().__init__(config, info)
        environment.jax_backend = lambda: "gpu"


def test_jax_on_a_gpu_is_not_taken_for_a_cpu_model(own_workers, two_gpus, data, tmp_path):
    result = search_quietly(ByJax, data, tmp_path / "gpus", devices="cuda")
    assert result.environment["jax_backend"] == "gpu"
    with pytest.warns(
        UserWarning, match=r"JAX computes on a GPU, which 1 worker\(s\) for the CPU share"
    ):
        search(data, tmp_path / "cpu", devices="cpu", workers=1, model=ByJax)


class Recorded(Line):
    """Has CUDA started, by what the record says."""

    def __init__(self, config, info):
        super().__init__(config, info)
        about = {"device": "GPU A", "runtime": "12.8", "cudnn": 91002}
        environment.cuda = lambda: about


def test_resume_warns_of_a_changed_cuda_version(own_workers, two_gpus, monkeypatch, data, tmp_path):
    run = tmp_path / "run"
    search(data, run, model=Recorded)
    first, second = GPUS.devices
    now = replace(first, about={"device": "GPU A", "runtime": "13.0", "cudnn": 91300})
    monkeypatch.setattr(devices, "lookup", lambda: Found((now, second)))
    with pytest.warns(UserWarning, match=r"cuda.cudnn was 91002, is 91300; cuda.runtime was 12.8"):
        cerebro.resume(run, Recorded, epochs=EPOCHS + 1, progress=False)


def test_gpus_of_different_kinds_cause_a_warning(monkeypatch, data, tmp_path):
    other = Device("cuda:1", "GPU B", 10**9, "5")
    monkeypatch.setattr(devices, "lookup", lambda: Found((GPUS.devices[0], other)))
    with pytest.warns(UserWarning, match=r"different kinds \(GPU A, GPU B\)"):
        search(data, tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search(data, tmp_path / "one", devices="cuda:1")


def test_requesting_a_missing_gpu_fails_and_creates_no_folder(monkeypatch, data, tmp_path):
    monkeypatch.setattr(devices, "lookup", lambda: Found(problem="no NVIDIA driver is loaded"))
    with pytest.raises(InputError, match=r"devices='cuda': no GPU can be used here"):
        search(data, tmp_path / "run", devices="cuda")
    assert not (tmp_path / "run").exists()
    assert search(data, tmp_path / "run").saved.settings["devices"] == ("cpu",)


def test_a_gpu_run_resumes_on_the_cpu_with_a_warning(two_gpus, monkeypatch, data, tmp_path):
    run = tmp_path / "run"
    search(data, run)
    monkeypatch.setattr(devices, "lookup", lambda: Found(problem="no NVIDIA driver is loaded"))
    with pytest.warns(UserWarning, match=r"a different environment.*device was cuda, is cpu"):
        result = cerebro.resume(run, build, epochs=EPOCHS + 1, progress=False)
    expected = search(data, tmp_path / "cpu", devices="cpu", workers=0)
    assert [row[:EPOCHS] for row in hashes(result)] == hashes(expected)
    assert all(trial.epoch == EPOCHS + 1 for trial in result.trials)
    with pytest.warns(UserWarning, match=r"trained differently: device was cuda, is cpu"):
        assert cerebro.replay(run, 1, build).identical


def test_a_gpu_run_resumes_on_its_gpus_without_a_warning(two_gpus, data, tmp_path):
    run = tmp_path / "run"
    search(data, run)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*a different environment")
        result = cerebro.resume(run, build, epochs=EPOCHS + 1, progress=False)
    assert all(trial.epoch == EPOCHS + 1 for trial in result.trials)


def test_a_resumed_cpu_run_stays_on_the_cpu(two_gpus, data, tmp_path):
    run = tmp_path / "run"
    search(data, run, devices="cpu", workers=1)
    result = cerebro.resume(run, build, epochs=EPOCHS + 1, progress=False)
    assert "cuda" not in "".join(trial.log for trial in result.trials)


def test_a_cpu_run_can_be_resumed_on_a_machine_with_gpus(two_gpus, data, tmp_path):
    run = tmp_path / "run"
    before = hashes(search(data, run, devices="cpu", workers=1))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the model computes on the CPU")
        result = search(data, run, if_exists="resume")
    assert hashes(result) == before


class Named(Line):
    """Reports where it is, as numbers."""

    def __init__(self, config, info):
        super().__init__(config, info)
        self.place = int(os.environ["CUDA_VISIBLE_DEVICES"]) if info.device == "cuda:0" else -1

    def eval_batch(self, batch):
        return {f"of_gpu_{self.place}": 1.0}


@pytest.mark.parametrize(
    ("wanted", "device", "metric"),
    [("auto", "cuda:0", "of_gpu_3"), ("cuda:1", "cuda:1", "of_gpu_5"), ("cpu", "cpu", "of_gpu_-1")],
)
def test_a_check_tries_the_model_where_a_search_would(two_gpus, data, wanted, device, metric):
    found = cerebro.check(Named, {"rate": 0.1}, data, validation=0.2, devices=wanted)
    assert (found.ok, found.device, found.not_exact) == (True, device, [])
    assert f"val_{metric}" in found.metrics
    assert "survives a hop" in str(found)


def test_check_refuses_missing_devices(monkeypatch, data):
    monkeypatch.setattr(devices, "lookup", lambda: Found(problem="no NVIDIA driver is loaded"))
    with pytest.raises(InputError, match=r"devices='cuda': no GPU can be used here"):
        cerebro.check(build, {"rate": 0.1}, data, devices="cuda")
    with pytest.raises(InputError, match=r"deterministic must be one of 'warn', True, False"):
        cerebro.check(build, {"rate": 0.1}, data, deterministic="no")
    assert cerebro.check(build, {"rate": 0.1}, data).device == "cpu"


def test_a_plan_has_the_workers_of_the_gpus(two_gpus, pools, tmp_path):
    options = {"epochs": EPOCHS, "searcher": "grid", "validation": 0.2, "shuffle": "shards"}
    plan = cerebro.plan({"rate": [0.1, 0.2, 0.3, 0.4]}, pools, workers_per_device=2, **options)
    train, valid = pools.split(0.8, 0.2)
    assert (plan.workers, plan.devices) == (4, ("cuda:0", "cuda:1"))
    assert plan.device_bytes == 10**9
    # The two workers of a GPU hold half of the shards together, and the validation data.
    assert plan.resident_bytes == int(train.nbytes / 2 + valid.nbytes)
    assert "gpus        cuda:0, cuda:1; 2 lanes on each GPU; " in str(plan)
    result = search(pools, tmp_path / "run", workers_per_device=2, shuffle="shards")
    assert plan.units == len(units(result)) + len(units(result, "eval"))
    rows = cerebro.plan({"rate": [0.1]}, pools, workers=2, **{**options, "shuffle": "rows"})
    assert rows.resident_bytes == train.nbytes + valid.nbytes  # each GPU has all
    one = cerebro.plan({"rate": [0.1, 0.2]}, pools, devices="cuda:1", **options)
    assert (one.workers, one.resident_bytes) == (1, train.nbytes + valid.nbytes)
    here = cerebro.plan({"rate": [0.1]}, pools, devices="cpu", workers=3, **options)
    assert (here.workers, here.devices, here.device_bytes) == (3, ("cpu",), 0)
    assert "gpus" not in str(here)


def test_a_plan_knows_that_shards_stay_with_their_gpu(two_gpus, tmp_path):
    """Of three pools one GPU has two, and with them two thirds of the work."""
    x = np.random.default_rng(0).normal(size=192)
    data = cerebro.shard({"x": x}, tmp_path / "data", shards=96, progress=False)
    options = {"epochs": 1, "searcher": "grid", "workers": 2, "shuffle": "shards"}
    space = {"rate": [0.1 * i for i in range(1, 11)]}
    assert cerebro.plan(space, data, **options).passes == pytest.approx(20 / 3, rel=0.02)
    assert cerebro.plan(space, data, devices="cpu", **options).passes == pytest.approx(5.0)
    together = cerebro.plan(space, data, stagger=False, **options)
    assert together.resident_bytes == data.nbytes  # each worker reads all


def test_a_plan_knows_that_a_gpus_workers_share_a_process(two_gpus, pools):
    """They hold its shards together, once; on one GPU each of them takes any shard."""
    options = {"epochs": 1, "searcher": "grid", "validation": 0.2, "shuffle": "shards"}
    space = {"rate": [0.1 * i for i in range(1, 11)]}
    train, valid = pools.split(0.8, 0.2)

    def plan(**more):
        found = cerebro.plan(space, pools, **options, **more)
        return found.passes, found.resident_bytes

    one, two = plan(workers_per_device=1), plan(workers_per_device=2)
    assert one[1] == two[1] == int(train.nbytes / 2 + valid.nbytes)
    assert two[0] < one[0]  # either of two workers takes a unit on their GPU's shards
    on_cpu = cerebro.plan(space, pools, devices="cpu", workers=3, **options)
    assert plan(devices="cuda:0", workers=3) == (on_cpu.passes, train.nbytes + valid.nbytes)
    assert plan(workers=2) == one


class Inexact(Line):
    """Says of every other trial's training what PyTorch says of a GPU's."""

    def __init__(self, config, info):
        super().__init__(config, info)
        self.says = info.trial % 2

    def train_batch(self, batch):
        if self.says:
            warnings.warn(
                "fold_cuda does not have a deterministic implementation, but you set "
                "'torch.use_deterministic_algorithms(True, warn_only=True)'",
                UserWarning,
                stacklevel=1,
            )
        return super().train_batch(batch)


def build_inexact(config, info):
    return Inexact(config, info)


@pytest.mark.parametrize("validation", [0.2, cerebro.KFold(2)], ids=["", "folds"])
def test_a_trial_that_is_not_exact_is_marked(two_gpus, data, tmp_path, validation):
    with pytest.warns(UserWarning, match="trial 1 is not exact: fold_cuda has no deterministic"):
        result = cerebro.search(
            build_inexact, {"rate": [0.1, 0.2]}, data, epochs=EPOCHS, validation=validation,
            searcher="grid", batch_size=4, run=tmp_path / "run", progress=False,
        )  # fmt: skip
    marks = [trial.not_exact for trial in cerebro.open(tmp_path / "run").trials]
    folds = not isinstance(validation, float)
    assert marks == ([["fold_cuda"]] * 2 if folds else [[], ["fold_cuda"]])
    if folds:
        assert [fold.not_exact for fold in result.trials[0].folds] == [[], ["fold_cuda"]]
    assert "not exact, because it used fold_cuda" in render_trial(result.trials[1])


class Always(Inexact):
    def __init__(self, config, info):
        super().__init__(config, info)
        self.says = True


def test_a_check_names_what_is_not_exact(two_gpus, data):
    found = cerebro.check(Always, {"rate": 0.1}, data)
    assert (found.ok, found.not_exact) == (True, ["fold_cuda"])
    assert str(found).startswith("not exact on cuda:0: no deterministic version of fold_cuda;")


def test_on_the_cpu_nothing_is_said_to_be_inexact(data, tmp_path):
    result = cerebro.search(
        build_inexact, {"rate": [0.1, 0.2]}, data, epochs=1, validation=0.2, searcher="grid",
        batch_size=4, run=tmp_path / "run", progress=False, devices="cpu", workers=1,
    )  # fmt: skip
    assert [trial.not_exact for trial in result.trials] == [[], []]
    assert "does not have a deterministic" in result.trials[1].log


def test_cuda_in_use_elsewhere_in_the_process_changes_no_state(data, tmp_path, monkeypatch):
    """A notebook that has used a GPU trains the same on the CPU, in itself and in workers."""
    torch = pytest.importorskip("torch")

    def train(run, workers):
        result = cerebro.search(
            build_linear, {"lr": [0.1, 0.2]}, data,
            epochs=EPOCHS, searcher="grid", batch_size=8, seed=2, workers=workers, devices="cpu",
            run=tmp_path / run, progress=False, validation=0.2,
        )  # fmt: skip
        return [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]

    expected = train("workers", 1)
    generator = torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: generator)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: None)
    assert generators.capture(True)["torch_cuda"].size == 16
    assert train("inline", 0) == expected

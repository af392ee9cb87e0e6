"""Frozen weights exist once per process, and on a node; results are those of weights of one's own.

The comparison is with models whose frozen parameters are parts of larger tensors: these are never
shared (`frozen_torch.isolate`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import frozen_torch
import torch
from frozen_torch import hashes, read_notes, search
from torch import nn

import cerebro

HERE = Path(__file__).parent
PROGRAM = [sys.executable, str(HERE / "frozen_torch.py")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> cerebro.Dataset:
    return frozen_torch.make_data(tmp_path_factory.mktemp("rows") / "rows")


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "seen"
    folder.mkdir()
    monkeypatch.setenv(frozen_torch.SEEN, str(folder))
    return folder


def need(base: str) -> None:
    if base == "bert":
        pytest.importorskip("transformers")
        pytest.importorskip("peft")


def list_frozen(run: Path) -> list[str]:
    return [path.name for path in (run / "states").iterdir() if ".frozen" in path.name]


@pytest.mark.parametrize("base", ["bert", "shared", "own"])
def test_results_are_those_without_sharing(data: Any, tmp_path: Path, base: str) -> None:
    need(base)
    alone = search(data, tmp_path / "alone", 0, {"base": base, "isolated": True})
    for workers in (0, 1, 2):
        run = tmp_path / str(workers)
        shared = search(data, run, workers, {"base": base}, live_models=1 + 3 * (workers != 1))
        assert hashes(shared) == hashes(alone)
        assert list_frozen(run) == []
    best = shared.best
    assert best.evaluate()["loss"] == best.metrics["loss"]
    assert cerebro.replay(shared, best).identical


@pytest.mark.parametrize("base", ["bert", "own"])
def test_all_models_of_a_worker_have_one_copy_and_workers_map_one_file(
    data: Any, tmp_path: Path, seen: Path, base: str
) -> None:
    need(base)
    search(data, tmp_path / "run", 2, {"base": base}, live_models=4)
    places, files = read_notes(seen, "places"), read_notes(seen, "files")
    assert len(places) == 2
    for process, noted in places.items():
        assert len(noted) >= 3  # epochs of at least one trial
        assert all(place == noted[0] for place in noted), process
    one, other = (noted[0] for noted in files.values())
    assert one.keys() == other.keys()
    mapped = [name for name in one if ".frozen" in one[name]]
    assert any("weight" in name for name in mapped)
    for name in mapped:
        assert one[name] == other[name]  # the inode, too


def test_make_is_called_once_per_process(data: Any, tmp_path: Path, seen: Path) -> None:
    search(data, tmp_path / "run", 2, {}, live_models=1)
    assert sorted(len(made) for made in read_notes(seen, "made").values()) == [1, 1]


@pytest.mark.parametrize("action", ["in place", "data", "numpy"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_write_to_a_shared_weight_is_undone_and_named(
    data: Any, tmp_path: Path, action: str, workers: int
) -> None:
    """Only the trial that writes has the change: others, of the same process, are unharmed."""
    space = {"base": "own", "rank": 2, "name": "0.3.weight", "action": ["nothing", action]}
    settings = {"live_models": 8, "epochs": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = search(data, tmp_path / "a", 0, {**space, "isolated": True}, **settings)
        still = search(data, tmp_path / "b", 0, {**space, "action": "nothing"}, **settings)
    with pytest.warns(UserWarning, match=r"written to weights that all trials share: '0.3.weight'"):
        shared = search(data, tmp_path / "c", workers, space, **settings)
    assert hashes(shared) == hashes(alone)
    assert not {*hashes(shared)} <= {*hashes(still)}  # the write mattered


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_unfrozen_weights_become_the_models_own(data: Any, tmp_path: Path, workers: int) -> None:
    space = {"rank": 2, "name": "0.3.weight", "action": ["nothing", "unfreeze"]}
    alone = search(data, tmp_path / "alone", 0, {**space, "isolated": True})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*written to weights")
        shared = search(data, tmp_path / "shared", workers, space, live_models=2 * workers or 1)
    assert hashes(shared) == hashes(alone)


def test_a_killed_run_resumes_with_the_same_results(data: Any, tmp_path: Path) -> None:
    alone = search(data, tmp_path / "alone", 0, {"isolated": True})
    run = tmp_path / "run"
    killed = subprocess.run([*PROGRAM, str(run), str(data.path), "9"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert list_frozen(run) != []
    resumed = cerebro.resume(run, frozen_torch.build, progress=False)
    assert hashes(resumed) == hashes(alone)
    assert list_frozen(run) == []


def test_the_check_finds_a_write_as_without_sharing(data: Any) -> None:
    class Counting(cerebro.torch.Model):
        def train_batch(self, batch: Any) -> Any:
            self.net[0].weight.data.mul_(0.5)
            return super().train_batch(batch)

    def build(config: Any) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            base = nn.Linear(4, 8).requires_grad_(False)
        net = nn.Sequential(
            frozen_torch.isolate(base) if config["alone"] else base, nn.Linear(8, 3)
        )
        optimizer = torch.optim.SGD(net[1].parameters(), lr=0.1)
        loss = nn.functional.cross_entropy
        return Counting(net, optimizer=optimizer, loss=loss, state="trainable")

    alone, shared = (
        cerebro.check(build, {"alone": alone}, data, batch_size=8) for alone in (True, False)
    )
    assert str(alone) == str(shared)
    assert "after a hop training continued differently" in str(shared)


MEMORY = """
import sys
from pathlib import Path
import frozen_torch, torch, cerebro
from torch import nn

peak = 0

def read_pss():
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10

class Model(cerebro.torch.Model):
    def end_epoch(self, epoch, metrics):
        global peak
        peak = max(peak, read_pss())
        return super().end_epoch(epoch, metrics)

def build(config, info):
    net = nn.Sequential(nn.Linear(4, 3600), info.shared("base", lambda: nn.Linear(3600, 3600)))
    net[0].requires_grad_(False)
    net.append(nn.Linear(3600, 3))
    optimizer = torch.optim.SGD(net[2].parameters(), lr=config["lr"])
    loss = nn.functional.cross_entropy
    return Model(net, optimizer=optimizer, loss=loss, state="trainable")

if __name__ == "__main__":
    space = {"lr": [0.001 * n for n in range(1, 1 + int(sys.argv[3]))]}
    data = cerebro.Dataset(sys.argv[1])
    options = dict(searcher="grid", epochs=2, batch_size=8, workers=0, live_models=16)
    cerebro.search(build, space, data, run=sys.argv[2], progress=False, **options)
    print(peak)
"""


def test_sixteen_adapters_fit_where_one_did(data: Any, tmp_path: Path) -> None:
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("the kernel does not tell the proportional size")
    program = tmp_path / "memory.py"
    program.write_text(MEMORY)
    peaks = []
    for trials in (1, 16):
        command = [sys.executable, "-W", "ignore", str(program), str(data.path)]
        command += [str(tmp_path / str(trials)), str(trials)]
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[-1]))
    base = 4 * 3600 * 3600
    assert peaks[0] > base
    assert peaks[1] - peaks[0] < base / 2  # without sharing 15 bases


# --- info.shared --------------------------------------------------------------------------------


def test_shared_values_are_one_object_and_modules_have_their_own_structure(
    data: Any, tmp_path: Path
) -> None:
    values, bases = [], []

    def build(config: Any, info: Any) -> Any:
        values.append(info.shared("table", lambda: {"table": object()}))
        base = info.shared("base", lambda: nn.Sequential(nn.Linear(4, 200), nn.BatchNorm1d(200)))
        bases.append(base)
        assert not any(p.requires_grad for p in base.parameters())
        net = nn.Sequential(*base, nn.Linear(200, 3))
        base.append(nn.Identity())  # as PEFT changes a base
        optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
        loss = nn.functional.cross_entropy
        return cerebro.torch.Model(net, optimizer=optimizer, loss=loss, state=config["state"])

    space = {"lr": [0.1, 0.2], "state": ["trainable", "all"]}
    options: dict[str, Any] = {"searcher": "grid", "epochs": 1, "batch_size": 8, "workers": 0}
    options |= {"progress": False}
    cerebro.search(build, space, data, run=tmp_path / "run", **options)
    assert len({id(value["table"]) for value in values}) == 1
    assert all(len(base) == 3 for base in bases)
    bases = bases[-4:]  # those before are of the check
    assert len({base[1].running_mean.data_ptr() for base in bases}) == 4
    weights = [base[0].weight for base in bases]
    # With state="all" the state has the weights, so each model needs its own.
    assert len({weight.data_ptr() for weight in weights}) == 3
    assert all(torch.equal(weight, weights[0]) for weight in weights)


def test_shared_has_clear_errors_and_works_outside_a_search(data: Any, tmp_path: Path) -> None:
    from cerebro.errors import InputError

    info = cerebro.Info(1, 1, 1, 1, 0, 0)
    with pytest.raises(InputError, match=r"info\.shared: name must be a str, not 3"):
        info.shared(3, dict)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"make must be a function without arguments, not \{\}"):
        info.shared("base", {})  # type: ignore[arg-type]
    assert info.shared("base", dict) == {}
    result = search(data, tmp_path / "run", 2, {})
    loaded = [trial.load().net[0] for trial in result.trials]
    for name, weight in loaded[0].named_parameters():
        for other in loaded[1:]:
            assert torch.equal(other.get_parameter(name), weight)
            assert other.get_parameter(name).data_ptr() != weight.data_ptr()

"""JAX models in a search: in this process, in workers, killed, replayed, cloned, exported."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import resumable_jax
from resumable import hashes

import cerebro
import cerebro._core as _core
from cerebro.control import Clone
from cerebro.machine.libraries import JAX
from cerebro.searchers import Decision, Searcher


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Keep compiled programs on the disk, for this process and its workers, as the guide says."""
    import jax

    folder = str(tmp_path_factory.mktemp("compiled"))
    before = jax.config.jax_compilation_cache_dir
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", folder)
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        yield
    jax.config.update("jax_compilation_cache_dir", before)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    x = np.random.default_rng(0).normal(size=(150, 3)).astype("float32")
    folder = tmp_path_factory.mktemp("data") / "set"
    cerebro.shard({"x": x, "y": x.sum(1)}, folder, shards=2, progress=False)
    return folder


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    return resumable_jax.search(tmp_path_factory.mktemp("runs") / "whole", data)


def test_inline_and_in_workers_the_bits_are_the_same(whole, data, tmp_path):
    inline = resumable_jax.search(tmp_path / "inline", data, workers=0)
    assert inline.status == whole.status == "finished"
    assert hashes(inline) == hashes(whole)
    assert cerebro.replay(inline, 1, resumable_jax.build).identical


def build_some_wide(config, info):
    import jax

    if config["wide"]:
        jax.config.update("jax_enable_x64", True)
    return resumable_jax.build({"lr": 0.01, "dropout": 0.1}, info)


def test_jax_settings_made_in_build_apply_to_its_trial_only(data, tmp_path):
    def ran(name, workers, epochs=2):
        return cerebro.search(
            build_some_wide, {"wide": [True, False]}, data, epochs=epochs, validation=0.2,
            searcher="grid", batch_size=20, workers=workers, run=tmp_path / name, progress=False,
        )  # fmt: skip

    before = JAX.present()
    inline, workers, part = ran("inline", 0), ran("workers", 2), ran("part", 0, epochs=1)
    assert JAX.present() == before and not inline.environment["jax"]["enable_x64"]
    assert hashes(inline) == hashes(workers)
    kinds = [trial.load().params["hidden"].dtype.name for trial in inline]
    assert kinds == ["float64", "float32"]
    for trial in inline:
        measured = trial.evaluate()
        assert measured == {name: trial.metrics[f"val_{name}"] for name in measured}
    resumed = cerebro.resume(part.path, build_some_wide, epochs=2, workers=0, progress=False)
    assert hashes(resumed) == hashes(inline) and JAX.present() == before


MODEL = """
import cerebro, jax, jax.numpy as jnp, optax

def model(scale, config, info):
    params = {"w": jax.random.normal(jax.random.key(info.seed), (3,))}
    return cerebro.jax.Model(
        lambda params, x, *, key: x * scale @ params["w"] + jax.random.normal(key),
        params,
        optimizer=optax.adam(config["lr"]),
        loss=lambda outputs, y: ((outputs - y) ** 2).mean(),
    )
"""

SEARCHES = """
import json, sys
import jax, jax.numpy as jnp
import cerebro, of_settings

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_default_prng_impl", "rbg")
SCALE = jnp.arange(1, 4) / 3  # workers get this array with build

def build(config, info):
    return of_settings.model(SCALE, config, info)

if __name__ == "__main__":
    data, *folders = sys.argv[1:]
    for workers, folder in enumerate(folders):
        cerebro.search(
            build, {"lr": cerebro.loguniform(1e-3, 3e-2)}, data, n_trials=2, epochs=2, seed=7,
            validation=0.2, batch_size=20, workers=workers, run=folder, progress=False,
        )
"""

READS = """
import sys
import numpy as np
import cerebro

def build(config, info):
    import of_settings
    return of_settings.model(np.arange(1, 4) / 3, config, info)

if __name__ == "__main__":
    for folder in sys.argv[1:]:
        result = cerebro.Result(folder, build=build)
        best = result.best
        model = best.load()
        import jax
        assert model.params["w"].dtype == "float64" and not jax.config.jax_enable_x64
        assert jax.config.jax_default_prng_impl == "threefry2x32"
        x = np.ones((4, 3), "float32")
        assert best.predict({"x": x}).dtype == "float64"
        assert model.predict(x).dtype == "float32"  # by itself with the settings of the process
        recorded = {n.removeprefix("val_"): v for n, v in best.metrics.items() if "val_" in n}
        assert best.evaluate() == recorded
        again = cerebro.resume(folder, build=build, epochs=3, progress=False)
        assert not jax.config.jax_enable_x64
        assert {t.load("last", build=build).params["w"].dtype.name for t in again.trials} == {
            "float64"
        }
        assert cerebro.replay(again, 1, build).identical
        print([t.state_hash for t in again.trials])
"""


def test_jax_settings_of_a_script_apply_to_workers_and_the_run(data, tmp_path):
    for name, text in (("of_settings", MODEL), ("searches", SEARCHES), ("reads", READS)):
        (tmp_path / f"{name}.py").write_text(text)

    def run(name, *arguments):
        command = [sys.executable, tmp_path / f"{name}.py", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    folders = [tmp_path / "inline", tmp_path / "workers"]
    run("searches", data, *folders)
    inline, result = map(cerebro.Result, folders)
    assert hashes(inline) == hashes(result)
    for found in (inline, result):
        assert found.environment["jax"]["enable_x64"]
        assert found.environment["jax"]["default_prng_impl"] == "rbg"
        state = _core.unpack_state(found.best.state_path().read_bytes(), "numpy")["model"]
        assert state["params"]["w"].dtype == "float64"
        assert state["key"].shape == (4,)
    first, second = run("reads", *folders)
    assert first == second


def test_killed_then_resumed(whole, data, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, resumable_jax.__file__, folder, data, "5"]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    result = cerebro.resume(folder, workers=1, progress=False)
    assert result.status == "finished"
    assert hashes(result) == hashes(whole)


def test_a_trial_is_loaded_evaluated_and_exported(whole, tmp_path):
    best = whole.best
    model = best.load()
    assert isinstance(model, cerebro.jax.Model)
    assert model.params["out"].dtype == "bfloat16"
    assert best.evaluate() == pytest.approx(
        {name.removeprefix("val_"): v for name, v in best.metrics.items() if "val_" in name}
    )
    x = np.ones((5, 3), dtype="float32")
    np.testing.assert_array_equal(best.predict({"x": x}), model.predict(x))
    saved = _core.unpack_state(best.export(tmp_path / "net.safetensors").read_bytes(), "numpy")
    assert saved.keys() == {"params", "variables"}
    assert saved["params"]["hidden"].tobytes() == np.asarray(model.params["hidden"]).tobytes()
    with pytest.raises(cerebro.InputError, match=r"onnx needs a cerebro\.torch\.Model, not a cere"):
        best.export(tmp_path / "net.onnx", format="onnx")
    with pytest.raises(
        cerebro.InputError, match="cannot hold JAX arrays: use format='safetensors'"
    ):
        best.export(tmp_path / "net.pt", format="torch")


def test_clones_continue_with_their_own_learning_rate(data, tmp_path):
    result = resumable_jax.search(
        tmp_path / "pbt",
        data,
        workers=0,
        n_trials=2,
        searcher=cerebro.PBT(population=2, quantile=0.5),
    )
    clone = next(trial for trial in result.trials if trial.parent is not None)
    rate = clone.load("last").optimizer_state.hyperparams["learning_rate"]
    assert float(rate) == np.float32(clone.config["lr"])
    assert cerebro.replay(result, clone.number, resumable_jax.build).identical


def forgetful(config, info):
    model = resumable_jax.build(config, info)
    train, model.offset = model.train_batch, 0.0

    def shifted(batch):
        model.offset += 0.5
        return train({**batch, "y": batch["y"] + model.offset})

    model.train_batch = shifted
    return model


def test_check_finds_what_is_not_in_the_state(data):
    found = cerebro.check(forgetful, resumable_jax.SPACE, cerebro.Dataset(data), batch_size=25)
    assert "training continued differently: state_dict()['params']" in found.problems[0]
    assert "model.offset is lost by a hop: it is not in state_dict()" in found.problems


NUMBERS = itertools.count()


def numbered(config, info):
    """A model as with flax, whose modules (and so ``net.apply``) have a number each."""
    model = resumable_jax.build(config, info)
    model.number = type("FlaxId", (), {"__module__": "flax.ids"})()
    model.number.id = next(NUMBERS)
    return model


def test_check_does_not_take_a_flax_modules_number_for_state(data):
    space, data = resumable_jax.SPACE, cerebro.Dataset(data)
    assert cerebro.check(numbered, space, data, batch_size=25).problems == []


class ClonesOnce(Searcher):
    """Trains one trial, and clones it once with another batch size."""

    adaptive = True

    def __init__(self):
        self.begun, self.ready = 0, False

    def suggest(self):
        if self.begun == 2:
            return cerebro.DONE
        if self.begun == 1 and not self.ready:
            return None
        self.begun += 1
        if self.begun == 1:
            return cerebro.Suggestion({"lr": 0.1, "batch_size": 50})
        return cerebro.Suggestion({"lr": 0.1, "batch_size": 25}, parent=0)

    def report(self, trial, epoch, metrics):
        if trial == 0 and epoch == 0:
            self.ready = True
        return Decision.STOP if trial == 0 else Decision.CONTINUE

    def state_dict(self):
        return {"begun": self.begun, "ready": self.ready}

    def load_state_dict(self, state):
        self.__dict__.update(state)


def build_with_rate(config, info):
    import optax

    rate = optax.cosine_decay_schedule(config["lr"], info.total_steps)
    if config["lr"] < 0.1:
        rate = config["lr"]
    return cerebro.jax.Model(
        lambda params, x: x @ params["w"],
        {"w": np.zeros(3, "float32")},
        optimizer=optax.adam(rate),
        loss=lambda outputs, y: ((outputs - y) ** 2).mean(),
    )


def test_a_clone_with_another_batch_size_is_refused_where_a_schedule_counts_batches(data, tmp_path):
    options = {"workers": 0, "epochs": 2, "progress": False}
    searched = cerebro.search(
        build_with_rate, {}, data, searcher=ClonesOnce(), run=tmp_path / "adaptive", **options
    )
    problem = "another batch size .25 instead of 50. would move the clone's schedule"
    assert searched.trials[1].status == "failed"
    assert re.search(problem, searched.trials[1].error)

    space = {"lr": [0.1, 0.01], "batch_size": [50]}
    plain = cerebro.search(
        build_with_rate, space, data, searcher="grid", run=tmp_path / "plain", **options
    )
    numbers = {trial.config["lr"]: trial.number for trial in plain.trials}
    more = {"epochs": 3, "after": 2}
    with pytest.raises(cerebro.InputError, match=problem):
        cerebro.resume(
            plain, build_with_rate, actions=[Clone(numbers[0.1], {"batch_size": 25}, **more)]
        )
    assert len(cerebro.open(plain.path).trials) == 2
    with pytest.raises(cerebro.InputError, match=r"the state has optimizer/1/count.*clone it cold"):
        cerebro.resume(plain, build_with_rate, actions=[Clone(numbers[0.1], {"lr": 0.05}, **more)])
    # Without a schedule, nothing is at another place.
    clone = Clone(numbers[0.01], {"batch_size": 25}, **more)
    result = cerebro.resume(plain, build_with_rate, actions=[clone])
    assert result.trials[2].status == "finished"

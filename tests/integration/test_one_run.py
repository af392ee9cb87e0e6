"""A script without a main guard starts one run, whatever imports it to find its ``build``.

A search that a worker begins would begin others in its own workers, without end. So every script
here ends its process as soon as it is imported by a process of a process that has imported it,
and so does a ``build`` that searches, which reaches workers without an import.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

SECONDS = 120.0

TRIPWIRE = """
import os, sys


def trip():
    ids = [pid for pid in os.environ.get("IMPORTED_BY", "").split() if pid != str(os.getpid())]
    if len(ids) > int(os.environ.get("DEEPEST", "1")):
        open("tripped", "w").close()
        os._exit(66)
    os.environ["IMPORTED_BY"] = " ".join([*ids, str(os.getpid())])


trip()
"""

MODEL = """
import numpy as np
import cerebro


class Line:
    framework = "numpy"

    def __init__(self, lr):
        self.lr = lr
        self.w = np.zeros(3)

    def train_batch(self, batch):
        error = np.asarray(batch["x"]) @ self.w - np.asarray(batch["y"])
        self.w -= self.lr * (np.asarray(batch["x"]) * error[:, None]).mean(0)
        return {"loss": float((error**2).mean())}

    eval_batch = train_batch

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])


def build(config):
    return Line(config["lr"])


space = {"lr": [0.1, 0.2]}
data = cerebro.Dataset("data")
WORKERS = int(os.environ.get("WORKERS", "2"))
"""

SEARCH = """
result = cerebro.search(build, space, data, epochs=2, validation=0.25, batch_size=16, n_trials=2,
                        workers=WORKERS, progress=False)
print("searched", result.path)
"""

SCRIPT = TRIPWIRE + MODEL + SEARCH

MAKE_DATA = """
import numpy as np, cerebro
rng = np.random.default_rng(0)
x = rng.normal(size=(200, 3))
cerebro.shard({"x": x, "y": x @ [1.0, -2.0, 0.5]}, "data", shards=4, progress=False)
"""

CURE = 'put it under `if __name__ == "__main__":`'


class Place:
    """A folder with data and a script, in which programs are run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    def python(self, *arguments: str, status: int | None = 0, **env: str) -> str:
        """Run a program; return what it has printed. None of its processes outlives it."""
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.path,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert not (self.path / "tripped").exists(), text
        assert status is None or process.returncode == status, text
        return text

    def cerebro(self, *arguments: str, status: int = 0, **env: str) -> str:
        return self.python("-m", "cerebro", *arguments, status=status, **env)

    def program(self, text: str, status: int | None = 0, **env: str) -> str:
        """Run a program that is no module which a worker could import."""
        return self.python("-c", text, status=status, **env)

    @property
    def runs(self) -> list[str]:
        """The folders of all runs, oldest first."""
        return sorted(str(run.parent.relative_to(self.path)) for run in
                      self.path.rglob("run.sqlite"))  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    subprocess.run([sys.executable, "-c", MAKE_DATA], cwd=path, check=True)
    return path / "data"


@pytest.fixture
def place(tmp_path: Path, data: Path) -> Place:
    (tmp_path / "data").symlink_to(data)
    found = Place(tmp_path)
    found.write("train.py", SCRIPT)
    return found


@pytest.fixture(params=["0", "1", "2"])
def workers(request: pytest.FixtureRequest) -> str:
    number: str = request.param
    return number


# --- the commands -----------------------------------------------------------------


def test_commands_that_import_a_script_start_no_run(place: Place, workers: str) -> None:
    place.python("train.py", WORKERS=workers)
    (run,) = place.runs
    env = {"WORKERS": workers}
    told = place.cerebro("replay", run, "--trial", "0", "--build", "train.py", **env)
    assert "every state identical" in told
    assert place.cerebro("export", run, "--out", "w.safetensors", "--build", "train.py", **env)
    further = ("resume", run, "--epochs", "3", "--progress", "none", "--build", "train.py")
    assert "2 finished" in place.cerebro(*further, **env)
    assert place.runs == [run]


def test_a_run_of_an_imported_script_is_found_by_its_name(place: Place, workers: str) -> None:
    assert "searched" in place.program("import train", WORKERS=workers)
    (run,) = place.runs
    assert "identical" in place.cerebro("replay", run, "--trial", "1", WORKERS=workers)
    place.cerebro("export", run, "--out", "w.safetensors", WORKERS=workers)
    further = ("resume", run, "--epochs", "3", "--progress", "none")
    assert "2 finished" in place.cerebro(*further, WORKERS=workers)
    assert place.runs == [run]


def test_run_uses_definitions_above_the_search_call_in_the_file(place: Place, workers: str) -> None:
    told = place.cerebro("run", "train.py", "--epochs", "1", "--n-trials", "2", "--run", "runs/a",
                         "--workers", workers, "--validation", "0.25", "--batch-size", "16",
                         "--progress", "none")  # fmt: skip
    line = 1 + (TRIPWIRE + MODEL).count("\n") + 1
    warning = f"train.py, line {line}: the file calls cerebro.search itself. That call is ignored"
    assert warning in told and "run the file: python train.py" in told
    assert "2 finished" in told and "searched" not in told
    assert place.runs == ["runs/a"]


def test_run_refuses_a_file_that_searches_before_all_is_defined(place: Place) -> None:
    script = SCRIPT.replace("space =", "its_space =").replace("space,", "its_space,")
    place.write("train.py", script + "space = its_space\n")
    told = place.cerebro("run", "train.py", "--epochs", "1", status=1)
    assert (
        f"cerebro.search is called while the file is being imported, before space is set: {CURE}"
        in (told)
    )
    assert "train.py, line " in told
    assert place.runs == []


def test_a_command_names_the_fix_if_build_is_defined_after_the_search(place: Place) -> None:
    place.python("train.py", WORKERS="0")
    (run,) = place.runs
    place.write("late.py", SCRIPT.replace("build", "make") + "build = make\n")
    for command in (("replay", "--trial", "0"), ("export", "--out", "w.pt"), ("resume",)):
        told = place.cerebro(command[0], run, *command[1:], "--build", "late.py", status=1)
        assert "late.py, line " in told and f"before build is set: {CURE}" in told
    assert place.runs == [run]


# --- the functions ----------------------------------------------------------------


def test_functions_that_find_build_start_no_run(place: Place, workers: str) -> None:
    place.program("import train", WORKERS=workers)
    (run,) = place.runs
    told = place.program(
        f"""
import cerebro
run = cerebro.open({run!r})
run.best.load()
print(run.best.evaluate())
print(cerebro.replay(run, 0))
print(cerebro.resume(run, epochs=3).summary())
import train
run = cerebro.open({run!r}, build=train.build)
run.best.export("w.safetensors")
print(train.space)
try:
    train.result
except AttributeError as error:
    print(error)
""",
        WORKERS=workers,
    )
    assert "identical" in told and "2 finished" in told and "{'lr': [0.1, 0.2]}" in told
    assert "module 'train' has no 'result': " in told and CURE in told
    assert place.runs == [run]


OTHERS = {
    "resume": "cerebro.resume('runs/other')",
    "replay": "cerebro.replay('runs/other', 0)",
    "check": "cerebro.check(make, space, data)",
    "optuna.optimize": (
        "import cerebro.optuna, optuna\n"
        "cerebro.optuna.optimize(optuna.create_study(), make, data, epochs=1)"
    ),
    "ray.fit": (
        "import cerebro.ray\ncerebro.ray.fit(make, data, param_space={}, num_samples=1, epochs=1)"
    ),
    "SearchCV.fit": (
        "from sklearn.linear_model import SGDClassifier\n"
        "import cerebro.sklearn\n"
        "cerebro.sklearn.SearchCV(SGDClassifier(), {'alpha': [0.1]}, workers=1).fit("
        "[[0.0], [1.0]] * 20, [0, 1] * 20)"
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_training_call_is_refused_during_import(place: Place, name: str) -> None:
    library = {"optuna": "optuna", "ray": "ray", "SearchCV": "sklearn"}.get(name.partition(".")[0])
    if library is not None:
        pytest.importorskip(library)
    calls = f"try:\n    raise KeyError\nexcept KeyError:\n    exec({OTHERS[name]!r})\n"
    place.write("train.py", TRIPWIRE + MODEL.replace("build", "make") + "build = make\n" + calls)
    place.write("other.py", TRIPWIRE + MODEL.replace("build", "make") + calls)
    place.write("program.py", "import os\n" + MODEL + SEARCH)
    place.python("program.py", WORKERS="1")
    (run,) = place.runs
    assert "identical" in place.cerebro("replay", run, "--trial", "0", "--build", "train.py")
    told = place.cerebro("replay", run, "--trial", "0", "--build", "other.py", status=1)
    called = name if name == "SearchCV.fit" else f"cerebro.{name}"
    assert f"{called} is called while the file is being imported" in told and CURE in told
    assert place.runs == [run]


# --- a module that imports a script -----------------------------------------------


MODULES = {
    "from": "from train import build\n",
    "import": "import train\n\n\ndef build(config):\n    return train.Line(config['lr'])\n",
}


@pytest.mark.parametrize("how", MODULES)
def test_a_module_that_imports_a_script_starts_no_run(place: Place, workers: str, how: str) -> None:
    place.write("models.py", MODULES[how])
    place.python("train.py", WORKERS=workers)
    (run,) = place.runs
    arguments = ("replay", run, "--trial", "0", "--build", "models.py")
    assert "every state identical" in place.cerebro(*arguments, WORKERS=workers)
    assert place.runs == [run]


@pytest.mark.parametrize("how", MODULES)
def test_a_search_that_imports_a_script_by_a_module_does_not_repeat_its_run(
    place: Place, workers: str, how: str
) -> None:
    place.write("models.py", MODULES[how])
    program = f"""
import cerebro, models
result = cerebro.search(models.build, {{"lr": [0.1]}}, "data", epochs=1, validation=0.25,
                        batch_size=16, workers={workers}, n_trials=1, run="own", progress=False)
print(result.status)
"""
    told = place.program(program, WORKERS="0")
    assert "finished" in told
    assert len(place.runs) == 2  # this program's, and the one of the script that it imports


def test_a_script_imported_by_build_in_a_worker_starts_no_run(place: Place, workers: str) -> None:
    place.write(
        "program.py",
        "import cerebro\n"
        "def make(config):\n"
        "    from train import Line\n"
        "    return Line(config['lr'])\n"
        "print(cerebro.search(make, {'lr': [0.1, 0.2]}, 'data', epochs=1, validation=0.25,\n"
        f"      batch_size=16, workers={workers}, n_trials=2, run='runs/a', progress=False))\n",
    )
    assert "finished" in place.python("program.py")
    assert place.runs == ["runs/a"]


# --- what scripts do about it -----------------------------------------------------

WAYS = {
    "except Exception": "try:\n    {call}\nexcept Exception as error:\n    sys.exit(error)\n",
    "except BaseException": "try:\n    {call}\nexcept BaseException:\n    pass\n",
    "again and again": "for _ in range(3):\n    try:\n        {call}\n    except BaseException:\n"
    "        pass\n",
    "finally": "try:\n    {call}\nfinally:\n    print('over')\n",
    "main()": "def main():\n    {call}\n\n\nmain()\n",
    "exec": "exec({call!r})\n",
    "exec of a file": "exec(compile(open('call.py').read(), 'call.py', 'exec'))\n",
    "runpy": "import runpy\nrunpy.run_path('whole.py')\n",
    "a thread": (
        "import threading\nthread = threading.Thread(target=lambda: {call})\n"
        "thread.start()\nthread.join()\n"
    ),
    "a nested import": "import nested\n",
}


@pytest.mark.parametrize("way", WAYS)
def test_no_way_of_calling_defeats_the_guard(place: Place, way: str) -> None:
    call = (
        "cerebro.search(build, space, data, epochs=1, validation=0.25, batch_size=16, n_trials=1, "
        "workers=1, progress=False)"
    )
    place.write("call.py", call)
    place.write("whole.py", TRIPWIRE + MODEL + call + "\n")
    place.write("nested.py", TRIPWIRE + MODEL + call + "\n")
    place.write("train.py", TRIPWIRE + MODEL + WAYS[way].replace("{call!r}", repr(call)).replace(
        "{call}", call))  # fmt: skip
    place.write("program.py", "import os\n" + MODEL + SEARCH)
    place.python("program.py", WORKERS="0")
    (run,) = place.runs
    told = place.cerebro("replay", run, "--trial", "0", "--build", "train.py")
    assert "identical" in told
    assert place.runs == [run]


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("where", ["script", "worker"])
def test_multiprocessing_children_that_import_a_script_start_no_run(
    place: Place, method: str, where: str
) -> None:
    """They import the script, as a module of their own, and begin nothing."""
    child = (
        "def child(lr):\n    return Line(lr)\n\n\n"
        "def build(config):\n    import multiprocessing\n"
        f"    process = multiprocessing.get_context({method!r}).Process("
        "target=child, args=(config['lr'],))\n"
        "    process.start()\n    process.join()\n    return Line(config['lr'])\n"
    )
    place.write("train.py", TRIPWIRE + MODEL + child + SEARCH)
    if where == "script":  # the parent's script is what a child imports
        place.python("train.py", WORKERS="0")
    else:
        place.program("import train", WORKERS="1", DEEPEST="2")  # also the child imports it
    assert len(place.runs) == 1


# --- inside of a trial ------------------------------------------------------------


def test_a_search_inside_of_a_trial_is_refused(place: Place, workers: str) -> None:
    inside = (
        "\n\ndef build(config):\n    trip()\n"
        "    cerebro.search(build, space, data, epochs=1, n_trials=1, batch_size=16,\n"
        "                   validation=0.25, progress=False)\n"
    )
    place.write("train.py", TRIPWIRE + MODEL + inside + SEARCH)
    told = place.python("train.py", status=1, WORKERS=workers)
    assert "cerebro.search is called inside a trial, which cannot start a run" in told
    step = (
        "    def eval_batch(self, batch):\n        trip()\n"
        "        cerebro.check(build, space, data)\n"
    )
    place.write("step.py", TRIPWIRE + MODEL.replace("    eval_batch = train_batch", step) + SEARCH)
    told = place.python("step.py", status=1, WORKERS=workers)
    assert "cerebro.check is called inside a trial" in told
    assert len(place.runs) == 2  # those that failed


def test_a_build_that_searches_is_refused_where_it_is_loaded(place: Place) -> None:
    place.write("train.py", "import os\n" + MODEL + SEARCH)
    place.python("train.py", WORKERS="1")
    (run,) = place.runs
    told = place.program(f"""
import cerebro
def build(config):
    cerebro.search(build, {{}}, "data", epochs=1, n_trials=1, batch_size=16, progress=False)
cerebro.open({run!r}).best.load(build=build)
""", status=1)  # fmt: skip
    assert "cerebro.search is called inside a trial" in told
    assert place.runs == [run]


# --- sys.argv ---------------------------------------------------------------------

ARGUMENTS = """
import sys
SCALE = float(sys.argv[1])


def build(config):
    assert float(sys.argv[1]) == SCALE, (sys.argv, SCALE)
    return Line(config["lr"] * float(sys.argv[1]))

"""


def test_sys_argv_in_workers_is_the_scripts(place: Place, workers: str) -> None:
    place.write("train.py", TRIPWIRE + MODEL + ARGUMENTS + SEARCH)
    place.python("train.py", "0.5", WORKERS=workers)
    (run,) = place.runs
    # A command takes the arguments that the run was begun with.
    told = place.cerebro("replay", run, "--trial", "0", "--build", "train.py", WORKERS=workers)
    assert "every state identical" in told
    place.cerebro("export", run, "--out", "w.safetensors", "--build", "train.py")
    further = ("resume", run, "--epochs", "3", "--progress", "none", "--build", "train.py")
    assert "2 finished" in place.cerebro(*further, WORKERS=workers)
    assert place.runs == [run]


def test_a_file_that_is_run_has_no_arguments(place: Place) -> None:
    asserted = "import sys\n    assert sys.argv == ['args.py'], sys.argv\n    return Line"
    settings = "settings = dict(epochs=1, n_trials=1, batch_size=16, validation=0.25, workers=1)\n"
    place.write("args.py", "import os\n" + MODEL.replace("return Line", asserted) + settings)
    assert "1 finished" in place.cerebro("run", "args.py", "--progress", "none")


# --- Ray --------------------------------------------------------------------------

RAY = """
import ray
ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR",
         object_store_memory=100_000_000, log_to_driver=False)
"""


def ray_program(place: Place, lines: Sequence[str], *arguments: str, status: int = 0) -> str:
    pytest.importorskip("ray.tune")
    place.write("program.py", RAY + "\n".join(lines) + "\n")
    path = os.pathsep.join([str(place.path), os.environ["PYTHONPATH"]])
    return place.python("program.py", *arguments, status=status, WORKERS="1", PYTHONPATH=path)


def test_ray_workers_that_import_a_script_start_no_run(place: Place) -> None:
    place.write("train.py", TRIPWIRE + MODEL + ARGUMENTS + SEARCH)
    told = ray_program(place, [
        "import cerebro, cerebro.ray",
        "from train import build",  # this is the one run
        "from train import result",
        "result = cerebro.resume(result, epochs=3, executor=cerebro.ray.Executor(workers=2))",
        "print(result.summary())",
        "print(cerebro.replay(result, 0))",
    ], "0.5")  # fmt: skip
    assert "2 finished" in told and "every state identical" in told
    assert len(place.runs) == 1


@pytest.mark.parametrize("by", ["name", "value"])
def test_the_ray_tune_engine_that_imports_a_script_starts_no_run(place: Place, by: str) -> None:
    place.write("train.py", TRIPWIRE + MODEL + ARGUMENTS + SEARCH)
    lines = ["import cerebro.ray", "from ray import tune"]
    if by == "name":  # this is the one run
        lines += ["from train import build"]
    else:
        lines += ["def build(config):", "    import train", "    return train.build(config)"]
    lines += [
        "trainable = cerebro.ray.trainable(build, cerebro.Dataset('data'), batch_size=16,",
        "                                  epochs=2, workers=1, run='tune')",
        "config = tune.TuneConfig(metric='loss', mode='min', num_samples=1)",
        "done = tune.Tuner(trainable, param_space={'lr': 0.1}, tune_config=config).fit()",
        "assert not done.errors, done.errors",
        "print('loss', done.get_best_result().metrics['loss'])",
    ]
    assert "loss " in ray_program(place, lines, "0.5")
    assert len([run for run in place.runs if run != "tune"]) == (by == "name")
    assert "tune" in place.runs


def test_a_tuner_in_a_script_is_refused(place: Place) -> None:
    pytest.importorskip("ray.tune")
    tuner = (
        "import cerebro.ray\nfrom ray import tune\n" + RAY + "tune.Tuner(cerebro.ray.trainable("
        "build, data, batch_size=16, epochs=1, workers=1, run='tune'), param_space=dict(lr=0.1))"
        ".fit()\n"
    )
    place.write("train.py", TRIPWIRE + MODEL + tuner)
    place.write("program.py", "import os\n" + MODEL + SEARCH)
    place.python("program.py", WORKERS="0")
    (run,) = place.runs
    told = place.cerebro("export", run, "--out", "w.safetensors", "--build", "train.py")
    assert place.runs == [run], told

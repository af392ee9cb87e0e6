"""The user edits files while a search trains, and between two searches: a run is of one program."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import warnings

import numpy as np
import pytest

import cerebro
from cerebro.errors import CorruptDataError
from cerebro.executors.local import LocalExecutor

MODEL = """
import numpy as np

class Model:
    framework = "numpy"

    def __init__(self, lr, factor):
        self.lr, self.factor = lr, factor
        self.w = np.zeros(3)

    def train_batch(self, batch):
        error = batch["x"] @ self.w - batch["y"]
        self.w = self.w - self.lr * self.factor * batch["x"].T @ error / len(error)
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch):
        return {"loss": float(((batch["x"] @ self.w - batch["y"]) ** 2).mean())}

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])
"""

WHOLE = {"op_user.py": MODEL + "\ndef build(config):\n    return Model(config['lr'], 1.0)\n"}
HELPER = {
    "op_user.py": "from op_model import Model\n"
    "def build(config):\n    return Model(config['lr'], 1.0)\n",
    "op_model.py": MODEL,
}
LATE = {
    "op_user.py": "def build(config):\n"
    "    import op_model\n"
    "    from op_package.late import factor\n"
    "    return op_model.Model(config['lr'], factor())\n",
    "op_model.py": MODEL,
    "op_package/__init__.py": "",
    "op_package/late.py": "def factor():\n    return 1.0\n",
}
PACKAGE = {
    "op_user/__init__.py": "from .main import build\n",
    "op_user/main.py": "from . import model\nfrom .settings import FACTOR\n"
    "def build(config):\n"
    "    from .deep.late import shifted\n"
    "    return model.Model(config['lr'], shifted(FACTOR))\n",
    "op_user/model.py": MODEL,
    "op_user/settings.py": "FACTOR = 0.5\n",
    "op_user/deep/late.py": "def shifted(value):\n    return value + 0.5\n",  # no __init__.py
}
DATA = {  # a file that is read, and what traceback and inspect show
    "op_user.py": MODEL + "\nimport inspect, pathlib\n"
    "def build(config):\n"
    "    factor = float(pathlib.Path(__file__).with_name('factor.txt').read_text())\n"
    "    assert 'edited' not in inspect.getsource(Model.train_batch)\n"
    "    assert Model.train_batch.__code__.co_filename == __file__\n"
    "    return Model(config['lr'], factor)\n",
    "factor.txt": "1.0",
}
LAYOUTS = {"whole": WHOLE, "helper": HELPER, "late": LATE, "package": PACKAGE, "data": DATA}

EDITS = (
    ("self.lr * self.factor", "3 * self.lr * self.factor  # edited"),
    ("FACTOR = 0.5", "FACTOR = 2.5"),
    ("return 1.0", "return 3.0"),
    ("value + 0.5", "value + 2.5"),
)


def write(folder, layout):
    for name, text in layout.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def edit(folder):
    for file in folder.rglob("*.py"):
        text = file.read_text()
        for before, after in EDITS:
            text = text.replace(before, after)
        file.write_text(text)


def remove(folder):
    """As `git checkout` of a branch without these files."""
    for file in folder.rglob("*.py"):
        file.unlink()


def make_packages(folder):
    for file in folder.glob("*.py"):
        file.unlink()
        file.with_suffix("").mkdir(exist_ok=True)
        (file.with_suffix("") / "__init__.py").write_text("raise SystemError('of another branch')")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    x = np.random.default_rng(0).normal(size=(160, 3))
    rows = {"x": x, "y": x @ [1.0, -2.0, 0.5]}
    return cerebro.shard(rows, tmp_path_factory.mktemp("data") / "set", shards=4)


def forget():
    for name in [name for name in sys.modules if name.startswith("op_")]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder of the user's modules, on ``sys.path``."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield folder
    forget()


class Disturb:
    def __init__(self, *acts):
        self.acts, self.units = dict(acts), 0

    def on_unit_end(self, trial, metrics):
        self.units += 1
        self.acts.get(self.units, lambda: None)()


def search(data, run, build, *acts, **options):
    options = {"epochs": 4, "searcher": "grid", "batch_size": 16, "validation": 0.2} | options
    space = {"lr": [0.1, 0.03, 0.01]}
    callbacks = [Disturb(*acts)]
    return cerebro.search(
        build, space, data, run=run, progress=False, callbacks=callbacks, **options
    )


def hashes(result):
    return [trial.state_hash for trial in result.trials]


def kill_one(executor):
    os.kill(max(executor.processes().values()), signal.SIGKILL)


def kill_all(executor):
    for process in executor.processes().values():
        os.kill(process, signal.SIGKILL)


def load(project, layout):
    write(project, LAYOUTS[layout])
    return importlib.import_module("op_user").build


@pytest.mark.parametrize("fork", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replacement_worker_uses_the_code_from_the_start_of_the_run(
    data, tmp_path, project, layout, fork
):
    build = load(project, layout)
    calm = hashes(search(data, tmp_path / "calm", build, workers=0))
    forget()
    build = importlib.import_module("op_user").build
    executor = LocalExecutor(2, 1, fresh=True, fork=fork)
    acts = (4, lambda: edit(project)), (8, lambda: kill_one(executor))
    result = search(data, tmp_path / "run", build, *acts, executor=executor)
    assert [event["kind"] for event in result.events()].count("worker lost") == 1
    assert hashes(result) == calm
    assert result.status == "finished"


@pytest.mark.parametrize("disturb", [remove, make_packages])
@pytest.mark.parametrize("layout", ["helper", "late", "package"])
def test_deleted_or_moved_source_files_are_still_imported(data, tmp_path, project, layout, disturb):
    build = load(project, layout)
    calm = hashes(search(data, tmp_path / "calm", build, workers=0))
    forget()
    build = importlib.import_module("op_user").build
    executor = LocalExecutor(2, 1, fresh=True)
    acts = (4, lambda: disturb(project)), (8, lambda: kill_one(executor))
    result = search(data, tmp_path / "run", build, *acts, executor=executor)
    assert hashes(result) == calm


def test_a_late_inline_import_uses_the_code_from_the_start_of_the_run(data, tmp_path, project):
    write(project, LATE)
    (project / "op_user.py").write_text(
        "def build(config):\n"
        "    import op_model\n"
        "    if config['lr'] == 0.01:\n"  # of the last trial
        "        from op_package.late import factor\n"
        "        return op_model.Model(config['lr'], factor())\n"
        "    return op_model.Model(config['lr'], 1.0)\n"
    )
    build = importlib.import_module("op_user").build
    options = {"workers": 0, "stagger": False, "shuffle": "shards"}
    calm = hashes(search(data, tmp_path / "calm", build, **options))
    forget()
    build = importlib.import_module("op_user").build
    result = search(data, tmp_path / "run", build, (1, lambda: edit(project)), **options)
    assert hashes(result) == calm


def test_the_next_search_uses_edits_to_files_not_yet_imported(data, tmp_path, project):
    build = load(project, "late")
    first = hashes(search(data, tmp_path / "1", build, (4, lambda: edit(project)), workers=2))
    second = hashes(search(data, tmp_path / "2", build, workers=2))
    assert first != second == hashes(search(data, tmp_path / "3", build, workers=0))
    write(project, LATE)
    forget()
    build = importlib.import_module("op_user").build
    assert hashes(search(data, tmp_path / "4", build, workers=2)) == first


def test_a_package_that_a_finder_finds_is_kept(data, tmp_path, project, monkeypatch):
    """As ``pip install -e`` does without a path file: a module maps names to folders."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    write(
        place,
        {
            "op_package/__init__.py": "",
            **{
                f"op_package/{n}": t
                for n, t in {
                    "late.py": "def factor():\n    return 1.0\n",
                    "model.py": MODEL,
                }.items()
            },
        },
    )
    (project / "__editable___op_finder.py").write_text(
        f"MAPPING = {{'op_package': {str(place / 'op_package')!r}}}\n"
        "import sys\n"
        "from importlib.util import spec_from_file_location\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name in MAPPING:\n"
        "            return spec_from_file_location(name, MAPPING[name] + '/__init__.py')\n"
        "sys.meta_path.append(Finder)\n"
    )
    (project / "op_user.py").write_text(
        "import __editable___op_finder\n"
        "def build(config):\n"
        "    from op_package.late import factor\n"
        "    from op_package.model import Model\n"
        "    return Model(config['lr'], factor())\n"
    )
    build = importlib.import_module("op_user").build
    executor = LocalExecutor(2, 1, fresh=True)
    acts = (4, lambda: edit(place)), (8, lambda: kill_one(executor))
    try:
        result = search(data, tmp_path / "run", build, *acts, executor=executor)
        write(
            place,
            {"op_package/late.py": "def factor():\n    return 1.0\n", "op_package/model.py": MODEL},
        )
        assert hashes(result) == hashes(search(data, tmp_path / "calm", build, workers=0))
    finally:
        finder = sys.modules.pop("__editable___op_finder")
        sys.meta_path.remove(finder.Finder)


def test_changing_a_module_that_was_not_kept_fails_the_search(data, tmp_path, project):
    """Of a folder with very many files, not all are kept."""
    write(project, LATE)
    for number in range(600):
        (project / f"a{number}.py").write_text("")
    build = importlib.import_module("op_user").build
    executor = LocalExecutor(2, 1, fresh=True)
    acts = (4, lambda: edit(project)), (8, lambda: kill_all(executor))
    with pytest.raises(CorruptDataError, match=r"op_\w+\.py has changed since the search began"):
        search(data, tmp_path / "run", build, *acts, executor=executor)
    write(project, LATE)
    result = cerebro.resume(tmp_path / "run", build, progress=False)
    calm = search(data, tmp_path / "calm", build, workers=0)
    assert hashes(result) == hashes(calm)


# --- between two searches of one process -----------------------------------------


def both(data, tmp_path, build):
    """The states with and without workers."""
    found = []
    for workers in (0, 2, 1):
        run = tmp_path / f"{workers}-{time.monotonic_ns()}"
        found.append(hashes(search(data, run, build, workers=workers)))
    assert found[0] == found[1] == found[2]
    return found[0]


@pytest.mark.parametrize("layout", ["whole", "helper", "package"])
def test_an_edit_without_a_reload_warns_and_is_not_trained(data, tmp_path, project, layout):
    build = load(project, layout)
    first = both(data, tmp_path, build)
    edit(project)
    with pytest.warns(UserWarning, match=r"op_\w+.*\.py w\w+ edited after this program imported"):
        assert both(data, tmp_path, build) == first
    for name in sorted((n for n in sys.modules if n.startswith("op_")), reverse=True):
        importlib.reload(sys.modules[name])
    importlib.reload(sys.modules["op_user"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert both(data, tmp_path, sys.modules["op_user"].build) != first


def test_a_touched_but_unchanged_file_does_not_warn(data, tmp_path, project):
    build = load(project, "helper")
    edit(project)
    write(project, HELPER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search(data, tmp_path / "run", build, workers=0)


def test_a_build_from_before_a_reload_uses_the_reloaded_model(data, tmp_path, project):
    build = load(project, "whole")
    first = both(data, tmp_path, build)
    edit(project)
    module = importlib.reload(sys.modules["op_user"])
    second = both(data, tmp_path, module.build)
    assert first != second == both(data, tmp_path, build)  # it finds the new Model


def test_a_reloaded_helper_module_is_used_for_training(data, tmp_path, project):
    write(project, HELPER)
    (project / "op_user.py").write_text(
        "import op_model\ndef build(config):\n    return op_model.Model(config['lr'], 1.0)\n"
    )
    build = importlib.import_module("op_user").build
    first = both(data, tmp_path, build)
    edit(project)
    importlib.reload(sys.modules["op_model"])
    assert both(data, tmp_path, build) != first


def test_objects_left_from_before_a_reload_cause_a_warning(data, tmp_path, project):
    build = load(project, "helper")
    edit(project)
    importlib.reload(sys.modules["op_model"])
    with pytest.warns(UserWarning, match=r"op_user\.py has Model of .*op_model\.py from before"):
        search(data, tmp_path / "run", build, workers=0)
    importlib.reload(sys.modules["op_user"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both(data, tmp_path, sys.modules["op_user"].build)


def test_the_run_records_the_source_that_it_trains(data, tmp_path, project):
    build = load(project, "whole")
    first = search(data, tmp_path / "1", build, workers=0)
    edit(project)
    with pytest.warns(UserWarning, match="edited after"):
        second = search(data, tmp_path / "2", build, workers=0)
    recorded = [result.saved.meta["build"] for result in (first, second)]
    assert recorded[0] == recorded[1]
    importlib.reload(sys.modules["op_user"])
    third = search(data, tmp_path / "3", sys.modules["op_user"].build, workers=0)
    assert third.saved.meta["build"]["file_hash"] != recorded[0]["file_hash"]

"""Data read from disk is never unpickled or executed.

Unpickling runs code that the file chooses. The first tests read the sources: only the two ends of
the pipe between a process and its own workers import an unpickler, and they read no files. Then
files with pickles are opened while every unpickler is a trap.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "cerebro"
BINDING = ROOT / "csrc" / "python"

UNPICKLERS = {
    *("pickle", "_pickle", "pickletools", "cloudpickle", "dill", "joblib", "marshal", "shelve"),
    *("jsonpickle", "hickle", "klepto"),
}

# Allowed because their pickles come from a socket to a process that this one has started, or that
# has proved by its key to belong to the same run, and carry the user's own functions.
ALLOWED = {
    "executors/local.py": "packs a search for its own workers and reads their answers",
    "_worker.py": "reads what the process that started it sends",
    "executors/wire.py": "packs these messages, and opens what was sent with searches refused",
    "cluster/wire.py": "reads what peers send that have proved to have the cluster's key",
    "integrations/sklearn/candidates.py": "compares a user's objects by their hashes",
    "integrations/sklearn/heads.py": "reads what this search put into its temporary folder",
}

# Sources of these bytes: a connection directly, or these names.
RECEIVED = {"recv_bytes", "message", "messages", "context", "program"}

# Not users' files: received bytes.
READS_FILES_OF_THE_SYSTEM = {
    "executors/wire.py": "BytesIO(message)",
}

# Functions that unpickle by default, and the argument that prevents it.
GUARDED = {"load": {"np", "numpy", "torch"}, "load_state_dict_from_url": {"torch", "hub"}}
SAFE = {"np": "allow_pickle", "numpy": "allow_pickle", "torch": "weights_only"}
FORBIDDEN_CALLS = {"read_pickle", "read_array", "unsafe_load", "unsafe_load_all"}
FORBIDDEN_BUILTINS = {"eval", "exec", "compile"}

READS_FILES = {"open", "read_bytes", "read_text", "load", "memmap", "fdopen", "open_plain"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def imported(tree: ast.AST) -> Iterator[str]:
    """Return every module imported in a file, including in functions and by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))


def called(node: ast.Call) -> str:
    """Return the last name of a called function: ``load`` of ``np.load(...)``."""
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def at(file: Path, call: ast.Call) -> str:
    return f"{name_of(file)}:{call.lineno} calls {ast.unparse(call.func)}"


def owner(node: ast.Call) -> str:
    """Return ``np`` for ``np.load(...)``, "" for a plain function."""
    function = node.func
    while isinstance(function, ast.Attribute):
        function = function.value
        if isinstance(function, ast.Name):
            return function.id
    return ""


def test_only_the_pipe_to_workers_unpickles() -> None:
    found = {
        name_of(file)
        for file in modules()
        if {name.partition(".")[0] for name in imported(ast.parse(file.read_text()))} & UNPICKLERS
    }
    assert found == set(ALLOWED)


# Its files lie in a temporary folder that only this user can open, and that the search has made.
READS_OWN_FILES = {"integrations/sklearn/heads.py"}


@pytest.mark.parametrize("name", sorted(ALLOWED.keys() - READS_OWN_FILES))
def test_modules_that_unpickle_read_no_files(name: str) -> None:
    source = (PACKAGE / name).read_text()
    reads = [
        ast.unparse(call)
        for call in calls(ast.parse(source))
        if called(call) in READS_FILES
        and READS_FILES_OF_THE_SYSTEM.get(name, "\0") not in ast.unparse(call)
    ]
    assert reads == []
    for call in calls(ast.parse(source)):
        if owner(call) in UNPICKLERS and called(call) in ("load", "loads", "Unpickler"):
            assert called(call) == "loads"
            (argument,) = call.args
            names = {node.id for node in ast.walk(argument) if isinstance(node, ast.Name)}
            names |= {called(node) for node in calls(argument)}
            assert names & RECEIVED, ast.unparse(call)


def test_loaders_are_told_not_to_unpickle() -> None:
    problems = []
    for file in modules():
        for call in calls(ast.parse(file.read_text())):
            name, of = called(call), owner(call)
            if name in FORBIDDEN_CALLS and of not in ("connection", "cursor", "self"):
                problems.append(f"{name_of(file)}:{call.lineno} calls {name}")
            if of in GUARDED.get(name, ()):
                given = {word.arg: word.value for word in call.keywords}
                value = given.get(SAFE.get(of, ""))
                safe = isinstance(value, ast.Constant) and value.value is (of == "torch")
                if not safe:
                    problems.append(f"{name_of(file)}:{call.lineno} calls {of}.{name} unguarded")
    assert problems == []


def test_the_binding_imports_no_unpickler() -> None:
    names = set()
    for file in sorted(BINDING.glob("*.c")):
        source = file.read_text()
        names |= set(re.findall(r'PyImport_Import\w*\(\s*"([^"]+)"', source))
        names |= set(re.findall(r'\bcall\(\s*"([^"]+)"', source))
        code = r"\b(PyMarshal_\w+|PyRun_\w+|PyEval_EvalCode\w*|Py_CompileString\w*)\("
        assert re.findall(code, source) == [], file.name
    assert "torch" in names  # they are found
    assert {name.partition(".")[0] for name in names} & UNPICKLERS == set()


# --- with traps ---------------------------------------------------------------

# Every unpickler ends the process with a distinct status.
TRAPS = """
import os, sys

def trap(*args, **kwargs):
    sys.stderr.write("unpickled\\n")
    sys.stderr.flush()
    os._exit(77)

import _pickle, pickle
for module in (_pickle, pickle):
    for name in ("load", "loads", "Unpickler", "_load", "_loads", "_Unpickler"):
        if hasattr(module, name):
            setattr(module, name, trap)

def hook(event, args):
    if event == "pickle.find_class":
        trap()

sys.addaudithook(hook)
"""

# The pickle's code: it creates a file.
PAYLOAD = """
class Payload:
    def __reduce__(self):
        import os
        return os.system, ("touch unpickled",)
"""

MAKE = (
    PAYLOAD
    + """
import pickle, zipfile, sys
import numpy as np

import cerebro

bad = np.array([Payload(), Payload()], dtype=object)
np.savez("object.npz", x=bad, y=np.zeros(2))
np.save("object.npy", bad, allow_pickle=True)
with zipfile.ZipFile("torch.npz", "w") as archive:
    archive.writestr("archive/data.pkl", pickle.dumps(Payload()))
with open("state.safetensors", "wb") as file:
    pickle.dump(Payload(), file)

x = np.arange(40.0).reshape(20, 2)
data = cerebro.shard({"x": x, "y": x[:, 0]}, "data", shards=2)

class Model:
    framework = "numpy"
    w = np.zeros(2)
    def train_batch(self, batch): return {"loss": 1.0}
    def eval_batch(self, batch): return {"loss": 1.0}
    def state_dict(self): return {"w": self.w}
    def load_state_dict(self, state): self.w = state["w"]

cerebro.search(lambda config: Model(), {"a": [1, 2]}, data, epochs=1, n_trials=2, batch_size=4,
               validation=0.5, workers=0, run="run", progress=False)
"""
)

OPEN = """
from pathlib import Path
import shutil

import cerebro
import cerebro._core as _core
import cerebro.cli as cli
from cerebro.errors import CerebroError

def refused(function, *args):
    try:
        function(*args)
    except CerebroError as error:
        print(error)
    else:
        raise AssertionError(args)

cerebro.Dataset("data").verify()
cerebro.Dataset("data").stats("x")
list(cerebro.Dataset("data").batches(4, framework="numpy"))
result = cerebro.open("run")
assert result.verify(), str(result.verify())
repr(result), result.summary(), result.trials[0].log, result.trials[0].history
for command in (["show", "run"], ["verify", "run"], ["verify", "data"]):
    assert cli.main(command) == 0, command

pickled = Path("state.safetensors").read_bytes()
refused(_core.unpack_state, pickled)
refused(cerebro.shard, "object.npz", "out")
refused(cerebro.shard, "torch.npz", "out")
assert not Path("out").exists()
shutil.copy("object.npy", "data/shard-00000/x.npy")
refused(cerebro.Dataset, "data")
state = next(Path("run/states").absolute().glob("*.safetensors"))
shutil.copy("state.safetensors", state)
assert any(str(state) in problem.where for problem in result.verify().problems)
Path("run/run.sqlite").write_bytes(pickled)
refused(cerebro.open, "run")
Path("data/manifest.json").write_bytes(pickled)
refused(cerebro.Dataset, "data")
"""

ARROW = (
    PAYLOAD
    + """
import pickle
import pyarrow as pa, pyarrow.parquet as pq
field = pa.field("x", pa.int64(), metadata={
    "ARROW:extension:name": "arrow.py_extension_type",
    "ARROW:extension:metadata": pickle.dumps(Payload()),
})
table = pa.table([pa.array([1, 2, 3])], schema=pa.schema([field]))
pq.write_table(table, "x.parquet")
with pa.OSFile("x.arrow", "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
    writer.write_table(table)
"""
)

READ_ARROW = """
import cerebro
for name in ("x.parquet", "x.arrow"):
    assert cerebro.shard(name, "out-" + name, shards=1).num_rows == 3
"""


def python(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_traps_catch_an_unpickler(tmp_path: Path) -> None:
    assert python(tmp_path, MAKE).returncode == 0
    for program in (
        "import numpy as np; np.load('object.npy', allow_pickle=True)",
        "import pickle; pickle.loads(b'N.')",
        "from cloudpickle import loads; loads(b'N.')",
    ):
        run = python(tmp_path, TRAPS + program)
        assert (run.returncode, run.stderr) == (77, "unpickled\n"), run.stderr
        assert not (tmp_path / "unpickled").exists()


def test_pickles_on_disk_are_never_loaded(tmp_path: Path) -> None:
    made = python(tmp_path, MAKE)
    assert made.returncode == 0, made.stderr
    run = python(tmp_path, TRAPS + OPEN)
    assert run.returncode == 0, run.stderr
    assert not (tmp_path / "unpickled").exists()
    assert "dtype object, which would have to be unpickled" in run.stdout
    assert "data.pkl" in run.stdout


def test_pickles_in_arrow_files_are_never_loaded(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    made = python(tmp_path, ARROW)
    assert made.returncode == 0, made.stderr
    run = python(tmp_path, TRAPS + READ_ARROW)
    assert run.returncode == 0, run.stderr
    assert not (tmp_path / "unpickled").exists()

"""The coordinator, the store, the executors and the workers get the time, the disk, processes and
messages at their start; they have no other way to them.

So a simulation can give them others (`tests/sim`). Reads the files; imports nothing. What these
folders read of the data, map of frozen weights (`cerebro.torch.frozen`), and ask about memory and
GPUs (`cerebro.machine`), is not looked at.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "cerebro"

FOLDERS = ("coordinator", "run/store", "executors", "worker")
FILES = (*(f"{folder}/**/*.py" for folder in FOLDERS), "run/states.py")

EVERYTHING = "everything"

# Files that are the way to the machine themselves: why, and the names that they may use.
EXCEPTIONS: dict[str, tuple[str, Collection[str]]] = {
    "executors/fork_server.py": ("starts real processes", {EVERYTHING}),
    "executors/process.py": ("is a real process", {EVERYTHING}),
    "executors/wire.py": ("sends over real sockets", {EVERYTHING}),
    "coordinator/conduct.py": (
        "asks for the program's own script, and for full paths before trials may change the "
        "working directory",
        {".absolute", ".cwd", ".is_file", ".resolve"},
    ),
    "run/store/writing.py": (
        "asks for the full path before trials may change the working directory",
        {".absolute"},
    ),
    "executors/inline.py": (
        "puts back the working directory, which trials may change",
        {"os.chdir", "os.getcwd"},
    ),
    "worker/log.py": (
        "redirects the output of a real process, and of the C code in it, by its descriptors",
        {
            *("import ctypes", "io.FileIO", "machine.files.open_plain", "open"),
            *("os.close", "os.dup", "os.dup2", "os.fdopen", "os.fstat", "os.open"),
        },
    ),
    "worker/clock.py": (
        "`faulthandler` writes to a descriptor, at a time that it takes itself",
        {"import faulthandler", "machine.files.open_plain", "os.close"},
    ),
}

REAL = "machine.local.LOCAL"

# Where things are put together: the files that may name the real machine, and why.
PUT_TOGETHER = {
    "coordinator/conduct.py": "a search trains on this machine; a simulation begins below it",
    "run/store/reading.py": "a result reads its run on this machine, also without a coordinator",
    "run/store/writing.py": "those who only record something in a run do it on this machine",
    "executors/local.py": "the worker processes are this machine's, unless others are given",
    "executors/inline.py": "the worker is the user's process, unless it is given another machine",
}

SYSTEM_MODULES = {
    *("time", "datetime", "threading", "concurrent", "asyncio", "sched"),
    *("shutil", "tempfile", "glob", "fcntl", "mmap"),
    *("subprocess", "multiprocessing", "ctypes", "faulthandler"),
    *("socket", "select", "selectors"),
}
"""`queue` is not one of them: a queue is what a task waits for in its step (`Tasks.repeat`)."""

# Of these modules, only the listed names are not a way to the machine.
HARMLESS = {
    "os": {
        *("PathLike", "environ", "fspath", "fsencode", "fsdecode", "sep", "pathsep", "devnull"),
        *("path.join", "path.basename", "path.dirname", "path.split", "path.splitext"),
        *("path.isabs", "path.normpath", "path.commonpath"),
    },
    "io": {
        *("BytesIO", "StringIO", "IOBase", "RawIOBase", "BufferedIOBase", "TextIOBase"),
        *("BufferedWriter", "TextIOWrapper"),
    },
    "signal": {"Signals"},
    "cerebro.machine.files": {
        *("ExhaustedError", "LinkError", "StorageError", "explain_storage_errors", "is_full"),
        *("is_plain_name", "load_json"),
    },
    "cerebro.machine.local": {"Clock", "Event", "Machine", "Task", "Tasks"},
    "cerebro.machine.disk": {"AnyPath", "Disk", "OpenFolder"},
    "cerebro.machine.durable": {"publish", "replace_file", "sync_folder"},
}

# Single names that are a way to the machine.
WAYS = {
    "sqlite3.connect",
    *(f"cerebro.machine.resources.{name}" for name in ("is_stopped", "count_kills", "start_of")),
    *(f"cerebro.machine.signals.{name}" for name in ("WakePipe", "wait_for")),
}

# Types, and functions that take the disk: calling these, or not passing the disk, is one.
CALLS = {
    *(f"cerebro._core.{name}" for name in ("Slots", "check_slots", "BeatPage")),
    *(f"cerebro.machine.local.{name}" for name in ("Clock", "Machine", "Tasks")),
    *(f"cerebro.machine.disk.{name}" for name in ("Disk", "OpenFolder")),
}
TAKE_DISK = {f"cerebro.machine.durable.{name}" for name in HARMLESS["cerebro.machine.durable"]}

PATH_METHODS = {
    *("exists", "is_file", "is_dir", "is_symlink", "is_mount", "stat", "lstat", "samefile"),
    *("read_bytes", "read_text", "write_bytes", "write_text", "touch", "chmod", "readlink"),
    *("iterdir", "glob", "rglob", "mkdir", "rmdir", "unlink", "rename", "symlink_to"),
    *("hardlink_to", "resolve", "absolute", "expanduser", "cwd", "home"),
}
"""Methods of `pathlib.Path`. `open` is left out, because slots have it, too."""

REPLACE_WORKERS = {"executor", "_executor", "_dispatcher"}
"""Their `replace` has one argument, like a path's; a string's has two."""

DISKS = {"disk", "_disk"}
"""The last names of expressions that are a disk."""


class Finder(ast.NodeVisitor):
    """Finds the uses of the machine in a module, as pairs of a line and a name."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self._full: dict[str, str] = {}  # the full names of what is imported

    def find(self, node: ast.AST, full: str) -> None:
        name = full.removeprefix("cerebro.")
        name = REAL if name.startswith(f"{REAL}.") else name
        self.found.append((getattr(node, "lineno", 0), name))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.split(".")[0]
            self._full[alias.asname or top] = alias.name if alias.asname else top
            self._check_module(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            self._full[alias.asname or alias.name] = full
            self._check_name(node, full)
        self._check_module(node, node.module or "")

    def _check_module(self, node: ast.AST, module: str) -> None:
        if (top := module.split(".")[0]) in SYSTEM_MODULES:
            self.find(node, f"import {top}")

    def _check_name(self, node: ast.AST, full: str) -> None:
        for module, harmless in HARMLESS.items():
            if full.startswith(f"{module}."):
                name = full.removeprefix(f"{module}.")
                is_flag = name.isupper() and name != "LOCAL"
                if not is_flag and not any(f"{name}.".startswith(f"{each}.") for each in harmless):
                    self.find(node, full)
        if full in WAYS or any(full.startswith(f"{each}.") for each in CALLS):
            self.find(node, full)

    def _name(self, node: ast.AST) -> str | None:
        """Return the full name of what an expression names, if it begins with an import."""
        if isinstance(node, ast.Name):
            return self._full.get(node.id)
        if isinstance(node, ast.Attribute) and (value := self._name(node.value)) is not None:
            return f"{value}.{node.attr}"
        return None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        full = self._name(node)
        if full is None:
            self.generic_visit(node)
        elif full != "os.path":
            self._check_name(node, full)

    def visit_Call(self, node: ast.Call) -> None:
        full = self._name(node.func)
        if isinstance(node.func, ast.Name) and full is None and node.func.id == "open":
            self.find(node, "open")
        if full in CALLS:
            self.find(node, full)
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if full in TAKE_DISK and not any(last_name(each) in DISKS for each in given):
            self.find(node, f"{full} without a disk")
        if isinstance(node.func, ast.Attribute) and not (full or "").startswith("os."):
            method, owner = node.func.attr, last_name(node.func.value)
            if method in PATH_METHODS and owner not in DISKS:
                self.find(node, f".{method}")
            if method == "replace" and len(given) == 1 and owner not in REPLACE_WORKERS:
                self.find(node, ".replace")
        self.generic_visit(node)


def last_name(node: ast.AST) -> str | None:
    """Return ``disk`` for ``self.machine.disk``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def find_uses(package: Path = PACKAGE) -> Iterator[tuple[str, int, str]]:
    """Yield every use of the machine: the file, the line, and the name of what is used."""
    for path in sorted(path for file in FILES for path in package.glob(file)):
        finder = Finder()
        finder.visit(ast.parse(path.read_text(encoding="utf-8")))
        for line, name in finder.found:
            yield path.relative_to(package).as_posix(), line, name


def allowed_in(file: str) -> set[str]:
    _, names = EXCEPTIONS.get(file, ("", ()))
    return {*names, REAL} if file in PUT_TOGETHER else {*names}


def find_problems(package: Path = PACKAGE) -> list[str]:
    return [
        f"{file}:{line} uses {name}"
        for file, line, name in find_uses(package)
        if not {name, EVERYTHING} & allowed_in(file)
    ]


def test_there_is_no_other_way_to_the_machine() -> None:
    problems = find_problems()
    assert not problems, f"use the clock, disk and tasks that are passed in: {problems}"


def test_the_tables_list_only_what_is_used() -> None:
    used: dict[str, set[str]] = {}
    for file, _, name in find_uses():
        used.setdefault(file, {EVERYTHING}).add(name)
    unused = {
        file: names
        for file in {*EXCEPTIONS, *PUT_TOGETHER}
        if (names := allowed_in(file) - used.get(file, set()))
    }
    assert not unused, f"remove these from the tables: {unused}"


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "def f():\n    from time import monotonic",
        "import os.path\nos.unlink('x')",
        "from os import path\npath.exists('x')",
        "from os import stat as look",
        "import os\nfiles = map(os.stat, 'x')",
        "import io\nio.open('x')",
        "open('x')",
        "import signal\nsignal.signal(1, None)",
        "import sqlite3\nsqlite3.connect('x')",
        "from pathlib import Path\nPath('x').read_text()",
        "from pathlib import Path\nPath.cwd()",
        "class A:\n    def f(self):\n        self.folder.mkdir()",
        "def f(path):\n    path.replace('x')",
        "from cerebro.machine import files\nfiles.free_bytes('x')",
        "from cerebro.machine.files import open_plain",
        "from cerebro.machine import durable\ndurable.sync_folder('x')",
        "from cerebro.machine.durable import publish\npublish([])",
        "from cerebro.machine.local import LOCAL",
        "from cerebro.machine.local import Clock\nClock.monotonic()",
        "from cerebro.machine import disk\ndisk.Disk()",
        "import cerebro._core as core\ncore.Slots('x', True)",
        "from cerebro._core import BeatPage\nBeatPage()",
    ],
)
def test_a_planted_use_is_found(tmp_path: Path, folder: str, source: str) -> None:
    """The test of the test."""
    planted = tmp_path / folder / "planted.py"
    planted.parent.mkdir(parents=True)
    planted.write_text(source, encoding="utf-8")
    assert find_problems(tmp_path)


HARMLESS_SOURCE = """
import os
import queue
import signal
import sqlite3
from cerebro.machine import durable, files
from cerebro.machine.local import Clock, Machine
import cerebro._core as _core

def work(machine: Machine, clock: Clock, slots: _core.Slots, text: str) -> None:
    disk, waiting = machine.disk, queue.SimpleQueue()
    try:
        disk.exists(os.path.join("folder", "file"))
        machine.disk.rename("file", "new")
        durable.publish([], disk)
        durable.sync_folder("folder", disk=machine.disk)
    except (sqlite3.Error, files.StorageError) as error:
        raise ValueError(text.replace("a", os.fspath("b")), signal.SIGKILL) from error
    clock.sleep(clock.time())
    slots.save("file")
    os.environ.get("HOME")
"""


def test_what_is_passed_in_is_no_problem(tmp_path: Path) -> None:
    """Nor are the names of exceptions, types, signals and flags, nor what only looks alike."""
    planted = tmp_path / "worker" / "planted.py"
    planted.parent.mkdir()
    planted.write_text(HARMLESS_SOURCE, encoding="utf-8")
    assert find_problems(tmp_path) == []

"""Keep the program of a run: the source of the user's modules, as it was when the run began.

Files change while a run trains: the user edits the next idea, or switches a branch. Every worker of
a run must train the same program, even if it starts later, or its ``build`` imports a module late.
So at its start a run reads the source of the user's modules: of those that its process has
imported, as they were then, and of the Python files in the folders from which it imports. Workers
get these with the run (`cerebro.machine.guard` loads them). The standard library and installed
packages are left out, and so are files beyond some number: if a worker imports one of those that
has changed since, the run ends.

A module that was edited after its import, and not reloaded, is trained as this process has it. To
know its source, this process remembers the source of each module of the user that it imports.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import FunctionType
from typing import Any

from cerebro.errors import CorruptDataError
from cerebro.machine.imports import OWN_PREFIX, PACKAGE, find_uninstalled, is_library, is_users

MOST_FILES = 500
MOST_BYTES = 4 << 20
MOST_ENTRIES = 20_000
"""How much of one folder of ``sys.path`` is read, or looked at, for modules not imported yet."""

_imported: dict[str, bytes] = {}
"""By file: the source of this process's modules when they were imported."""
_read: dict[str, tuple[tuple[int, ...], bytes]] = {}
"""By file: its stamp, and its content then."""
_inherited: Program | None = None


@dataclass(frozen=True)
class Program:
    """The source of the user's modules."""

    sources: Mapping[str, bytes]
    """By file."""
    names: Mapping[str, str]
    """By name of a module that was imported: its file."""
    left_out: tuple[str, ...] = ()
    """The folders of ``sys.path`` with more files than are kept."""
    began: int = 0
    """When the source was read, in ns since 1970."""

    @classmethod
    def capture(cls) -> Program:
        if _inherited is not None:
            return _inherited
        began = time.time_ns()
        names = dict(_modules())
        sources = {file: _imported[file] for file in names.values()}
        seen: set[tuple[int, int]] = set()
        roots = [root for root in _roots() if not _read_sources(root, sources, seen)]
        left_out = [os.path.join(root, "") for root in roots]  # noqa: PTH118
        return cls(sources, names, tuple(left_out), began)

    def digest(self, file: str) -> str | None:
        """Return the hash of a file's source; None if the program does not have it."""
        source = self.sources.get(os.path.abspath(file))  # noqa: PTH100
        return None if source is None else digest_of(source)

    def source_of(
        self, name: str, path: Sequence[str] | None, spec: ModuleSpec | None
    ) -> tuple[ModuleSpec | None, bytes | None]:
        """Return how to import a module, and its source; None: the file's own.

        `path` is that of its package, `spec` what an import would find here now. Raises
        CorruptDataError if the module is the user's, was not kept, and has changed since the run
        began.
        """
        if spec is not None and spec.has_location and type(spec.loader) is not SourceFileLoader:
            return spec, None  # compiled, or from an archive
        here = None if spec is None or not spec.has_location else _absolute(str(spec.origin))
        file = self.names.get(name)
        if file is None and here in self.sources:
            file = here
        if file is None and (here is None or not is_library(here)):
            file = self._find(name, path)
        if file is None:
            if here is not None:
                self._check_unchanged(here)
            return spec, None
        if here is None or (here != file and Path(file).exists()):
            spec = spec_from_file_location(name, file)
        return spec, self.sources[file]

    def _find(self, name: str, path: Sequence[str] | None) -> str | None:
        """Return the file that an import would have found when the run began."""
        for entry in sys.path if path is None else path:
            base = _absolute(os.path.join(entry, name.rpartition(".")[2]))  # noqa: PTH118
            for file in (f"{base}{os.sep}__init__.py", f"{base}.py"):
                if file in self.sources:
                    return file
        return None

    def _check_unchanged(self, file: str) -> None:
        stamp = _stamp(file)
        if file.startswith(self.left_out) and stamp and stamp[0] > self.began:
            raise CorruptDataError(
                f"{file} has changed since the search began: put it back and resume the run, or "
                "start a new one"
            )


NONE = Program({}, {})


def inherit(program: Program) -> None:
    """Train this program in this process from now on: that of the process which has started it."""
    global _inherited
    _inherited = program


def inherited() -> Program | None:
    return _inherited


def note_import(spec: ModuleSpec | None) -> None:
    """Remember the source of a module of the user that is about to be imported or reloaded."""
    if spec is not None and type(spec.loader) is SourceFileLoader:
        file = _absolute(spec.loader.path)
        if is_users(file):
            _imported.pop(file, None)
            _remember(file)
            linecache.cache.pop(file, None)


def note_source(file: str, source: bytes) -> None:
    """Remember that a module was imported from this source, and show it in tracebacks."""
    _imported[_absolute(file)] = source
    _add_to_linecache(file, source)


def source_as_imported(file: str) -> bytes | None:
    """Return a file's source when this process imported it; None if it did not."""
    return _imported.get(_absolute(file))


def edited_since_import() -> list[str]:
    """Return the files of the user's modules that were edited after this process imported them."""
    return sorted(
        {file for _, file in _modules() if _read_content(file) not in (None, _imported[file])}
    )


def remember_modules() -> None:
    """Remember the source of the user's modules that are imported by now."""
    for _ in _modules():
        pass


def find_stale_definitions() -> list[str]:
    """Return which modules of the user hold a class or function of one that was reloaded since."""
    files = dict(_modules())
    lines = []
    for name in files:
        for value in list(vars(sys.modules[name]).values()):
            if not isinstance(value, (type, FunctionType)):
                continue
            other, what = getattr(value, "__module__", None), value.__qualname__
            if not isinstance(other, str) or other not in files or other == name:
                continue
            now = getattr(sys.modules.get(other), what, None)
            if type(now) is type(value) and _is_older(value, now):
                lines.append(f"{files[name]} has {what} of {files[other]}")
    return sorted(lines)


def _is_older(value: Any, now: Any) -> bool:
    """Return whether an object is what a module defined before it was reloaded."""
    if isinstance(value, type):
        return value is not now
    return not hasattr(value, "__wrapped__") and value.__code__ != now.__code__


def digest_of(source: bytes) -> str:
    return hashlib.blake2b(source, digest_size=16).hexdigest()


def _modules() -> Iterator[tuple[str, str]]:
    """Yield the names and files of the user's modules whose source is known."""
    for name, listed in find_uninstalled(list(sys.modules)):
        if listed.endswith(".py") and not listed.startswith(OWN_PREFIX):
            file = _absolute(listed)
            if is_users(file) and _remember(file):
                yield name, file


def _remember(file: str) -> bool:
    """Remember a file's source; return whether it is known."""
    if file not in _imported:
        content = _read_content(file)
        if content is None:
            return False
        _imported[file] = content
    elif _imported[file] != _read_content(file):
        _add_to_linecache(file, _imported[file])  # not what the file has now
    return True


def _add_to_linecache(file: str, source: bytes) -> None:
    lines = source.decode("utf-8", "replace").splitlines(keepends=True)
    linecache.cache[file] = (len(source), None, lines, file)


def _roots() -> list[str]:
    entries = [_absolute(entry) for entry in sys.path]
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable__"):  # how setuptools finds a package installed with -e
            entries += map(_absolute, getattr(module, "MAPPING", {}).values())
    return [entry for entry in dict.fromkeys(entries) if not is_library(os.path.join(entry, ""))]  # noqa: PTH118


def _read_sources(root: str, sources: dict[str, bytes], seen: set[tuple[int, int]]) -> bool:
    """Add the Python files below a folder to `sources`; return False if there are too many."""
    if PACKAGE.parent == Path(root):  # a checkout of Cerebro, not the user's
        return False
    folders, entries, files, size = [root], 0, 0, 0
    while folders:
        folder = folders.pop(0)
        try:
            info = os.stat(folder)  # noqa: PTH116
            if (info.st_dev, info.st_ino) in seen:
                continue
            seen.add((info.st_dev, info.st_ino))
            with os.scandir(folder) as listing:
                listed = []
                for entry in listing:
                    entries += 1
                    if entries > MOST_ENTRIES:
                        return False
                    if entry.name.endswith((".py", ".cfg")) or entry.name.isidentifier():
                        listed.append(entry)
        except OSError:  # not a folder, or not readable
            continue
        if any(entry.name == "pyvenv.cfg" for entry in listed):
            continue  # an environment, in which packages are installed
        for entry in sorted(listed, key=lambda entry: entry.name):
            if entry.name.endswith(".py"):
                if entry.path in sources:
                    continue
                content = _read_content(entry.path)
                files, size = files + 1, size + len(content or b"")
                if files > MOST_FILES or size > MOST_BYTES:
                    return False
                if content is not None:
                    sources[entry.path] = content
            elif entry.name not in ("__pycache__", "node_modules") and entry.is_dir():
                folders.append(entry.path)
    return True


def _read_content(file: str) -> bytes | None:
    stamp = _stamp(file)
    if stamp is None:
        return None
    read = _read.get(file)
    if read is None or read[0] != stamp:
        try:
            read = _read[file] = stamp, Path(file).read_bytes()
        except OSError:
            return None
    return read[1]


def _stamp(file: str) -> tuple[int, ...] | None:
    """Return a file's time of modification in ns, size, and further numbers; None: no file."""
    try:
        info = os.stat(file)  # noqa: PTH116
    except OSError:
        return None
    return info.st_mtime_ns, info.st_size, info.st_ctime_ns, info.st_ino


def _absolute(path: str) -> str:
    return os.path.abspath(path)  # noqa: PTH100

"""Check imported Python files: whether they have changed, hide a library or are missing.

A worker that stays warm between runs keeps its imported modules. If the user has since edited one
of them, or now uses a different file with the same name, the worker would train with the wrong
code. Workers import modules by name; those that a worker would not find that way are sent to it.

Python looks for modules first in the script's folder. A file there that hides a library causes
errors deep inside other code, so messages name the file. Every message about a missing extra is
built here, too. The module works even if NumPy or the C core is missing.

`find_whole_module` ignores libraries whose import has not finished. ``sys.modules`` has a module
from the beginning of its import. With ``workers=0`` or ``background=True`` the user's code may be
importing a library while a unit runs; most of its names are then missing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from cerebro.errors import InputError

PACKAGE = Path(__file__).parent.parent
"""The folder of Cerebro itself: files in it are not the user's."""

OWN_PREFIX = str(PACKAGE) + os.sep
"""How the paths of these files begin."""

_INSTALLED = tuple(
    os.path.join(sysconfig.get_path(name), "")  # noqa: PTH118
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

_GENERATED = ("<frozen ", "<__array_function__")
"""How the file names of generated code begin, which has no file."""

sent_whole: set[str] = set()
"""Modules that workers cannot import by name, so that their code is sent."""

PROGRAMS = ("__main__", "__mp_main__")  # every process has its own


def module_of(defined: Any) -> str:
    """Return the name of the module that defines a class or function.

    The program's is ``__main__``, even in a process that `multiprocessing` has started anew
    ("spawn", "forkserver"), where it has another name.
    """
    name = getattr(defined, "__module__", None) or "?"
    return PROGRAMS[0] if name in PROGRAMS else str(name)


Sources = dict[tuple[str, str], int | str]
"""By module name and file: the file's modification time in ns, or the digest of the source that a
run had kept (`cerebro.machine.program`).
"""

loaded: dict[str, str] = {}
"""By file: the digest of the kept source from which this process has imported it."""


def list_unfindable_modules() -> list[str]:
    """Return the user's modules that a worker would not find, or would find in another file."""
    names = []
    for name, file in find_uninstalled(list(sys.modules)):
        # A package's modules are where the package is.
        is_top = "." not in name and getattr(sys.modules.get(name), "__name__", None) == name
        if is_top and not file.startswith(OWN_PREFIX) and not _is_found(name, file):
            names.append(name)
    return names


def find_uninstalled(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the imported modules, and their files, that are neither installed nor a program."""
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(file, str) and not is_installed(file) and name not in PROGRAMS:
            yield name, file


def ask_finders(
    finders: Iterable[Any], name: str, path: Sequence[str] | None, target: ModuleType | None = None
) -> ModuleSpec | None:
    """Return how the first of these finders that knows a module would import it."""
    for finder in finders:
        if hasattr(finder, "find_spec"):
            spec: ModuleSpec | None = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
    return None


def _is_found(name: str, file: str) -> bool:
    """Return whether an import of a module would find this file."""
    spec = ask_finders(sys.meta_path, name, None)
    if spec is None or spec.origin is None:
        return spec is not None
    return os.path.realpath(spec.origin) == os.path.realpath(file)


def import_extra(module: str, extra: str, need: str) -> Any:
    """Return a module that one of Cerebro's extras installs.

    Raises InputError if the import fails; the message begins with `need`, such as ``"plots need
    matplotlib"``, and says why it fails and how to install the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"{need} ({error}): {install_hint(extra)}") from error


def import_early(modules: Iterable[str]) -> None:
    """Import modules before they are needed; the import that needs a module reports its error."""
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)


def import_lazily(module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` that imports names, from their `places`, on first use."""

    def import_name(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(places[name]), name)

    return import_name


def is_installed(file: str) -> bool:
    """Return whether a file belongs to the standard library or an installed package."""
    return file.startswith(_INSTALLED)


def find_raising_line(
    error: BaseException, *, libraries: bool = False
) -> traceback.FrameSummary | None:
    """Return the innermost line of the user's code in an exception's traceback.

    The exception itself may have been raised by a library that the line calls. With `libraries`,
    return a library's line if there is no line of the user's code.
    """
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(OWN_PREFIX)]
    users = [frame for frame in outside if not is_library(frame.filename)]
    candidates = users or (outside if libraries else [])
    return candidates[-1] if candidates else None


def find_calling_line() -> str:
    """Return the user's line that called the caller, as ``path:line``; empty if Cerebro did."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN_PREFIX):
        frame = frame.f_back
    while frame is not None and not (file := frame.f_code.co_filename).startswith(OWN_PREFIX):
        if not is_library(file):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_library(file: str) -> bool:
    """Return whether a traceback's file belongs to Python or to a package, installed anywhere."""
    packaged = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return bool(packaged) or is_installed(file) or file.startswith(_GENERATED)


def is_users(file: str) -> bool:
    return not (file.startswith(OWN_PREFIX) or is_library(file))


def note_imported(times: Sources, since: str | None = None) -> None:
    """Add the modules that are imported by now to `times`.

    Modules already in `times` keep the time recorded when they were first seen. The standard
    library and installed packages are left out: they are not edited between runs. With `since`, a
    module's name, only later imports are examined: in a fork, examining a module copies its memory
    page.
    """
    names = list(sys.modules) if since is None else _list_imported_since(since)
    for name, file in find_uninstalled(names):
        if (name, file) not in times:
            times[name, file] = loaded.get(file) or _changed_at(file)


def _list_imported_since(module: str) -> list[str]:
    while True:
        try:
            return list(itertools.takewhile(lambda name: name != module, reversed(sys.modules)))
        except RuntimeError:  # another thread has imported something
            continue


def are_current(
    times: Mapping[tuple[str, str], int | str], digest: Callable[[str], str | None] = loaded.get
) -> bool:
    """Return whether this process would import the same, unchanged files under these names.

    `digest` returns the digest of a file's source in the program that is to run.
    """
    return all(
        time == (digest(file) if isinstance(time, str) else _changed_at(file))
        and ("." in name or _locate(name) in (None, file))
        for (name, file), time in times.items()
    )


def _locate(name: str) -> str | None:
    """Return the file of a module that is imported or would be; None if it has no file."""
    here = getattr(sys.modules.get(name), "__file__", None)
    return here or getattr(PathFinder.find_spec(name), "origin", None)


def _changed_at(file: str) -> int:
    """Return a file's modification time in ns; -1 if it does not exist."""
    try:
        return os.stat(file).st_mtime_ns  # noqa: PTH116
    except OSError:
        return -1


LIBRARIES = (
    "cloudpickle", "jax", "jinja2", "matplotlib", "numpy", "optuna", "pandas", "PIL", "pyarrow",
    "ray", "optax", "rich", "safetensors", "scipy", "sklearn", "torch", "torchvision",
)  # fmt: skip
"""Libraries that are packages, so a single file with the same name is not the library."""


def refuse_shadow(library: str) -> None:
    """Raise ImportError if a file would be imported instead of a library."""
    spec = importlib.util.find_spec(library)
    if spec is not None and spec.submodule_search_locations is None:
        raise ImportError(_describe_shadow(str(spec.origin), library))


def refuse_hidden(error: Exception) -> None:
    """Raise ImportError if an import failed because a file hides a module of Python itself."""
    if said := _describe_hidden(error):
        raise ImportError(said) from error


def _describe_hidden(error: BaseException) -> str:
    """Return a message about a file that hides a module of Python, and so caused the error."""
    text = str(error)
    ran = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    for name in sorted(sys.stdlib_module_names):
        spec = None
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
        file = spec.origin if spec is not None and spec.has_location else None
        is_cause = file in ran or f"'{name}'" in text or getattr(error, "name", None) == name
        if file is not None and is_cause and is_users(file):
            return _describe_shadow(file, name)
    return ""


def describe_shadows(error: BaseException) -> str:
    """Return a message about files that hide libraries or caused the error; empty if none."""
    said = [message] if (message := _describe_hidden(error)) else []
    for library in LIBRARIES:
        module = sys.modules.get(library)
        file = getattr(module, "__file__", None)
        if file is not None and not hasattr(module, "__path__"):
            said.append(_describe_shadow(file, library))
    return "; ".join(said)


def _describe_shadow(file: str, library: str) -> str:
    return f"{file} hides the library {library}: rename it"


def find_whole_module(name: str) -> Any:
    """Return a module of this name if its import is over, else None."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if getattr(spec, "_initializing", False) else module


# --- how to install Cerebro ----------------------------------------------------

DISTRIBUTION = "cerebro-mop"
"""The name to install. On the package index, ``cerebro`` is an unrelated program; the imported
package and the command are still called ``cerebro``.
"""

PUBLISHED = False
"""Whether the package index has `DISTRIBUTION`. Until then, Cerebro is installed from a clone."""

CLONE = "in the clone of Cerebro"


def install_hint(*extras: str) -> str:
    """Return how to install Cerebro with these extras, for the end of a message."""
    target = (DISTRIBUTION if PUBLISHED else ".") + (f"[{','.join(extras)}]" if extras else "")
    if extras:
        target = f"'{target}'"  # some shells treat brackets as patterns
    return f"pip install {target}" if PUBLISHED else f"pip install -e {target} {CLONE}"


def update_hint() -> str:
    """Return a hint on how to update Cerebro, for the end of a message."""
    if PUBLISHED:
        return f"pip install -U {DISTRIBUTION}"
    return f"git pull && pip install -e . {CLONE}"


def explain_other_version(file: object, kind: str, found: int, own: int, again: str) -> str:
    """Return a message that refuses a file of a version other than the one that is read.

    `kind` is what the file holds, such as ``"store"``. `again` says what to do if an earlier
    Cerebro wrote the file.
    """
    of, fix = "an earlier", again
    if found > own:
        of, fix = "a newer", f"update Cerebro ({update_hint()})"
    return (
        f"{file} has {kind} version {found}, of {of} Cerebro, and this one reads only version "
        f"{own}: {fix}"
    )


def is_being_located() -> bool:
    """Return whether Python is still locating the module that ``python -m cerebro`` runs."""
    if sys.argv[:1] != ["-m"]:  # which the first argument is until then
        return False
    at = sys.orig_argv.index("-m") if "-m" in sys.orig_argv else len(sys.orig_argv)
    return sys.orig_argv[at + 1 : at + 2] == ["cerebro"]


def refuse_uncompiled() -> None:
    """Raise ImportError if there is no core for this Python; a command exits with one line.

    A core that exists but does not load raises its own error.
    """
    if any((PACKAGE / f"_core{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        return
    others = sorted(file.name for file in PACKAGE.glob("_core.*") if file.suffix in (".so", ".pyd"))
    text = f"{PACKAGE} has no compiled core for this Python {sys.version_info[0]}."
    text += f"{sys.version_info[1]}"
    if others:
        text += f" (there is {', '.join(others)})"
    root = PACKAGE.parent
    if (root / "setup.py").exists() and (root / "csrc").is_dir():
        text += f": build it with `{sys.executable} -m pip install -e {root}`"
    else:
        text += f": install Cerebro again with {sys.executable} -m pip"
    program, *_ = sys.argv or [""]
    if is_being_located() or os.path.basename(program) == "cerebro":  # noqa: PTH119
        raise SystemExit(f"error: {text}")  # a command, in which no code catches exceptions
    raise ImportError(text, name="cerebro._core") from None

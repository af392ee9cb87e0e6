"""Imported Python files: whether they have changed, and whether one hides a library.

A worker that stays warm between runs keeps its imported modules. If the user has since edited one
of them, or now means a different file of the same name, the worker would train with the wrong code.

Python looks for modules first in the script's folder. A file there that hides a library causes
errors deep inside other code; so the file is named.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from cerebro.errors import InputError
from cerebro.machine.installation import install_hint

PACKAGE = Path(__file__).parent.parent
"""The folder of Cerebro itself: files below it are not the user's."""

_INSTALLED = tuple(
    os.path.join(sysconfig.get_path(name), "")  # noqa: PTH118
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

_GENERATED = ("<frozen ", "<__array_function__")
"""Beginnings of the names of generated code, which has no file."""

sent_whole: set[str] = set()
"""Modules that workers could not import by name: their code is sent."""

_PROGRAMS = ("__main__", "__mp_main__")  # every process has its own

Sources = dict[tuple[str, str], int]
"""Module name and file to the file's modification time in ns."""


def import_extra(module: str, extra: str, need: str) -> Any:
    """Return a module that one of Cerebro's extras installs.

    Parameters
    ----------
    need
        The beginning of the message, such as ``"pictures need matplotlib"``.

    Raises
    ------
    InputError
        If the import fails; the message says why, and how to install the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"{need} ({error}): {install_hint(extra)}") from error


def is_installed(file: str) -> bool:
    """Whether a file belongs to the standard library or an installed package."""
    return file.startswith(_INSTALLED)


def raised_at(error: BaseException, *, libraries: bool = False) -> traceback.FrameSummary | None:
    """Return the last line of the user's code on the way to an exception.

    A library may have raised the exception.

    Parameters
    ----------
    libraries
        Whether to return a library's line if there is none of the user's.
    """
    here = str(PACKAGE) + os.sep
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(here)]
    users = [frame for frame in outside if not _is_library(frame.filename)]
    found = users or (outside if libraries else [])
    return found[-1] if found else None


def _is_library(file: str) -> bool:
    """Whether a file of a traceback is Python's or a package's, wherever that is installed."""
    packaged = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return bool(packaged) or is_installed(file) or file.startswith(_GENERATED)


def note_imported(times: Sources) -> None:
    """Add the modules imported by now.

    Modules already in `times` keep the time at which they were first seen. The standard library and
    installed packages are left out: they are not edited between runs.
    """
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or is_installed(file) or name in _PROGRAMS:
            continue
        if (name, file) not in times:
            times[name, file] = _changed_at(file)


def are_current(times: Mapping[tuple[str, str], int]) -> bool:
    """Whether this process would import the same files by these names, unchanged."""
    return all(
        _changed_at(file) == time and ("." in name or not _is_another(name, file))
        for (name, file), time in times.items()
    )


def _is_another(name: str, file: str) -> bool:
    """Whether a module of this name comes from a different file here."""
    here = getattr(sys.modules.get(name), "__file__", None)
    if here is None:
        spec = PathFinder.find_spec(name)
        here = None if spec is None else spec.origin
    return here is not None and here != file


def _changed_at(file: str) -> int:
    """Return a file's modification time in ns; -1 if it does not exist."""
    try:
        return os.stat(file).st_mtime_ns  # noqa: PTH116
    except OSError:
        return -1


LIBRARIES = (
    *("cloudpickle", "jax", "matplotlib", "numpy", "optuna", "pandas", "PIL", "pyarrow", "ray"),
    *("optax", "rich", "safetensors", "scipy", "sklearn", "torch", "torchvision"),
)
"""All of them are packages: a single file with that name is not the library."""


def refuse_shadow(library: str) -> None:
    """Raise ImportError if a file would be imported instead of a library."""
    spec = importlib.util.find_spec(library)
    if spec is not None and spec.submodule_search_locations is None:
        raise ImportError(_said(str(spec.origin), library))


def imported_shadows() -> str:
    """Name the files that were imported instead of libraries; empty if there are none."""
    said = []
    for library in LIBRARIES:
        module = sys.modules.get(library)
        file = getattr(module, "__file__", None)
        if file is not None and not hasattr(module, "__path__"):
            said.append(_said(file, library))
    return "; ".join(said)


def _said(file: str, library: str) -> str:
    return f"{file} hides the library {library}: rename it"

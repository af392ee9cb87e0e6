"""Which source files a process has imported, and whether they are still the same.

A worker that stays warm from one run to the next keeps its imported modules. If the
user has edited one of them since, the worker would train with the old code.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping

_INSTALLED = tuple(
    os.path.join(sysconfig.get_path(name), "")  # noqa: PTH118
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

sent_whole: set[str] = set()
"""Modules that no worker could import by their names: their code is sent."""


def note_imported(times: dict[str, int]) -> None:
    """Add the files of modules imported by now, with their times of change in ns.

    Those that `times` has already keep the time at which they were first seen. Left out
    are the standard library and installed packages, which nobody edits in passing.
    """
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file not in times and not file.startswith(_INSTALLED):
            times[file] = _changed_at(file)


def are_unchanged(times: Mapping[str, int]) -> bool:
    """Whether every file has the time of change that was noted."""
    return all(_changed_at(file) == time for file, time in times.items())


def _changed_at(file: str) -> int:
    """Time of a file's last change in ns; -1 where there is none."""
    try:
        return os.stat(file).st_mtime_ns  # noqa: PTH116
    except OSError:
        return -1

"""Report that the C core does not load, unless Python only looks for the package's program."""

from __future__ import annotations

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from cerebro.machine.imports import PACKAGE


def is_being_located() -> bool:
    """Return whether Python is still locating the module that ``python -m cerebro`` runs.

    Until it has, the first argument is ``-m``, and no code has used the package yet.
    """
    if sys.argv[:1] != ["-m"]:
        return False
    at = sys.orig_argv.index("-m") if "-m" in sys.orig_argv else len(sys.orig_argv)
    return sys.orig_argv[at + 1 : at + 2] == ["cerebro"]


def refuse_uncompiled(folder: Path = PACKAGE) -> None:
    """Raise ImportError if there is no core for this Python; a command exits with one line.

    A core that exists but does not load raises its own error.
    """
    if any((folder / f"_core{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        return
    text = explanation(folder)
    if _is_command():
        raise SystemExit(f"error: {text}")
    raise ImportError(text, name="cerebro._core") from None


def explanation(folder: Path) -> str:
    """Return a message with what is missing and the command that builds it."""
    others = sorted(file.name for file in folder.glob("_core.*") if file.suffix in (".so", ".pyd"))
    missing = f"has no compiled core for this Python {sys.version_info[0]}.{sys.version_info[1]}"
    if others:
        missing += f" (there is {', '.join(others)})"
    root = folder.parent
    if (root / "setup.py").exists() and (root / "csrc").is_dir():
        return f"{folder} {missing}: build it with `{sys.executable} -m pip install -e {root}`"
    return f"{folder} {missing}: install Cerebro again with {sys.executable} -m pip"


def _is_command() -> bool:
    """Return whether this process runs a Cerebro command, so that no code catches exceptions."""
    program, *_ = sys.argv or [""]
    return is_being_located() or os.path.basename(program) == "cerebro"  # noqa: PTH119

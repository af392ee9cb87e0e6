"""Say how to install and update Cerebro and its extras, and what to do if the C core is missing.

Every message about a missing extra is built here. The module imports only Python's own, so that it
works even if NumPy or the C core is missing.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

DISTRIBUTION = "cerebro-mop"
"""The name to install. On the package index, ``cerebro`` is an unrelated program; the imported
package and the command are still called ``cerebro``.
"""

PUBLISHED = False
"""Whether the package index has `DISTRIBUTION`. Until then, Cerebro is installed from a clone."""

CLONE = "in the clone of Cerebro"


def install_hint(*extras: str) -> str:
    """Return how to install Cerebro with these extras, for the end of a message."""
    suffix = f"[{','.join(extras)}]" if extras else ""
    if PUBLISHED:
        return f"pip install {_quote_target(DISTRIBUTION + suffix)}"
    return f"pip install -e {_quote_target('.' + suffix)} {CLONE}"


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


def _quote_target(target: str) -> str:
    """Quote a target for a shell, because some shells treat brackets as patterns."""
    return f"'{target}'" if "[" in target else target


def is_being_located() -> bool:
    """Return whether Python is still locating the module that ``python -m cerebro`` runs.

    Until it has, the first argument is ``-m``, and no code has used the package yet.
    """
    if sys.argv[:1] != ["-m"]:
        return False
    at = sys.orig_argv.index("-m") if "-m" in sys.orig_argv else len(sys.orig_argv)
    return sys.orig_argv[at + 1 : at + 2] == ["cerebro"]


def refuse_uncompiled() -> None:
    """Raise ImportError if there is no core for this Python; a command exits with one line.

    A core that exists but does not load raises its own error.
    """
    folder = Path(__file__).parents[1]
    if any((folder / f"_core{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        return
    others = sorted(file.name for file in folder.glob("_core.*") if file.suffix in (".so", ".pyd"))
    text = f"{folder} has no compiled core for this Python {sys.version_info[0]}."
    text += f"{sys.version_info[1]}"
    if others:
        text += f" (there is {', '.join(others)})"
    root = folder.parent
    if (root / "setup.py").exists() and (root / "csrc").is_dir():
        text += f": build it with `{sys.executable} -m pip install -e {root}`"
    else:
        text += f": install Cerebro again with {sys.executable} -m pip"
    program, *_ = sys.argv or [""]
    if is_being_located() or os.path.basename(program) == "cerebro":  # noqa: PTH119
        raise SystemExit(f"error: {text}")  # a command, in which no code catches exceptions
    raise ImportError(text, name="cerebro._core") from None

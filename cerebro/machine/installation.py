"""How to install Cerebro and its extras: the only place that says it.

This module imports nothing, so that a message can be made without NumPy and the C core.
"""

from __future__ import annotations

DISTRIBUTION = "cerebro-mop"
"""The name to install by. On the package index ``cerebro`` is an unrelated program; what is
imported, and the command, are called ``cerebro`` all the same."""

PUBLISHED = False
"""Whether the package index has `DISTRIBUTION`. Until it has, Cerebro is installed from a clone."""

CLONE = "in the clone of Cerebro"


def install_hint(*extras: str) -> str:
    """Return how to install Cerebro with these extras, to stand at the end of a message."""
    wanted = f"[{','.join(extras)}]" if extras else ""
    if PUBLISHED:
        return f"pip install {_quoted(DISTRIBUTION + wanted)}"
    return f"pip install -e {_quoted('.' + wanted)} {CLONE}"


def update_hint() -> str:
    """Return how to get the newest Cerebro, to stand at the end of a message."""
    if PUBLISHED:
        return f"pip install -U {DISTRIBUTION}"
    return f"git pull && pip install -e . {CLONE}"


def _quoted(target: str) -> str:
    """Return the target as a shell takes it: brackets are patterns to some."""
    return f"'{target}'" if "[" in target else target

"""Say how to install and update Cerebro and its extras; no other module does.

Every message about a missing extra is built here. The module imports nothing, so that it works even
if NumPy or the C core is missing.
"""

from __future__ import annotations

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

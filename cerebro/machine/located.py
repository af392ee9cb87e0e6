"""Tell whether Python imports the package only to find the program of ``python -m cerebro``."""

from __future__ import annotations

import sys


def is_being_located() -> bool:
    """Return whether Python is still locating the module that ``python -m cerebro`` runs.

    Until it has, the first argument is ``-m``, and no code has used the package yet.
    """
    if sys.argv[:1] != ["-m"]:
        return False
    at = sys.orig_argv.index("-m") if "-m" in sys.orig_argv else len(sys.orig_argv)
    return sys.orig_argv[at + 1 : at + 2] == ["cerebro"]

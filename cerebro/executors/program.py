"""Start ``python -m cerebro._worker``, the program of workers and of the fork server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

PROGRAM = """
import sys
sys.path[:] = filter(None, sys.path)
import runpy
try:
    runpy.run_module("cerebro._worker", run_name="__main__", alter_sys=True)
except ImportError as error:
    sys.exit(f"cerebro: a worker process cannot start: {error}")
"""
"""Runs ``python -m cerebro._worker``, but without the working directory first on the path:
otherwise a file there with the name of a library would be imported instead of the library.
"""


def start_program(
    arguments: Iterable[str], variables: Mapping[str, str], files: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start the program as the leader of a new session; it inherits the open descriptors `files`.

    Raise OSError if the system lacks a process, memory or descriptors.
    """
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=files,
        start_new_session=True,
        env=variables,
    )

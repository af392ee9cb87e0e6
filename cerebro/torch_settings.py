"""How a unit computes: PyTorch's threads and checks, set around it and put back.

They change the bits that a model computes, so they hold inline as in workers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal


@contextmanager
def compute_settings(threads: int, deterministic: Literal["warn"] | bool) -> Iterator[None]:
    """Run with `threads` compute threads, restoring what was set before.

    Does nothing while PyTorch is not imported. On the CPU its operators give
    the same bits for the same number of threads without being asked to, so
    only ``deterministic=True`` turns on its checks, which cost time.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before_threads = torch.get_num_threads()
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if before_threads != threads:
        torch.set_num_threads(threads)
    if deterministic is True and before != (True, False):
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        if torch.get_num_threads() != before_threads:
            torch.set_num_threads(before_threads)
        if deterministic is True and before != (True, False):
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])

"""How a unit computes: PyTorch's threads and checks, set around it and put back.

They change the bits that a model computes, so they hold inline as in workers.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal


@contextmanager
def compute_settings(
    threads: int, deterministic: Literal["warn"] | bool, device: str = "cpu"
) -> Iterator[None]:
    """Run with `threads` compute threads, restoring what was set before.

    Does nothing while PyTorch is not imported. On the CPU its operators give
    the same bits for the same number of threads without being asked to, so
    only ``deterministic=True`` turns on its checks, which cost time. On a GPU many
    have a version that does and a faster one that does not: unless `deterministic`
    is False the first is chosen, and with "warn" an operation that has none is
    noted (`operations_noted`) instead of refused.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before_threads = torch.get_num_threads()
    if before_threads != threads:
        torch.set_num_threads(threads)
    on_gpu = device.startswith("cuda") and deterministic is not False
    before = _choices(torch)
    wanted = dict(before)
    if deterministic is True or on_gpu:
        wanted |= {"deterministic": True, "warn_only": deterministic is not True}
    if on_gpu:
        # A kernel that is chosen by trying is another one on another day. Memory that nobody
        # has written is filled only for those who look for mistakes: it takes time.
        wanted |= {"cudnn_deterministic": True, "cudnn_benchmark": False}
        wanted["fill"] = deterministic is True
    _choose(torch, before, wanted)
    try:
        yield
    finally:
        if torch.get_num_threads() != before_threads:
            torch.set_num_threads(before_threads)
        _choose(torch, wanted, before)


def _choices(torch: Any) -> dict[str, bool]:
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
    }


def _choose(torch: Any, now: dict[str, bool], wanted: dict[str, bool]) -> None:
    """Make choices what is `wanted`, where they differ from what was chosen before."""
    if now == wanted:
        return
    torch.use_deterministic_algorithms(wanted["deterministic"], warn_only=wanted["warn_only"])
    torch.backends.cudnn.deterministic = wanted["cudnn_deterministic"]
    torch.backends.cudnn.benchmark = wanted["cudnn_benchmark"]
    torch.utils.deterministic.fill_uninitialized_memory = wanted["fill"]


# --- operations without a deterministic version --------------------------------

_NOTICE = r"(?i).*(does not have a deterministic|non-?deterministic|not deterministic)"


def operation_of(message: str) -> str | None:
    """Return the operation that one of PyTorch's notices is about; None if it is none such."""
    if re.match(_NOTICE, message, re.DOTALL) is None:
        return None
    name = re.match(r"(\S+) does not have a deterministic", message)
    if name is not None:
        return name[1]
    if "cublas" in message.lower():
        return "cuBLAS without CUBLAS_WORKSPACE_CONFIG"
    attention = re.match(r"(?i)((?:\w+[- ])*attention)\b", message)
    if attention is not None:
        return attention[1].lower()
    return message.split(".")[0][:100]


@contextmanager
def operations_noted(found: set[str]) -> Iterator[None]:
    """Add to `found` what PyTorch says has no deterministic version, instead of showing it."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Any, *rest: Any, **more: Any) -> None:
            name = operation_of(str(message))
            if name is None:
                show(message, *rest, **more)
            else:
                found.add(name)

        warnings.showwarning = note
        # Once for each place is enough; a filter that makes errors of warnings is not for these.
        warnings.filterwarnings("default", message=_NOTICE)
        yield

"""Process-wide settings of PyTorch and XLA that change bits or speed.

They change the bits that a model computes, so they hold inline as in workers.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
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


FIRST_TORCH_FLAGS = {
    "default_dtype": "float32",
    "matmul_precision": "highest",
    "cudnn_allow_tf32": True,
    "cudnn_benchmark": False,
    "cudnn_deterministic": False,
    "deterministic_algorithms": False,
    "deterministic_warn_only": False,
    "flush_denormal": False,
}
"""What `torch_flags` reads when torch has just been imported."""


def torch_flags() -> dict[str, Any]:
    """Read torch's process-wide settings that change results; empty if torch is not imported.

    Returns
    -------
    dict
        JSON-able; :func:`set_torch_flags` applies it in another process.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "flush_denormal": _flushes_denormals(torch),
    }


def _flushes_denormals(torch: Any) -> bool:
    """Tell whether torch treats denormal numbers as zero; it has no getter of its own."""
    smallest = torch.tensor(1e-310, dtype=torch.float64)
    return bool((smallest * 1.0).item() == 0.0)


def set_torch_flags(flags: Mapping[str, Any]) -> None:
    """Apply what :func:`torch_flags` read, in this process.

    Imports torch, which takes seconds and 200 MB, only for flags that it does not
    begin with: a model that has nothing to do with it is trained without it.
    """
    if not flags or (flags == FIRST_TORCH_FLAGS and "torch" not in sys.modules):
        return
    import torch

    now = torch_flags()
    if now == flags:
        return
    torch.set_default_dtype(getattr(torch, flags["default_dtype"]))
    torch.set_float32_matmul_precision(flags["matmul_precision"])
    torch.backends.cudnn.allow_tf32 = flags["cudnn_allow_tf32"]
    torch.backends.cudnn.benchmark = flags["cudnn_benchmark"]
    torch.backends.cudnn.deterministic = flags["cudnn_deterministic"]
    checks = ("deterministic_algorithms", "deterministic_warn_only")
    if any(now[name] != flags[name] for name in checks):  # imports TorchInductor: a second or two
        torch.use_deterministic_algorithms(flags[checks[0]], warn_only=flags[checks[1]])
    torch.set_flush_denormal(flags["flush_denormal"])


@contextmanager
def flags_of_run(flags: Mapping[str, Any]) -> Iterator[None]:
    """Run with the process-wide settings that a run was trained with, then put the caller's back.

    Does nothing while PyTorch is not imported: `cerebro.worker.runner.build_model` sees to
    the first import.
    """
    before = torch_flags()
    if not before or not flags or before == flags:
        yield
        return
    set_torch_flags(flags)
    try:
        yield
    finally:
        set_torch_flags(before)


@contextmanager
def xla_threads(threads: int) -> Iterator[None]:
    """Have JAX begin with so many threads, if it begins to compute within this block.

    It cannot be told afterwards, and they change the bits.
    """
    before = os.environ.get("NPROC")
    os.environ["NPROC"] = str(threads)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("NPROC", None)
        else:
            os.environ["NPROC"] = before

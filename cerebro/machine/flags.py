"""Set the process-wide options of libraries, such as PyTorch, that change bits or speed.

A model's bits depend on these options, so they are applied inline as well as in workers. A run
sends the settings of the user's process to its workers. Each ``build`` begins with them; what it
changes belongs to its model, and what a module changes when it is imported stays in the process.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Literal

from cerebro.machine.imports import find_whole_module


@contextmanager
def compute_settings(
    threads: int,
    deterministic: Literal["warn"] | bool,
    device: str = "cpu",
    *,
    strict: bool = False,
) -> Iterator[None]:
    """Run with `threads` compute threads, then restore the previous settings.

    Does nothing unless PyTorch is imported. On the CPU, PyTorch's operators give the same bits for
    the same number of threads by default, so only ``deterministic=True`` turns on PyTorch's checks,
    which take time. On a GPU, the deterministic version of every operation is chosen unless
    `deterministic` is False. With "warn", an operation without such a version is noted
    (`note_operations`) instead of raising an error, unless `strict` is true. Prefer `strict` where
    the error can be handled: only with it does PyTorch choose the deterministic versions of
    attention and its gradients.
    """
    torch = find_whole_module("torch")
    if torch is None:
        yield
        return
    before_threads = torch.get_num_threads()
    if before_threads != threads:
        torch.set_num_threads(threads)
    on_gpu = device.startswith("cuda") and deterministic is not False
    try:
        with (
            _choose_deterministic(torch, deterministic, on_gpu, strict)
            if deterministic is True or on_gpu
            else _AS_IT_IS
        ):
            yield
    finally:
        if torch.get_num_threads() != before_threads:
            torch.set_num_threads(before_threads)


_AS_IT_IS = nullcontext()


@contextmanager
def _choose_deterministic(
    torch: Any, deterministic: Literal["warn"] | bool, on_gpu: bool, strict: bool
) -> Iterator[None]:
    before = _read_choices(torch)
    flags = before | {"deterministic": True, "warn_only": deterministic is not True and not strict}
    if on_gpu:
        # Autotuning may choose a different kernel in the next run. Filling uninitialized memory
        # takes time and only helps to find mistakes.
        flags |= {"cudnn_deterministic": True, "cudnn_benchmark": False}
        flags["fill"] = deterministic is True
    _set_choices(torch, before, flags)
    _chosen_blocks.append(True)
    try:
        yield
    finally:
        _chosen_blocks.pop()
        _set_choices(torch, flags, before)


_chosen_blocks: list[bool] = []
"""One entry for every block of this process whose operations `compute_settings` has chosen."""


def _read_choices(torch: Any) -> dict[str, bool]:
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
    }


def keep_choices() -> Callable[[], None]:
    """Return a function that restores PyTorch's present choices of operations."""
    torch = find_whole_module("torch")
    if torch is None:
        return lambda: None
    before = _read_choices(torch)
    return lambda: _set_choices(torch, _read_choices(torch), before)


def _set_choices(torch: Any, now: dict[str, bool], wanted: dict[str, bool]) -> None:
    if now == wanted:
        return
    torch.use_deterministic_algorithms(wanted["deterministic"], warn_only=wanted["warn_only"])
    torch.backends.cudnn.deterministic = wanted["cudnn_deterministic"]
    torch.backends.cudnn.benchmark = wanted["cudnn_benchmark"]
    torch.utils.deterministic.fill_uninitialized_memory = wanted["fill"]


# --- operations without a deterministic version --------------------------------

_NOTICE = r"(?i).*(does not have a deterministic|non-?deterministic|not deterministic)"


def operation_of(message: str) -> str | None:
    """Return the operation named by PyTorch's text on nondeterminism; None for other texts."""
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


def may_be_inexact(deterministic: Literal["warn"] | bool, device: str) -> bool:
    """Return whether operations without a deterministic version are permitted, and noted."""
    return deterministic == "warn" and device.startswith("cuda")


def find_inexact_operation(
    error: BaseException, deterministic: Literal["warn"] | bool, device: str
) -> str | None:
    """Return the operation because of which strict work failed; None if it failed otherwise.

    The work may run again without `strict` (`compute_settings`).
    """
    cause: BaseException | None = error if may_be_inexact(deterministic, device) else None
    while cause is not None:
        name = operation_of(str(cause)) if isinstance(cause, RuntimeError) else None
        if name is not None:
            return name
        cause = cause.__cause__ or cause.__context__
    return None


@contextmanager
def note_operations(found: set[str]) -> Iterator[None]:
    """Add to `found` the operations that PyTorch calls nondeterministic; hide its warnings."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Any, *rest: Any, **more: Any) -> None:
            name = operation_of(str(message))
            if name is None:
                show(message, *rest, **more)
            else:
                found.add(name)

        warnings.showwarning = note
        # Once per location is enough; filters that turn warnings into errors do not apply here.
        warnings.filterwarnings("default", message=_NOTICE)
        yield


def _get_or_none(getter: Callable[[], Any]) -> Any:
    try:
        return getter()
    except RuntimeError:
        return None


def _flushes_denormals(smallest: float = sys.float_info.min) -> bool:
    """Return whether this thread treats denormal numbers as zero.

    Torch sets this mode of the processor and has no getter. Operations of Python show it, too;
    one of torch would take several times as long as reading all other settings.
    """
    return smallest * 0.5 == 0.0


class LibrarySettings:
    """The settings of one library. Nothing here imports it, except `apply` for other settings."""

    name: ClassVar[str]
    """The library's name in records of runs."""
    FIRST: ClassVar[Mapping[str, Any]]
    """The names of the settings, and their values in a new process."""

    def __init__(self) -> None:
        self.imported: dict[str, Any] = {}
        """What modules set while a ``build`` of this run imported them. Python imports a module
        once, so no later ``build`` sets it again."""

    def is_imported(self) -> bool:
        """Return whether the library is completely imported in this process."""
        return find_whole_module(self.name) is not None

    def present(self) -> dict[str, Any]:
        """Return the current settings as JSON values; empty if the library is not imported."""
        raise NotImplementedError

    def apply(self, settings: Mapping[str, Any]) -> None:
        """Apply settings of `present`; import the library only if it would begin with others."""
        raise NotImplementedError

    def of_new_process(self) -> dict[str, Any]:
        """Return the settings with which the library begins."""
        return dict(self.FIRST)

    def of_build(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings in which each ``build`` of a run with these `settings` begins."""
        of_run = {name: settings[name] for name in self.FIRST if name in settings}
        return {**(of_run or self.of_new_process()), **self.imported}

    def restore(self, settings: Mapping[str, Any]) -> None:
        """Undo what a ``build`` of a run with these `settings` has changed."""
        if self.is_imported():
            self.apply(self.of_build(settings))

    def begin_run(self, settings: Mapping[str, Any], *, own_process: bool) -> None:
        """Prepare the process for a run; a worker process does not import its modules again."""
        if not own_process:
            self.imported.clear()  # those of an earlier run are among this run's, or were undone

    def begin_build(self, settings: Mapping[str, Any]) -> None:
        """Prepare the process for a ``build`` of a run with these `settings`."""
        self.restore(settings)

    def enter(self, settings: Mapping[str, Any]) -> None:
        """Apply the settings of a run, unless the library is not imported: see `build_model`."""
        if self.is_imported():
            self.apply(settings)

    @contextmanager
    def of_run(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Run a block with the settings of a run, then restore the caller's.

        Settings of modules that are first imported in the block stay.
        """
        before, imported_before = self.present(), dict(self.imported)
        try:
            self.enter(settings)
            yield
        finally:
            if self.is_imported():
                new = {k: v for k, v in self.imported.items() if imported_before.get(k) != v}
                self.apply({**(before or self.of_new_process()), **new})


class TorchSettings(LibrarySettings):
    """PyTorch's settings.

    Importing PyTorch takes seconds and 200 MB, so models that do not use it train without it.
    """

    name = "torch"
    FIRST: ClassVar[Mapping[str, Any]] = {
        "default_dtype": "float32",
        "matmul_precision": "highest",
        "cudnn_allow_tf32": True,
        "cudnn_benchmark": False,
        "cudnn_deterministic": False,
        "deterministic_algorithms": False,
        "deterministic_warn_only": False,
        "flush_denormal": False,
    }
    _CHOICES = (
        "cudnn_benchmark",
        "cudnn_deterministic",
        "deterministic_algorithms",
        "deterministic_warn_only",
    )

    def present(self) -> dict[str, Any]:
        """Return the current settings; None: PyTorch does not tell.

        It does not if its newer settings of the precision (``fp32_precision``) are in use.
        """
        torch = find_whole_module("torch")
        if torch is None:
            return {}
        return {
            "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "matmul_precision": _get_or_none(torch.get_float32_matmul_precision),
            "cudnn_allow_tf32": _get_or_none(lambda: torch.backends.cudnn.allow_tf32),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
            "flush_denormal": _flushes_denormals(),
        }

    def apply(self, settings: Mapping[str, Any]) -> None:
        """Apply settings of `present`; takes a few microseconds if they are the present ones."""
        if not settings or (settings == self.FIRST and "torch" not in sys.modules):
            return
        import torch

        now = self.present()
        if now == settings:
            return
        differ = {
            name
            for name, value in settings.items()
            if value != now.get(name) and value is not None and now.get(name) is not None
        }
        if "default_dtype" in differ:
            torch.set_default_dtype(getattr(torch, settings["default_dtype"]))
        if "matmul_precision" in differ:
            torch.set_float32_matmul_precision(settings["matmul_precision"])
        for name in ("allow_tf32", "benchmark", "deterministic"):
            if f"cudnn_{name}" in differ:
                setattr(torch.backends.cudnn, name, settings[f"cudnn_{name}"])
        checks = ("deterministic_algorithms", "deterministic_warn_only")
        if differ.intersection(checks):  # imports TorchInductor: a second or two
            torch.use_deterministic_algorithms(settings[checks[0]], warn_only=settings[checks[1]])
        if "flush_denormal" in differ:
            torch.set_flush_denormal(settings["flush_denormal"])

    def begin_run(self, settings: Mapping[str, Any], *, own_process: bool) -> None:
        super().begin_run(settings, own_process=own_process)
        self.apply(settings)

    def of_build(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings in which a ``build`` begins: `compute_settings` has chosen some."""
        process = super().of_build(settings)
        if _chosen_blocks:
            now = self.present()
            process |= {name: now[name] for name in self._CHOICES if name in now}
        return process


TORCH = TorchSettings()


@contextmanager
def xla_threads(threads: int) -> Iterator[None]:
    """Make JAX use this many threads, if it first computes within this block.

    The number cannot be changed afterwards, and it changes the bits.
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

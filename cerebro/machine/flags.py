"""Choose threads and deterministic operations for a block, and avoid importing TorchDynamo.

A model's bits depend on threads and operations, so they are chosen inline as well as in workers.

``torch.optim`` imports ``torch._dynamo`` when the first optimizer is created, only to call
``disable()`` and ``graph_break()``, which do nothing outside ``torch.compile``. The import takes
longer than PyTorch's own and uses 67 MB. After `postpone_dynamo`, such an import gets a stand-in
module that has only these two functions. As soon as any other attribute is used, the real module
replaces the stand-in: ``torch.compile`` works as usual, at the cost of the import.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, Literal

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
            else nullcontext()
        ):
            yield
    finally:
        if torch.get_num_threads() != before_threads:
            torch.set_num_threads(before_threads)


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
    chosen_blocks.append(True)
    try:
        yield
    finally:
        chosen_blocks.pop()
        _set_choices(torch, flags, before)


chosen_blocks: list[bool] = []
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


def find_inexact_operation(error: BaseException) -> str | None:
    """Return the operation because of which `strict` work failed; None if it failed otherwise."""
    cause: BaseException | None = error
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


@contextmanager
def xla_threads(threads: int) -> Iterator[None]:
    """Make JAX use this many threads if it first computes in this block; they change bits."""
    before = os.environ.get("NPROC")
    os.environ["NPROC"] = str(threads)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("NPROC", None)
        else:
            os.environ["NPROC"] = before


# --- TorchDynamo ----------------------------------------------------------------

DYNAMO = "torch._dynamo"

_CALLERS = ("torch.optim.optimizer", "torch._compile")
"""The PyTorch modules whose imports of Dynamo need only these two functions."""

_lock = threading.RLock()


class _DynamoStandIn(ModuleType):
    """Stands in for ``torch._dynamo`` until anything beyond the two functions is used."""

    def __init__(self) -> None:
        super().__init__(DYNAMO)
        self.__dict__["_passed"] = []
        self.__dict__["_is_loaded"] = False

    def graph_break(self, msg: str = "") -> None:
        pass  # no graph is being traced

    def disable(
        self,
        fn: Callable[..., Any] | None = None,
        recursive: bool = True,
        *,
        reason: str | None = None,
        wrapping: bool = True,
    ) -> Any:
        """Return the function itself: it need not be disabled while nothing is traced."""
        if fn is None:
            return lambda function: function
        # `torch._compile` keeps the function in an attribute, which is deleted when the real module
        # is imported: from then on the function must be disabled.
        self.__dict__["_passed"].append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        # The import system and `inspect` ask every module for names like these.
        if name[:2] == "__" and not (self._is_loaded and name in ("__path__", "__all__")):
            raise AttributeError(name)
        return getattr(self._become_real(), name)

    def _become_real(self) -> ModuleType:
        with _lock:
            if sys.modules.get(DYNAMO) is self:
                del sys.modules[DYNAMO]
                if _finder in sys.meta_path:
                    sys.meta_path.remove(_finder)
                for function in self.__dict__["_passed"]:
                    vars(function).pop("__dynamo_disable", None)
                self.__dict__["_passed"].clear()
            real = importlib.import_module(DYNAMO)
            sys.modules["torch"].__dict__["_dynamo"] = real
            return real


class _DynamoFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Returns the stand-in for the imports that need only its two functions."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != DYNAMO or _importer() not in _CALLERS:
            return None
        return importlib.machinery.ModuleSpec(DYNAMO, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _DynamoStandIn()

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["_is_loaded"] = True


_finder = _DynamoFinder()


def postpone_dynamo() -> None:
    """Answer PyTorch's unnecessary imports of TorchDynamo with a stand-in from now on."""
    if DYNAMO not in sys.modules and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


@contextmanager
def force_eager() -> Iterator[None]:
    """Run functions under ``torch.compile`` as ordinary Python code, without compiling them."""
    real = sys.modules.get(DYNAMO)
    if real is None or isinstance(real, _DynamoStandIn):
        yield
        return
    with sys.modules["torch"].compiler.set_stance("force_eager"):
        yield


def _importer() -> str | None:
    """Return the name of the module whose import statement is running."""
    frame = sys._getframe(1)
    while frame is not None and (
        frame.f_globals.get("__name__") in (__name__, "importlib", "importlib._bootstrap")
        or frame.f_code.co_filename.startswith("<frozen importlib")
    ):
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_globals.get("__name__")

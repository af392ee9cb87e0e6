"""Avoid importing TorchDynamo in processes that do not compile.

``torch.optim`` imports ``torch._dynamo`` when the first optimizer is created, only to call
``disable()`` and ``graph_break()``, which do nothing outside ``torch.compile``. The import takes
longer than PyTorch's own and uses 67 MB. After :func:`postpone_import`, such an import gets a
stand-in module that has only these two functions. As soon as any other attribute is used, the real
module replaces the stand-in: ``torch.compile`` works as usual, at the cost of the import.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"

_CALLERS = ("torch.optim.optimizer", "torch._compile")
"""The PyTorch modules whose imports of Dynamo need only these two functions."""

_lock = threading.RLock()


class _Postponed(ModuleType):
    """Stands in for ``torch._dynamo`` until anything beyond the two functions is used."""

    def __init__(self) -> None:
        super().__init__(NAME)
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
            if sys.modules.get(NAME) is self:
                del sys.modules[NAME]
                if _finder in sys.meta_path:
                    sys.meta_path.remove(_finder)
                for function in self.__dict__["_passed"]:
                    vars(function).pop("__dynamo_disable", None)
                self.__dict__["_passed"].clear()
            real = importlib.import_module(NAME)
            sys.modules["torch"].__dict__["_dynamo"] = real
            return real


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Returns the stand-in for the imports that need only its two functions."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != NAME or _importer() not in _CALLERS:
            return None
        return importlib.machinery.ModuleSpec(NAME, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Postponed()

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["_is_loaded"] = True


_finder = _Finder()


def postpone_import() -> None:
    """From now on, answer PyTorch's unnecessary imports of TorchDynamo with a stand-in.

    Does nothing if Dynamo has already been imported.
    """
    if NAME not in sys.modules and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


@contextlib.contextmanager
def force_eager() -> Iterator[None]:
    """Run functions under ``torch.compile`` as ordinary Python code, without compiling them."""
    real = sys.modules.get(NAME)
    if real is None or isinstance(real, _Postponed):
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

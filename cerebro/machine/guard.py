"""Reject calls that train during an import or inside a worker.

A script needs no main guard, because workers receive its ``build`` by value. If ``build`` is found
by name instead, the script is imported, and its call of a search would search again, in every
worker of every search. So every call that trains is rejected (`refuse`) during such an import
(`guard_import`) and throughout a worker's life (`enter_worker`).

A rejected call ends the import that reached it. If the module has the required names by then, the
import counts as complete: the module consists of the code above the call. Otherwise the user gets
an error that says how to fix the script. Code that catches the error continues, but without a run.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, FrameType, ModuleType
from typing import Any

from cerebro.errors import InputError
from cerebro.machine.imports import OWN_PREFIX, ask_finders, is_installed, loaded
from cerebro.machine.program import (
    Program,
    digest_of,
    inherited,
    note_import,
    note_source,
    remember_modules,
)

VARIABLE = "CEREBRO_IN_WORKER"
"""A variable set in the environment of workers, and so of every process that they start."""

CURE = 'put it under `if __name__ == "__main__":`'

BUILD = ("build",)
"""The names that a module must have if it is only imported by another module."""


class Stopped(BaseException):
    """Raised if a call that trains was reached while its module was being imported.

    It is not an Exception, so that a script's own ``except Exception`` does not mistake it for a
    failed search. It never leaves `guard_import`, nor the outermost import of a worker.
    """

    def __init__(self, call: str, where: str) -> None:
        super().__init__(f"{where}: {call} is called while the file is being imported")
        self.call = call
        self.where = where

    def refusal(self, missing: Sequence[str] = ()) -> InputError:
        """Return the error that the user gets if the import cannot stop at the call."""
        verb = "is" if len(missing) == 1 else "are"
        before = f", before {' and '.join(missing)} {verb} set" if missing else ""
        return InputError(f"{self}{before}: {CURE}")


class _Finding:
    """A period in which no search may start: user code is being imported, or a trial runs."""

    def __init__(self, target: str | None, names: tuple[str, ...], *, is_trial: bool) -> None:
        self.target = target
        self.names = names
        self.is_trial = is_trial
        self.thread = threading.get_ident()
        # Not sys._current_frames: in older releases of Python it waits forever if a garbage
        # collection begins in it (python/cpython#106883). Trials, of which each unit makes one,
        # need only their own thread.
        threads = () if is_trial else threading.enumerate()
        self.others = frozenset(thread.ident for thread in threads) - {self.thread}

    def includes_this_thread(self) -> bool:
        """Return whether the period applies to the current thread.

        While names are being found, it applies to the thread in `guard_import` and to threads that
        the imported code starts. New threads beside a trial may run unrelated searches.
        """
        here = threading.get_ident()
        return here == self.thread if self.is_trial else here not in self.others


class _Here(threading.local):
    def __init__(self) -> None:
        self.imports = 0  # the number of nested imports of users' modules
        self.found: list[_Finding] = []


_here = _Here()
_lock = threading.Lock()
_findings: list[_Finding] = []
_stops: dict[str, Stopped] = {}
_in_worker = bool(os.environ.get(VARIABLE))
_program: Program | None = None


def enter_worker() -> None:
    """Mark this process as a worker: reject training from now on, in it and in its children."""
    global _in_worker
    _in_worker = True
    os.environ[VARIABLE] = "1"


def use_program(program: Program | None) -> None:
    """Import the user's modules from this program, in a worker or in this process's trials."""
    global _program
    _program = program


def guard_import(*names: str, target: str | None = None) -> AbstractContextManager[None]:
    """Reject training in the block, which imports a user's code to find names in it.

    A script may define the names and then start a search. Its import ends at that call, without an
    error if the names are defined by then; else it raises InputError. `names` are ``build`` by
    default. `target` is the module, or the path of the file, that must have them. Other modules
    that it imports must have ``build``.
    """
    return _refuse_training(_Finding(target, names or BUILD, is_trial=False))


def guard_trial() -> AbstractContextManager[None]:
    """Reject training in the block, which runs a trial or the user's ``build``."""
    return _refuse_training(_Finding(None, BUILD, is_trial=True))


@contextmanager
def _refuse_training(found: _Finding) -> Iterator[None]:
    imports, _here.imports = _here.imports, 0
    _here.found.append(found)
    with _lock:
        _findings.append(found)
    try:
        yield
    except Stopped as stop:
        raise stop.refusal() from None
    finally:
        with _lock:
            _findings.remove(found)
        _here.found.remove(found)
        _here.imports = imports


def refuse(call: str) -> None:
    """Raise an error if no run may be started now; every call that starts a run calls this first.

    `call` is the call that would train, as users write it. Raises InputError, which says how to fix
    the code, or during an import Stopped, which the importer handles.
    """
    ours = [period for period in list(_findings) if period.includes_this_thread()]
    spawned = _is_spawned()
    if not (ours or spawned or _in_worker):
        return
    if not (_here.imports or spawned or any(not period.is_trial for period in ours)):
        raise InputError(
            f"{call} is called inside a trial, which cannot start a run: call it outside build "
            "and the model that build returns"
        )
    place = _find_statement()
    stop = Stopped(call, f"{place.f_code.co_filename}, line {place.f_lineno}")
    if _here.imports:
        raise stop
    raise stop.refusal()


def find_stop(module: ModuleType) -> Stopped | None:
    """Return the call at which a module's import stopped; None if it did not stop."""
    return _stops.get(module.__name__)


def make_stoppable(spec: ModuleSpec | None, source: bytes | None = None) -> ModuleSpec | None:
    """Allow the import of a user's file (or of `source` for it) to stop at a rejected call."""
    loader = None if spec is None else spec.loader
    if spec is not None and type(loader) is SourceFileLoader and not is_installed(loader.path):
        spec.loader = _StoppableLoader(loader.name, loader.path, source)
    return spec


def _find_statement() -> FrameType:
    """Return the module-level statement that led to the call; in a thread, the call itself."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(2))]
    outside = [f for f in frames if not f.f_code.co_filename.startswith((OWN_PREFIX, "<frozen "))]
    statements = [frame for frame in outside if frame.f_code.co_name == "<module>"]
    return [*statements, *outside, *frames][0]


def _is_spawned() -> bool:
    """Return whether this is a multiprocessing child that is importing its parent's script."""
    module = sys.modules.get("multiprocessing.process")
    return module is not None and getattr(module.current_process(), "_inheriting", False)


class _StoppableLoader(SourceFileLoader):
    """Imports `source` (None: the file's own), and decides the outcome if a call was rejected."""

    def __init__(self, name: str, path: str, source: bytes | None) -> None:
        super().__init__(name, path)
        self._source = source

    def get_data(self, path: str) -> bytes:
        if self._source is not None and path == self.path:
            return self._source
        return super().get_data(path)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the module's code; Python's cache of it belongs to the file as it is now."""
        if self._source is None:
            return super().get_code(fullname)
        loaded[self.path] = digest_of(self._source)
        note_source(self.path, self._source)
        code: CodeType = self.source_to_code(self._source, self.path)
        return code

    def exec_module(self, module: ModuleType) -> None:
        _here.imports += 1
        try:
            super().exec_module(module)
        except Stopped as stop:
            period = _here.found[-1] if _here.found else None
            names: tuple[str, ...] = BUILD
            if period is not None and period.target in (module.__name__, self.path):
                names = period.names
            missing = [name for name in names if not hasattr(module, name)]
            if missing and _here.imports > 1:
                raise  # the module that imports this one may have the names
            if missing:
                raise stop.refusal(missing) from None
            _stops[module.__name__] = stop
            _explain_what_is_missing(module, stop)
        finally:
            _here.imports -= 1


def _explain_what_is_missing(module: ModuleType, stop: Stopped) -> None:
    """Add a ``__getattr__`` that explains missing attributes to a module whose import stopped."""

    def missing(name: str) -> Any:
        raise AttributeError(f"module {module.__name__!r} has no {name!r}: {stop}; {CURE}")

    vars(module).setdefault("__getattr__", missing)


class _Finder:
    """Finds the same modules as the finders after it, but knows about users' files.

    It remembers the source of the files that this process imports. In a worker or a trial it gives
    the source that the run has kept, and lets imports stop.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = ask_finders(later, name, path, target)
        source = None
        in_run = _in_worker or (_here.found and _here.found[-1].is_trial)
        program = (_program if in_run else None) or inherited()
        if program is not None:
            spec, source = program.source_of(name, path, spec)
        elif name not in sys.modules or target is not None:  # an import, not only a question
            note_import(spec)
        is_kept = source is not None
        return make_stoppable(spec, source) if is_kept or _findings or _in_worker else spec


# Never removed: an import in another thread must find all finders with which it began.
_place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else 0
sys.meta_path.insert(_place, _Finder())
remember_modules()

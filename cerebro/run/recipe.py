"""Identify a run's ``build`` function, so that it can be imported again.

A run stores names and hashes, never code: ``module:qualname``, the file, and the hash of the
function's source. Resuming a run imports the function again. For lambdas, nested functions, objects
such as a `functools.partial`, and notebook cells, the user passes ``build=``.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cerebro._core as _core
from cerebro.arguments import warn_user
from cerebro.errors import CerebroError, InputError, text_of
from cerebro.machine import imports as sources
from cerebro.machine.guard import BUILD, guard_import, make_stoppable
from cerebro.machine.program import source_as_imported
from cerebro.model import Info
from cerebro.run.records import STUDY, strip_study

_SEARCH_CV = "<BuildEstimator>"  # the build of `cerebro.sklearn.SearchCV`
_PASS_IT = "pass it as build=... (on the command line: --build FILE)"


@dataclass(frozen=True)
class Recipe:
    """The identity of a ``build`` function."""

    module: str
    qualname: str
    file: str | None
    source_hash: str | None
    file_hash: str | None
    takes_trial: bool = False  # called with an Optuna trial, not a configuration

    @classmethod
    def from_build(cls, build: Callable[..., Any]) -> Recipe:
        takes_trial = getattr(build, "takes_trial", False)
        file = _file(build)
        hashes = source_hash(build), _hash_of(file)
        return cls(*_name_of(build), file, *hashes, takes_trial=takes_trial)

    @property
    def name(self) -> str:
        return f"{self.module}:{self.qualname}"

    @property
    def is_importable(self) -> bool:
        """Whether another program can import the function by its name."""
        return self.module != "__main__" and self.has_name

    @property
    def has_name(self) -> bool:
        """Whether this program finds the function again; not a lambda, for example."""
        return "<" not in self.qualname

    def check_maker(self) -> None:
        """Raise InputError if `SearchCV` made the run, which keeps no estimator and no rows."""
        if self.qualname == _SEARCH_CV:
            raise InputError(
                "SearchCV made this run, and fit() keeps neither its estimator nor its rows: the "
                "run can be read, but to train, evaluate or replay a trial, fit again"
            )

    def find(self) -> Callable[..., Any]:
        """Import the function again; raise InputError if that fails or its script has changed."""
        self.check_maker()
        if not self.has_name:
            what = "a partial, a bound method or another object"
            if "<locals>" in self.qualname or "<lambda>" in self.qualname:
                what = "defined inside a function or as a lambda"
            raise InputError(
                f"this run's build() ({self.name}) was {what}, and cannot be imported again: "
                f"{_PASS_IT}"
            )
        try:
            build: Any = self._module()
            for part in self.qualname.split("."):
                build = getattr(build, part)
        except CerebroError:
            raise
        except (Exception, SystemExit) as error:  # a script may read its arguments, and exit
            why = f"{type(error).__name__}: {text_of(error)}"
            if isinstance(error, SystemExit):
                why = f"it ends the process: sys.exit({text_of(error)})"
            elif isinstance(error, (ImportError, AttributeError, OSError)):  # their texts say it
                why = text_of(error)
            if self.module == "__main__":
                raise InputError(f"this run's {self._explain_not_found(why)}") from error
            raise InputError(
                f"this run's build(), {self.name}, cannot be imported here ({why}): {_PASS_IT}"
            ) from error
        self.warn_if_changed(build)
        return build  # type: ignore[no-any-return]

    def warn_if_changed(self, build: Callable[..., Any]) -> None:
        now = source_hash(build)
        what = None
        if self.source_hash is not None and now is not None and now != self.source_hash:
            what = f"the source of build ({self.name})"
        elif self.file_hash is not None and _hash_of(_file(build)) not in (None, self.file_hash):
            what = f"{self.file}, which defines build,"
        if what is not None:
            warn_user(f"{what} has changed since the run")

    def _module(self) -> ModuleType:
        main = sys.modules.get("__main__")
        if self.module == "__main__":
            if main is not None and self._is_in(main):
                return main
            if self.script_is_unchanged:
                script = import_file(str(self.file), sought=(self._first_name,))
                if source_hash(_get_attribute(script, self.qualname)) == self.source_hash:
                    return script
            if main is not None and is_interactive():
                return main
            raise ImportError("it was defined in another program")
        if main is not None and self.module == _name_with_m(main) and self._is_in(main):
            return main
        try:
            with guard_import(self._first_name, target=self.module):
                return importlib.import_module(self.module)
        except ImportError:
            if self.file is None:
                raise
            return import_file(self.file, self.module, sought=(self._first_name,))

    def _is_in(self, main: ModuleType) -> bool:
        """Return whether the program `main` defined the function, judged by file or source."""
        file = _file_of(main)
        if file is not None and self.file == file:
            return True
        function = _get_attribute(main, self.qualname)
        return self.source_hash is not None and source_hash(function) == self.source_hash

    @property
    def script_is_unchanged(self) -> bool:
        return self.file_hash is not None and _hash_of(self.file) == self.file_hash

    def _explain_not_found(self, why: str) -> str:
        """Say where the function of a script or notebook was defined, and what to do."""
        again = "run the cell that defines it, or " if is_interactive() else ""
        if self.file is None or self.file_hash is None:
            return f"{self.qualname}() was defined in a script or notebook: {again}{_PASS_IT}"
        there = f"{self.qualname}() was defined in {self.file}"
        if self.script_is_unchanged:
            return f"{there}, which cannot be imported here ({why}): {again}{_PASS_IT}"
        if not Path(self.file).is_file():
            return f"{there}, which is not there any more: {again}{_PASS_IT}"
        return (
            f"{there}, which has changed since: put it back, or pass what it defines now as "
            f"build=... (on the command line: --build {shlex.quote(self.file)})"
        )

    @property
    def _first_name(self) -> str:
        """The module-level name of the function, or of the class that contains it."""
        return self.qualname.partition(".")[0]


def _name_of(build: Any) -> tuple[str, str]:
    """Return the module and qualified name of ``build``, in angle brackets if not importable."""
    while isinstance(build, WrappedBuild):
        build = build.build
    module = sources.module_of(build)
    qualname = getattr(build, "__qualname__", None) or f"{type(build).__qualname__} object"
    if inspect.ismethod(build) and isinstance(build.__self__, type):  # perhaps inherited
        owner = build.__self__
        module, qualname = sources.module_of(owner), f"{owner.__qualname__}.{build.__name__}"
    elif not (inspect.isfunction(build) or isinstance(build, type)) and (
        _get_attribute(sys.modules.get(module), qualname) is not build
    ):
        return module, f"<{qualname}>"
    main = sys.modules.get("__main__")
    if module == "__main__" and main is not None and _file(build) == _file_of(main):
        module = _name_with_m(main) or module
    return module, qualname


def _get_attribute(module: ModuleType | None, qualname: str) -> Any:
    """Return what a module has under a qualified name, or None."""
    value: Any = module
    for part in qualname.split("."):
        value = getattr(value, part, None)
    return value


def _name_with_m(main: ModuleType) -> str | None:
    """Return the name of a program that ``python -m`` runs as a module, or None."""
    name = getattr(getattr(main, "__spec__", None), "name", None)
    return None if name == "__main__" else name


def _file_of(main: ModuleType) -> str | None:
    file = getattr(main, "__file__", None)
    return None if file is None else str(Path(str(file)).resolve())


def is_interactive() -> bool:
    """Return whether names are defined in notebook cells or at a prompt, not by a script."""
    main = sys.modules.get("__main__")
    return main is not None and getattr(main, "__file__", None) is None


def import_file(
    path: str | Path, name: str | None = None, *, sought: tuple[str, ...] = BUILD
) -> ModuleType:
    """Import a Python file by its path, under ``name``.

    By default, this is the file's stem or, with relative imports, its dotted name in its package.
    As for a script, the file's folder is put first on ``sys.path``; so is the folder of its
    package. A file with the name of a different module, such as ``torch.py``, gets a different
    name, its folder is put last, and workers receive its code. A script's import stops at its
    search if the names in `sought` are then defined. Exceptions of the file are passed on.
    """
    file = Path(path).resolve()
    plain_name = name or _make_module_name(file)
    loaded = sys.modules.get(plain_name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    if not file.exists():
        raise FileNotFoundError(f"{path} does not exist")
    taken = _is_taken(plain_name, file)
    own_name = f"{plain_name}_{_core.xxh3_64(str(file).encode())}" if taken else plain_name
    if own_name in sys.modules:
        return sys.modules[own_name]
    spec = make_stoppable(importlib.util.spec_from_file_location(own_name, file))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    root = file.parents[min(plain_name.count("."), len(file.parents) - 1)]
    for folder in (file.parent, root):
        if str(folder) not in sys.path:
            sys.path.insert(len(sys.path) if taken else 0, str(folder))
    module = importlib.util.module_from_spec(spec)
    sys.modules[own_name] = module
    try:
        with guard_import(*sought, target=str(file)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[own_name]
        raise
    if own_name != file.stem:  # workers cannot import it by its own name
        sources.sent_whole.add(own_name)
    return module


def _make_module_name(file: Path) -> str:
    """Return the file's stem, after the names of its packages if it has relative imports."""
    try:
        statements = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # the import will raise it
        return file.stem
    depth = max((s.level for s in statements if isinstance(s, ast.ImportFrom)), default=0)
    depth = min(depth, len(file.parents) - 1)
    while 0 < depth < len(file.parents) and (file.parents[depth] / "__init__.py").exists():
        depth += 1
    packages = reversed(file.parents[:depth])
    return ".".join([*(folder.name for folder in packages), file.stem])


def _is_taken(name: str, file: Path) -> bool:
    """Return whether the name already belongs to a different module, imported or not."""
    if name in sys.modules:
        return True
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.origin != str(file)


def accepts_info(build: Callable[..., Any]) -> bool:
    """Return whether to call ``build`` as ``build(config, info)``."""
    try:
        parameters = list(inspect.signature(build).parameters.values())
    except (TypeError, ValueError):
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return True
    if not positional:
        raise InputError(
            "build must take the configuration: def build(config) or build(config, info)"
        )
    required = [p for p in positional if p.default is inspect.Parameter.empty]
    named = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if len(required) > 2 or named:
        names = ", ".join(p.name for p in [*required, *named])
        raise InputError(
            f"build takes ({names}), but it is called as build(config) or build(config, info): "
            "give the other parameters defaults"
        )
    # `info` is not passed to a second parameter that has a default and another name.
    return len(positional) >= 2 and (
        positional[1].name == "info" or positional[1].default is inspect.Parameter.empty
    )


def source_hash(build: Callable[..., Any]) -> str | None:
    """Return the XXH3-128 of the function's source; None if it has no source."""
    try:
        return _core.xxh3_128(inspect.getsource(build).encode())
    except (OSError, TypeError):
        return None


def _file(build: Callable[..., Any]) -> str | None:
    try:
        name = inspect.getsourcefile(build)
    except (OSError, TypeError):  # a class defined in a notebook, or a builtin
        return None
    return None if name is None or name.startswith("<") else str(Path(name).resolve())


def _hash_of(file: str | None) -> str | None:
    """Return the XXH3-128 of a file, as this process has imported it; None if it is missing."""
    if file is None:
        return None
    try:
        source = source_as_imported(file)
        return _core.xxh3_128(Path(file).read_bytes() if source is None else source)
    except OSError:
        return None


def call_build(build: Callable[..., Any], config: Any, info: Any) -> Any:
    return build(config, info) if accepts_info(build) else build(config)


class WrappedBuild:
    """A ``build`` that calls the user's, whose name and source it has, with different arguments."""

    def __init__(self, build: Callable[..., Any]) -> None:
        self.build = build
        self.__wrapped__ = build
        self.__signature__ = inspect.signature(lambda config, info: None)
        self.__module__ = getattr(build, "__module__", None) or "?"
        self.__qualname__ = getattr(build, "__qualname__", None) or type(build).__qualname__


class StudyBuild(WrappedBuild):
    """A ``build`` that calls the user's with an Optuna trial, which suggests recorded values."""

    takes_trial = True  # recorded, so that a resumed run also passes an Optuna trial

    def __call__(self, config: Mapping[str, Any], info: Info) -> Any:
        study = config.get(STUDY, {})  # cerebro.refit, whose only trial is 0, does not have it
        trial = _trial_class()(strip_study(config), study.get("number", info.trial))
        trial.user_attrs.update(study.get("user_attrs", {}))
        trial.system_attrs.update(study.get("system_attrs", {}))
        trial.study = StudyStandIn(study.get("study", ""), study.get("direction", "NOT_SET"))
        return call_build(self.build, trial, info)


@functools.cache
def _trial_class() -> Any:
    """Define the trials' class here, so that Optuna is imported only where it is used."""
    from optuna.trial import FixedTrial

    class StudyTrial(FixedTrial):
        study: StudyStandIn

    return StudyTrial


class StudyStandIn:
    """Replaces a trial's ``study`` in a worker, which does not have the study itself."""

    def __init__(self, name: str, direction: str) -> None:
        from optuna.study import StudyDirection

        self.study_name = name
        self.direction = StudyDirection[direction]
        self.directions = [self.direction]

    def stop(self) -> None:
        """Do nothing: the study has stopped when `build` was called in the study's own process."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trial.study.{name} is not available in a worker, where build is called again: "
            "only study_name, direction and stop() are. Store the values that build needs with "
            "trial.set_user_attr() in define=, or read them before optimize()"
        )


def check_build(build: Any) -> None:
    """Raise InputError unless `build` can be called with a configuration."""
    is_model = hasattr(build, "state_dict") and not isinstance(build, type)  # networks are callable
    if is_model or not callable(build):
        raise InputError(
            f"build must be a function that makes a model, such as def build(config): ..., "
            f"not {type(build).__name__}"
        )
    accepts_info(build)

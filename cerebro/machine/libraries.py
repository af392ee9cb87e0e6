"""Set the process-wide options of PyTorch, Keras and JAX that change bits, types or speed.

A run sends the settings of the user's process to its workers. Each ``build`` begins with them; what
it changes belongs to its model, and what a module changes when it is imported stays in the process.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import util
from pathlib import Path
from typing import Any, ClassVar

from cerebro.errors import InputError
from cerebro.machine import flags
from cerebro.machine.imports import find_whole_module


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

    def module(self) -> Any:
        """Return the library if it is completely imported in this process, else None."""
        return find_whole_module(self.name)

    def _read(self, module: Any) -> dict[str, Any]:
        raise NotImplementedError

    def _change(self, module: Any, changes: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Change some settings; `now` has the present ones."""
        raise NotImplementedError

    def present(self) -> dict[str, Any]:
        """Return the current settings as JSON values; empty if the library is not imported."""
        module = self.module()
        return {} if module is None else self._read(module)

    def apply(self, settings: Mapping[str, Any]) -> None:
        """Apply settings of `present`; import the library only if it would begin with others."""
        module = self.module()
        if not settings or (module is None and self._begins_with(settings)):
            return
        if module is None:
            importlib.import_module(self.name)
            module = self.module()
        now = {} if module is None else self._read(module)
        if now == settings:  # as after almost every unit
            return
        changes = {
            name: settings[name]
            for name in self.FIRST
            if name in now and settings.get(name, now[name]) != now[name]
        }
        if changes:
            self._change(module, changes, now)

    def _begins_with(self, settings: Mapping[str, Any]) -> bool:
        """Return whether the library would begin with these settings."""
        return all(settings.get(name, first) == first for name, first in self.FIRST.items())

    def of_new_process(self) -> dict[str, Any]:
        return dict(self.FIRST)

    def of_build(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings in which each ``build`` of a run with these `settings` begins."""
        of_run = {name: settings[name] for name in self.FIRST if name in settings}
        return {**(of_run or self.of_new_process()), **self.imported}

    def restore(self, settings: Mapping[str, Any]) -> None:
        """Undo what a ``build`` of a run with these `settings` has changed."""
        if self.module() is not None:
            self.apply(self.of_build(settings))

    def begin_run(self, settings: Mapping[str, Any], *, own_process: bool) -> None:
        """Prepare the process for a run; a worker process does not import its modules again."""
        if not own_process:
            self.imported.clear()  # those of an earlier run are among this run's, or were undone

    def begin_build(self, settings: Mapping[str, Any]) -> None:
        self.restore(settings)

    def enter(self, settings: Mapping[str, Any]) -> None:
        """Apply the settings of a run, unless the library is not imported: see `build_model`."""
        if self.module() is not None:
            self.apply(settings)

    @contextmanager
    def of_run(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Run a block with a run's settings, then restore the caller's and what new modules set."""
        before, imported_before = self.present(), dict(self.imported)
        try:
            self.enter(settings)
            yield
        finally:
            if self.module() is not None:
                new = {k: v for k, v in self.imported.items() if imported_before.get(k) != v}
                self.apply({**(before or self.of_new_process()), **new})


class TorchSettings(LibrarySettings):
    """PyTorch's settings.

    Importing PyTorch takes seconds and 200 MB, so models that do not use it train without it. A
    setting is None if PyTorch does not report it, as when its newer settings of the precision
    (``fp32_precision``) are in use.
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

    def _read(self, module: Any) -> dict[str, Any]:
        return {
            "default_dtype": str(module.get_default_dtype()).removeprefix("torch."),
            "matmul_precision": _get_or_none(module.get_float32_matmul_precision),
            "cudnn_allow_tf32": _get_or_none(lambda: module.backends.cudnn.allow_tf32),
            "cudnn_benchmark": module.backends.cudnn.benchmark,
            "cudnn_deterministic": module.backends.cudnn.deterministic,
            "deterministic_algorithms": module.are_deterministic_algorithms_enabled(),
            "deterministic_warn_only": module.is_deterministic_algorithms_warn_only_enabled(),
            "flush_denormal": _flushes_denormals(),
        }

    def _change(self, module: Any, changes: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        known = {k: v for k, v in changes.items() if v is not None and now[k] is not None}
        wanted = {**now, **known}
        if "default_dtype" in known:
            module.set_default_dtype(getattr(module, wanted["default_dtype"]))
        if "matmul_precision" in known:
            module.set_float32_matmul_precision(wanted["matmul_precision"])
        for name in ("allow_tf32", "benchmark", "deterministic"):
            if f"cudnn_{name}" in known:
                setattr(module.backends.cudnn, name, wanted[f"cudnn_{name}"])
        checks = ("deterministic_algorithms", "deterministic_warn_only")
        if not known.keys().isdisjoint(checks):  # imports TorchInductor: a second or two
            module.use_deterministic_algorithms(wanted[checks[0]], warn_only=wanted[checks[1]])
        if "flush_denormal" in known:
            module.set_flush_denormal(wanted["flush_denormal"])

    def begin_run(self, settings: Mapping[str, Any], *, own_process: bool) -> None:
        super().begin_run(settings, own_process=own_process)
        self.apply(settings)

    def of_build(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings in which a ``build`` begins: `compute_settings` has chosen some."""
        process = super().of_build(settings)
        if flags.chosen_blocks:
            process |= {name: v for name, v in self.present().items() if name in self._CHOICES}
        return process


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


class KerasSettings(LibrarySettings):
    """Keras's settings and numbering, which change models and their names.

    Keras numbers layers and metrics without a name in the order in which a process creates them:
    the second model's ``dense`` is ``dense_1``, and its metric ``auc`` is ``auc_1``. Keras is not
    imported here unless its settings differ from the defaults: most models are not Keras models,
    even if Keras is imported elsewhere.
    """

    name = "keras"
    FIRST: ClassVar[Mapping[str, Any]] = {
        "floatx": "float32",
        "epsilon": 1e-7,
        "image_data_format": "channels_last",
        "dtype_policy": "float32",
    }

    def module(self) -> Any:
        """Return Keras 3 if it is completely imported, else None."""
        keras = super().module()
        return keras if hasattr(getattr(keras, "config", None), "dtype_policy") else None

    def _read(self, module: Any) -> dict[str, Any]:
        """Return the settings, the version and the backend, which `apply` leaves alone."""
        return {
            "version": str(module.__version__),
            "backend": str(module.backend.backend()),
            "floatx": str(module.config.floatx()),
            "epsilon": float(module.config.epsilon()),
            "image_data_format": str(module.config.image_data_format()),
            "dtype_policy": str(module.config.dtype_policy().name),
        }

    def _change(self, module: Any, changes: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for name, value in changes.items():
            getattr(module.config, f"set_{name}")(value)

    def of_new_process(self) -> dict[str, Any]:
        """Return the settings with which Keras begins, by the user's keras.json."""
        try:
            folder = os.environ.get("KERAS_HOME") or Path("~/.keras").expanduser()
            file = json.loads(Path(folder, "keras.json").read_text("utf-8"))
        except (OSError, RuntimeError, ValueError):  # also no home folder, or no JSON
            file = {}
        settings = {name: file.get(name, first) for name, first in self.FIRST.items()}
        return {**settings, "dtype_policy": settings["floatx"]}

    def begin_build(self, settings: Mapping[str, Any]) -> None:
        """Prepare the process for a ``build``.

        Keras's numbering of layers begins anew, and its shared random generator is discarded: its
        next use takes a new seed from the generator of `random`. So neither a model's names nor its
        weights nor its types depend on the models created before it.
        """
        self.apply(settings if self.module() is None else self.of_build(settings))
        if self.module() is None:
            return
        from keras.src.backend.common.global_state import set_global_attribute
        from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
        from keras.src.utils.naming import reset_uids

        reset_uids()
        set_global_attribute(GLOBAL_SEED_GENERATOR, None)


class JaxSettings(LibrarySettings):
    """JAX's settings, named without ``jax_``; they change types, random numbers and errors.

    They are often set at the top of a script, which workers do not run. Settings that this JAX
    lacks are left out.
    """

    name = "jax"
    FIRST: ClassVar[Mapping[str, Any]] = {
        "enable_x64": False,
        "default_prng_impl": "threefry2x32",
        "threefry_partitionable": True,  # False before JAX 0.5
        "default_matmul_precision": None,
        "numpy_dtype_promotion": "standard",
        "numpy_rank_promotion": "allow",
        "debug_nans": False,
    }

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[str, Any] = {}
        """The process's settings before `apply` changed any; empty if it has not."""
        self._begun: dict[str, Any] = {}
        """The settings of the last run in this worker process."""

    def module(self) -> Any:
        jax = super().module()
        return jax if hasattr(jax, "config") else None

    def _read(self, module: Any) -> dict[str, Any]:
        names = [name for name in self.FIRST if hasattr(module.config, f"jax_{name}")]
        values = {name: getattr(module.config, f"jax_{name}") for name in names}
        return {name: getattr(value, "value", value) for name, value in values.items()}  # of enums

    def _change(self, module: Any, changes: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Change settings; raise InputError for one that a ``with`` block of this thread fixes."""
        with ThreadPoolExecutor(1) as other:  # such blocks are those of one thread
            outside = other.submit(self.present).result()
        for name, value in changes.items():
            if outside[name] != now[name]:
                raise InputError(
                    f"JAX's {name} is {now[name]!r} here because of a with block, but the run has "
                    f"{value!r}: leave the block first (jax.config.update changes a whole process)"
                )
        if not self._own:
            self._own.update(now)
        for name, value in changes.items():
            module.config.update(f"jax_{name}", value)

    def of_new_process(self) -> dict[str, Any]:
        """Return the process's own settings, or those of a new process; empty without JAX."""
        if self._own:
            return self._own
        settings = dict(_first_settings() or {})
        for name, value in settings.items():
            text = os.environ.get(f"JAX_{name.upper()}")
            if text is not None:  # read as JAX does
                yes = text.lower() in ("y", "yes", "t", "true", "on", "1")
                settings[name] = yes if isinstance(value, bool) else text
        return settings

    def enter(self, settings: Mapping[str, Any]) -> None:
        self.apply(settings)  # before arrays are made, which have other types otherwise

    def begin_process(self, settings: Mapping[str, Any]) -> None:
        """Apply the settings of a run that begins in a worker process.

        Without any, the process gets back its own: an earlier run may have changed them. Settings
        that are those of the last run stay as they are, because a module of the user's may have
        changed them when it was imported, and it is not imported again.
        """
        wanted = dict(settings or self._own)
        changed = {name: v for name, v in wanted.items() if self._begun.get(name, ...) != v}
        self.apply(changed)
        self._begun = wanted

    def _begins_with(self, settings: Mapping[str, Any]) -> bool:
        """Return whether JAX would begin with these settings, or cannot be imported."""
        first = _first_settings()
        return first is None or (
            not any(f"JAX_{name.upper()}" in os.environ for name in first)
            and all(settings.get(name, value) == value for name, value in first.items())
        )


@functools.cache
def _first_settings() -> dict[str, Any] | None:
    """Return the settings of a new process with the installed JAX; None if there is no JAX."""
    if util.find_spec("jax") is None:
        return None
    from importlib import metadata  # slow to import

    release = tuple(int(part) for part in metadata.version("jax").split(".")[:2])
    return {**JaxSettings.FIRST, "threefry_partitionable": release >= (0, 5)}


TORCH, KERAS, JAX = TorchSettings(), KerasSettings(), JaxSettings()

LIBRARIES: tuple[LibrarySettings, ...] = (TORCH, KERAS, JAX)

Settings = Mapping[str, Mapping[str, Any]]
"""The settings of each library by its name; a library that was not imported may be missing."""


def present_settings() -> dict[str, dict[str, Any]]:
    return {library.name: library.present() for library in LIBRARIES}


def recorded_settings(environment: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {library.name: environment.get(library.name, {}) for library in LIBRARIES}


def begin_run(settings: Settings, *, own_process: bool) -> None:
    """Prepare this process for a run with these settings; `own_process`: it is a worker's."""
    for library in LIBRARIES:
        library.begin_run(settings.get(library.name, {}), own_process=own_process)


def apply_settings(settings: Settings) -> None:
    for library in LIBRARIES:
        library.apply(settings.get(library.name, {}))


def restore_settings(settings: Settings) -> None:
    """Undo what a ``build`` of a run with these `settings` has changed."""
    for library in LIBRARIES:
        library.restore(settings.get(library.name, {}))


@contextmanager
def settings_of_run(settings: Settings) -> Iterator[None]:
    """Run a block with the settings of a run or a model, then restore the caller's."""
    with ExitStack() as stack:
        for library in reversed(LIBRARIES):
            stack.enter_context(library.of_run(settings.get(library.name, {})))
        yield

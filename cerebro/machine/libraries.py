"""The process-wide settings of Keras and JAX, and of all libraries together, by name."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import util
from pathlib import Path
from typing import Any, ClassVar

from cerebro.errors import InputError
from cerebro.machine.flags import TORCH, LibrarySettings
from cerebro.machine.imports import find_whole_module


class JaxSettings(LibrarySettings):
    """JAX's settings, named without ``jax_``; they change types, random numbers and errors.

    They are often set at the top of a script, which workers do not run. JAX is not imported here
    unless its settings differ from those with which it begins.
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

    def is_imported(self) -> bool:
        return _jax() is not None

    def present(self) -> dict[str, Any]:
        jax = _jax()
        if jax is None:
            return {}
        names = [name for name in self.FIRST if hasattr(jax.config, f"jax_{name}")]
        return {name: _to_plain(getattr(jax.config, f"jax_{name}")) for name in names}

    def apply(self, settings: Mapping[str, Any]) -> None:
        """Apply settings of `present`; settings that this JAX lacks are left out.

        Raises
        ------
        InputError
            If a setting must change that a ``with`` block of this thread fixes.
        """
        if not settings or (_jax() is None and self._begins_with(settings)):
            return
        import jax

        now = self.present()
        changes = {
            name: value for name, value in settings.items() if name in now and now[name] != value
        }
        if not changes:
            return
        self._check_blocks(changes, now)
        if not self._own:
            self._own.update(now)
        for name, value in changes.items():
            jax.config.update(f"jax_{name}", value)

    def of_new_process(self) -> dict[str, Any]:
        """Return the process's own settings, or those of a new process; empty without JAX."""
        return self._own or _first_in_environment()

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
            and all(first.get(name, value) == value for name, value in settings.items())
        )

    def _check_blocks(self, changes: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Raise InputError if a ``with`` block fixes a setting, which cannot be changed then."""
        with ThreadPoolExecutor(1) as other:  # such blocks are those of one thread
            outside = other.submit(self.present).result()
        for name, value in changes.items():
            if outside[name] != now[name]:
                raise InputError(
                    f"JAX's {name} is {now[name]!r} here because of a with block, but the run has "
                    f"{value!r}: leave the block first (jax.config.update changes a whole process)"
                )


JAX = JaxSettings()


def _to_plain(value: Any) -> Any:
    return getattr(value, "value", value)  # of an enumeration, as numpy_dtype_promotion is


def _first_in_environment() -> dict[str, Any]:
    """Return the settings of a new process with this environment; empty if there is no JAX."""
    found = dict(_first_settings() or {})
    for name, value in found.items():
        text = os.environ.get(f"JAX_{name.upper()}")
        if text is not None:  # read as JAX does
            yes = text.lower() in ("y", "yes", "t", "true", "on", "1")
            found[name] = yes if isinstance(value, bool) else text
    return found


@functools.cache
def _first_settings() -> dict[str, Any] | None:
    """Return the settings of a new process with the installed JAX; None if there is no JAX."""
    if util.find_spec("jax") is None:
        return None
    from importlib import metadata  # slow to import

    release = tuple(int(part) for part in metadata.version("jax").split(".")[:2])
    return {**JaxSettings.FIRST, "threefry_partitionable": release >= (0, 5)}


def _jax() -> Any:
    jax = find_whole_module("jax")
    return jax if hasattr(jax, "config") else None


BACKEND_VARIABLE = "KERAS_BACKEND"


def keras_backend() -> str | None:
    """Return Keras's backend in this process; None if Keras is not imported."""
    keras = _keras()
    return None if keras is None else str(keras.backend.backend())


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

    def is_imported(self) -> bool:
        return _keras() is not None

    def present(self) -> dict[str, Any]:
        """Return the current settings, the version and the backend."""
        keras = _keras()
        if keras is None:
            return {}
        return {
            "version": str(keras.__version__),
            "backend": str(keras.backend.backend()),
            "floatx": str(keras.config.floatx()),
            "epsilon": float(keras.config.epsilon()),
            "image_data_format": str(keras.config.image_data_format()),
            "dtype_policy": str(keras.config.dtype_policy().name),
        }

    def apply(self, settings: Mapping[str, Any]) -> None:
        """Apply settings of `present`, except the version and the backend."""
        complete = {name: settings.get(name, first) for name, first in self.FIRST.items()}
        if not settings or (_keras() is None and complete == self.FIRST):
            return
        import keras

        now = self.present()
        for name in self.FIRST:
            if name in settings and settings[name] != now[name]:
                getattr(keras.config, f"set_{name}")(settings[name])

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
        self.apply(settings if _keras() is None else self.of_build(settings))
        if _keras() is None:
            return
        from keras.src.backend.common.global_state import set_global_attribute
        from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
        from keras.src.utils.naming import reset_uids

        reset_uids()
        set_global_attribute(GLOBAL_SEED_GENERATOR, None)


KERAS = KerasSettings()


def _keras() -> Any:
    """Return Keras 3 if it is imported, else None."""
    keras = find_whole_module("keras")
    return keras if hasattr(getattr(keras, "config", None), "dtype_policy") else None


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
    """Apply settings of :func:`present_settings` in this process."""
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

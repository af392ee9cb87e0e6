"""Handle Keras's process-wide settings and numbering, which change models and their names.

Keras numbers layers and metrics without a name in the order in which a process creates them: the
second model's ``dense`` is ``dense_1``, and its metric ``auc`` is ``auc_1``. Nothing here imports
Keras unless its settings differ from the defaults.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cerebro.machine.whole_modules import whole_module

BACKEND_VARIABLE = "KERAS_BACKEND"

DEFAULTS = {
    "floatx": "float32",
    "epsilon": 1e-7,
    "image_data_format": "channels_last",
    "dtype_policy": "float32",
}
"""The Keras settings that are sent to workers, with their defaults in a new process."""


imported: dict[str, Any] = {}
"""The settings that modules made while a ``build`` of this run imported them."""


def keras_backend() -> str | None:
    keras = _keras()
    return None if keras is None else str(keras.backend.backend())


def keras_settings() -> dict[str, Any]:
    """Return the Keras settings that change results; empty if Keras is not imported."""
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


def set_keras(settings: Mapping[str, Any]) -> None:
    """Apply settings from `keras_settings`, except the version and the backend.

    A process that has not imported Keras imports it only for settings that differ from the
    defaults: most models are not Keras models, even if Keras is imported elsewhere.
    """
    values = {name: settings.get(name, default) for name, default in DEFAULTS.items()}
    if not settings or (_keras() is None and values == DEFAULTS):
        return
    import keras

    now = keras_settings()
    for name in DEFAULTS:
        if name in settings and settings[name] != now[name]:
            getattr(keras.config, f"set_{name}")(settings[name])


def begin_keras(settings: Mapping[str, Any]) -> None:
    """Begin a ``build`` of a run with these `settings`.

    Keras's numbering of layers begins anew, and its shared random generator is discarded: its next
    use takes a new seed from the generator of `random`. So a model's names, weights and types do
    not depend on the models created before it.
    """
    set_keras(settings if _keras() is None else keras_of_process(settings))
    if _keras() is None:
        return
    from keras.src.backend.common.global_state import set_global_attribute
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
    from keras.src.utils.naming import reset_uids

    reset_uids()
    set_global_attribute(GLOBAL_SEED_GENERATOR, None)


def keras_of_process(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in which each ``build`` of a run with these `settings` begins."""
    values = {name: settings[name] for name in DEFAULTS if name in settings}
    return {**(values or _first_settings()), **imported}


def restore_keras(settings: Mapping[str, Any]) -> None:
    """Undo what a ``build`` has changed; Keras is not imported here."""
    if _keras() is not None:
        set_keras(keras_of_process(settings))


@contextmanager
def keras_of_run(settings: Mapping[str, Any]) -> Iterator[None]:
    """Run a block with Keras's settings of a run, then restore the caller's settings.

    The backend cannot change. Settings of modules that are first imported in the block stay.
    """
    before, imported_before = keras_settings(), dict(imported)
    if before:
        set_keras(settings)
    try:
        yield
    finally:
        if _keras() is not None:
            new = {k: v for k, v in imported.items() if imported_before.get(k) != v}
            set_keras({**(before or _first_settings()), **new})


def _first_settings() -> dict[str, Any]:
    """Return the settings with which Keras begins in a new process, by the user's keras.json."""
    try:
        folder = os.environ.get("KERAS_HOME") or Path("~/.keras").expanduser()
        file = json.loads(Path(folder, "keras.json").read_text("utf-8"))
    except (OSError, RuntimeError, ValueError):  # also no home folder, or no JSON
        file = {}
    values = {name: file.get(name, default) for name, default in DEFAULTS.items()}
    return {**values, "dtype_policy": values["floatx"]}


def _keras() -> Any:
    """Return Keras 3 if it is imported, else None."""
    keras = whole_module("keras")
    return keras if hasattr(getattr(keras, "config", None), "dtype_policy") else None

"""Handle Keras's process-wide settings and numbering, which change models and their names.

Keras numbers layers and metrics without a name in the order in which a process creates them: the
second model's ``dense`` is ``dense_1``, and its metric ``auc`` is ``auc_1``. Nothing here imports
Keras unless its settings differ from the defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

BACKEND_VARIABLE = "KERAS_BACKEND"

DEFAULTS = {
    "floatx": "float32",
    "epsilon": 1e-7,
    "image_data_format": "channels_last",
    "dtype_policy": "float32",
}
"""The Keras settings that are sent to workers, with their defaults in a new process."""


def keras_backend() -> str | None:
    """Return Keras's backend in this process; None if Keras is not imported."""
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
    """Apply settings from :func:`keras_settings`, except the version and the backend.

    A process that has not imported Keras imports it only for settings that differ from the
    defaults: most models are not Keras models, even if Keras is imported elsewhere.
    """
    wanted = {name: settings.get(name, default) for name, default in DEFAULTS.items()}
    if not settings or (_keras() is None and wanted == DEFAULTS):
        return
    import keras

    now = keras_settings()
    for name in DEFAULTS:
        if name in settings and settings[name] != now[name]:
            getattr(keras.config, f"set_{name}")(settings[name])


def begin_keras() -> None:
    """Restart Keras's numbering of layers, and discard its shared random generator.

    The next use of that generator takes a new seed from the generator of `random`. So a model's
    names and weights do not depend on the models created before it.
    """
    if _keras() is None:
        return
    from keras.src.backend.common.global_state import set_global_attribute
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
    from keras.src.utils.naming import reset_uids

    reset_uids()
    set_global_attribute(GLOBAL_SEED_GENERATOR, None)


@contextmanager
def keras_kept() -> Iterator[None]:
    """Run a block, then restore Keras's settings; its backend cannot change."""
    before = keras_settings()
    try:
        yield
    finally:
        set_keras(before)


def _keras() -> Any:
    """Return Keras 3 if it is imported, else None."""
    keras = sys.modules.get("keras")
    return keras if hasattr(getattr(keras, "config", None), "dtype_policy") else None

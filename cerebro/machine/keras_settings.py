"""Handle Keras's process-wide settings and numbering, which change models and their names.

Keras numbers layers and metrics without a name in the order in which a process creates them: the
second model's ``dense`` is ``dense_1``, and its metric ``auc`` is ``auc_1``. Nothing here imports
Keras unless its settings differ from the defaults.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from cerebro.machine.library_settings import LibrarySettings
from cerebro.machine.whole_modules import find_whole_module

BACKEND_VARIABLE = "KERAS_BACKEND"


def keras_backend() -> str | None:
    """Return Keras's backend in this process; None if Keras is not imported."""
    keras = _keras()
    return None if keras is None else str(keras.backend.backend())


class KerasSettings(LibrarySettings):
    """Keras's settings. Most models are not Keras models, even if Keras is imported elsewhere."""

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

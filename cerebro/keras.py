"""Keras 3 models: `Model` lets a compiled Keras model hop between workers."""

from __future__ import annotations

from cerebro.machine.imports import import_extra

import_extra("keras", "keras", "cerebro.keras needs Keras 3")

from cerebro.integrations.keras.model import Model  # noqa: E402

__all__ = ["Model"]

"""Observers: callbacks that log a search, or copy its run to object storage."""

from typing import TYPE_CHECKING

from cerebro.callbacks.mirror import Mirror
from cerebro.callbacks.observer import CSV, Observer
from cerebro.machine.imports import import_lazily

if TYPE_CHECKING:
    from cerebro.integrations.loggers import MLflow, TensorBoard, WandB

__all__ = ["CSV", "MLflow", "Mirror", "Observer", "TensorBoard", "WandB"]

__getattr__ = import_lazily(
    __name__, dict.fromkeys(("MLflow", "TensorBoard", "WandB"), "cerebro.integrations.loggers")
)

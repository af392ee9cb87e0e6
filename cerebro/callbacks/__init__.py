"""Observers: callbacks that log a search, or copy its run to object storage."""

from cerebro.callbacks.csv_file import CSV
from cerebro.callbacks.mirror import Mirror
from cerebro.callbacks.mlflow import MLflow
from cerebro.callbacks.observer import Observer
from cerebro.callbacks.tensorboard import TensorBoard
from cerebro.callbacks.wandb import WandB

__all__ = ["CSV", "MLflow", "Mirror", "Observer", "TensorBoard", "WandB"]

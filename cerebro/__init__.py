"""Cerebro: find the best of many deep-learning models, with model hopper parallelism.

    import cerebro

    data = cerebro.shard({"x": x, "y": y}, "data/digits")
    train, valid, test = data.split(0.7, 0.15, 0.15)
    result = cerebro.search(build, space, train, epochs=10, validation=valid,
                            n_trials=16, metric="accuracy", batch_size=32)
    result.best.load().net

``cerebro.torch``, ``cerebro.sklearn`` and similar modules are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

try:
    from cerebro._core import trial_seed, visit_order
except ImportError:
    from cerebro.machine.imports import refuse_shadow

    refuse_shadow("numpy")
    from cerebro.machine.uncompiled import refuse_uncompiled

    refuse_uncompiled()
    raise

from cerebro import transforms
from cerebro.api.check import Check, check
from cerebro.api.plan import Plan, plan
from cerebro.api.replay import Replay, replay
from cerebro.api.resume import resume
from cerebro.api.search import search
from cerebro.data import Dataset, images, shard
from cerebro.data.validation import KFold
from cerebro.errors import (
    CerebroError,
    CorruptDataError,
    DeviceError,
    InputError,
    RunError,
    StateError,
    WorkerError,
)
from cerebro.machine.environment import version
from cerebro.model import Info
from cerebro.results.result import Result, open_run
from cerebro.results.trial import Trial
from cerebro.searchers import (
    ASHA,
    PBT,
    TPE,
    GaussianProcess,
    GridSearch,
    Hyperband,
    MedianStopping,
    QuasiRandomSearch,
    RandomSearch,
    SuccessiveHalving,
)
from cerebro.searchers.base import DONE, Decision, Searcher, Suggestion
from cerebro.searchers.stopping import EarlyStopping
from cerebro.space import Space, choice, integer, loguniform, normal, uniform, when

if TYPE_CHECKING:
    from cerebro import jax as jax
    from cerebro import native as native
    from cerebro import optuna as optuna
    from cerebro import ray as ray
    from cerebro import sklearn as sklearn
    from cerebro import testing as testing
    from cerebro import torch as torch

__version__ = version()

open = open_run

# Names for ``from cerebro import *``: neither `open`, which would replace the built-in, nor the
# modules that need a framework.

__all__ = [
    "ASHA",
    "DONE",
    "PBT",
    "TPE",
    "CerebroError",
    "Check",
    "CorruptDataError",
    "Dataset",
    "Decision",
    "DeviceError",
    "EarlyStopping",
    "GaussianProcess",
    "GridSearch",
    "Hyperband",
    "Info",
    "InputError",
    "KFold",
    "MedianStopping",
    "Plan",
    "QuasiRandomSearch",
    "RandomSearch",
    "Replay",
    "Result",
    "RunError",
    "Searcher",
    "Space",
    "StateError",
    "SuccessiveHalving",
    "Suggestion",
    "Trial",
    "WorkerError",
    "check",
    "choice",
    "images",
    "integer",
    "loguniform",
    "normal",
    "plan",
    "replay",
    "resume",
    "search",
    "shard",
    "transforms",
    "trial_seed",
    "uniform",
    "visit_order",
    "when",
]

_LAZY = ("jax", "native", "optuna", "ray", "sklearn", "testing", "torch")
_MODULES = ("control", "data", "errors", "searchers", "space", "transforms", *_LAZY)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"cerebro.{name}")
    raise AttributeError(f"module 'cerebro' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, without modules that happen to be imported."""
    return sorted({*__all__, *_MODULES, "open", "__version__"})

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
except ImportError as error:
    from cerebro.machine.imports import refuse_hidden, refuse_shadow

    refuse_hidden(error)
    refuse_shadow("numpy")
    from cerebro.machine.uncompiled import refuse_uncompiled

    refuse_uncompiled()
    raise

from cerebro.machine.located import is_being_located

# A command imports only what it needs, so that the demo can start its workers before the rest is
# imported. A program has all names at once: a search then begins without delay.
if TYPE_CHECKING or not is_being_located():
    try:
        from cerebro import transforms
        from cerebro.api.check import Check, check
        from cerebro.api.open import open as open
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
        from cerebro.model import Info
        from cerebro.results.result import Result
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
    except (ImportError, AttributeError) as error:
        from cerebro.machine.imports import refuse_hidden

        refuse_hidden(error)
        raise

if TYPE_CHECKING:
    from cerebro import callbacks as callbacks
    from cerebro import cluster as cluster
    from cerebro import dask as dask
    from cerebro import jax as jax
    from cerebro import keras as keras
    from cerebro import native as native
    from cerebro import optuna as optuna
    from cerebro import ray as ray
    from cerebro import sklearn as sklearn
    from cerebro import spark as spark
    from cerebro import testing as testing
    from cerebro import torch as torch
    from cerebro.api.plan import Plan, plan
    from cerebro.api.refit import refit
    from cerebro.api.replay import Replay, replay

    __version__: str

# Names for ``from cerebro import *``, without `open`, which would replace the built-in, and without
# the modules that need a framework.

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
    "refit",
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

_LAZY = (
    "cluster",
    "dask",
    "jax",
    "keras",
    "native",
    "optuna",
    "ray",
    "sklearn",
    "spark",
    "testing",
    "torch",
)
_MODULES = ("callbacks", "control", "data", "errors", "searchers", "space", "transforms", *_LAZY)

_PLACES = {
    "api.check": ("Check", "check"),
    "api.open": ("open",),
    "api.plan": ("Plan", "plan"),
    "api.refit": ("refit",),
    "api.replay": ("Replay", "replay"),
    "api.resume": ("resume",),
    "api.search": ("search",),
    "data": ("Dataset", "images", "shard"),
    "data.validation": ("KFold",),
    "errors": (
        "CerebroError",
        "CorruptDataError",
        "DeviceError",
        "InputError",
        "RunError",
        "StateError",
        "WorkerError",
    ),
    "model": ("Info",),
    "results.result": ("Result",),
    "results.trial": ("Trial",),
    "searchers": (
        "ASHA",
        "PBT",
        "TPE",
        "GaussianProcess",
        "GridSearch",
        "Hyperband",
        "MedianStopping",
        "QuasiRandomSearch",
        "RandomSearch",
        "SuccessiveHalving",
    ),
    "searchers.base": ("DONE", "Decision", "Searcher", "Suggestion"),
    "searchers.stopping": ("EarlyStopping",),
    "space": ("Space", "choice", "integer", "loguniform", "normal", "uniform", "when"),
}
_LATER = {name: module for module, names in _PLACES.items() for name in names}
"""The module of each name; it is imported on first use, unless it was imported above."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        value = getattr(importlib.import_module(f"cerebro.{_LATER[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"cerebro.{name}")
    if name == "__version__":
        from cerebro.machine.environment import version

        return version()
    raise AttributeError(f"module 'cerebro' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, without modules that happen to be imported."""
    return sorted({*__all__, *_MODULES, "open", "__version__"})

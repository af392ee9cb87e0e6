"""Cerebro and Ray: a cluster behind, Ray Tune in front.

    cerebro.search(build, space, train, ..., executor=cerebro.ray.Executor(address="auto"))
    cerebro.ray.fit(build, train, param_space=..., scheduler=ASHAScheduler(...), ...)

`Executor` runs a search's units on the nodes of a cluster (docs/guide/cluster.md), `fit`
drives Ray Tune's algorithms (docs/guide/ray-tune.md). Ray itself is imported when one of
them is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cerebro.ray.executor import Executor
    from cerebro.ray.fitting import fit
    from cerebro.ray.proxy import trainable

__all__ = ["Executor", "fit", "trainable"]

_LAZY = {"Executor": "executor", "fit": "fitting", "trainable": "proxy"}
"""Names and the modules that they come from."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"cerebro.ray.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'cerebro.ray' has no attribute {name!r}")

"""Cerebro on a Ray cluster.

    cerebro.search(build, space, train, ..., executor=cerebro.ray.Executor(address="auto"))

`Executor` runs a search's units on the nodes of a cluster; see docs/guide/cluster.md.
Ray itself is imported when a search begins.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cerebro.ray.executor import Executor

__all__ = ["Executor"]

_LAZY = {"Executor": "executor"}
"""Names and the modules that they come from."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"cerebro.ray.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'cerebro.ray' has no attribute {name!r}")

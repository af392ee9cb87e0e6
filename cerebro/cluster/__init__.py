"""A search on several machines, whose agents connect to the coordinator.

    cerebro.search(build, space, train, ..., executor=cerebro.cluster.Executor(workers=4))
    cerebro.cluster.Executor(listen="0.0.0.0:7070", key="cluster.key", workers=16)

The agents are programs, ``python -m cerebro agent``, on this machine or on others, started by any
tool that starts programs (docs/guide/cluster.md). Code that does not depend on how they are started
is shared with `cerebro.ray`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cerebro.machine.imports import import_lazily

if TYPE_CHECKING:
    from cerebro.cluster.connected_executor import Executor

__all__ = ["Executor"]

__getattr__ = import_lazily(__name__, {"Executor": "cerebro.cluster.connected_executor"})

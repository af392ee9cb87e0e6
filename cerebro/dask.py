"""Cerebro with Dask: a search on the workers of a Dask cluster.

    with dask.distributed.Client("scheduler:8786") as client:
        result = cerebro.search(build, space, train, ..., executor=cerebro.dask.Executor(client))

Agents run as long tasks, one for each worker, and connect to this process (docs/guide/cluster.md).
Dask only starts them: data, states and messages use Cerebro's own connections.
"""

from __future__ import annotations

from cerebro.cluster.engines.dask import Executor

__all__ = ["Executor"]

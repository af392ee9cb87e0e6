"""Cerebro with Ray: searches on a cluster, and Ray Tune as the front end.

    cerebro.search(build, space, train, ..., executor=cerebro.ray.Executor(address="auto"))
    tune.Tuner(cerebro.ray.trainable(build, train, batch_size=64), param_space=..., ...).fit()
    cerebro.ray.fit(build, train, param_space=..., scheduler=ASHAScheduler(...), ...)

`Executor` runs a search on the nodes of a cluster (docs/guide/cluster.md), `trainable` is for Ray
Tune's Tuner, and `fit` searches with Tune's algorithms (docs/guide/ray-tune.md). Ray itself is
imported when one of them is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cerebro.machine.imports import import_extra, import_lazily

if TYPE_CHECKING:
    from cerebro.cluster.engines.ray import Executor
    from cerebro.integrations.ray_tune.fit import fit
    from cerebro.integrations.ray_tune.trainable import trainable

__all__ = ["Executor", "fit", "trainable"]

_import_name = import_lazily(
    __name__,
    {
        "Executor": "cerebro.cluster.engines.ray",
        "fit": "cerebro.integrations.ray_tune.fit",
        "trainable": "cerebro.integrations.ray_tune.trainable",
    },
)


def __getattr__(name: str) -> Any:
    if name == "trainable":  # its class is derived from Ray's
        import_extra("ray.tune", "ray", "cerebro.ray.trainable needs Ray Tune")
    return _import_name(name)

"""PyTorch models: networks, LightningModules, transformers models and skorch nets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cerebro.machine.imports import import_lazily
from cerebro.torch.feature_plan import FeaturePlan, plan_features
from cerebro.torch.frozen_trunk import Features, features
from cerebro.torch.model import Model

if TYPE_CHECKING:
    from cerebro.integrations.lightning import from_lightning
    from cerebro.integrations.skorch import from_skorch
    from cerebro.integrations.transformers import from_transformers

__all__ = [
    "FeaturePlan",
    "Features",
    "Model",
    "features",
    "from_lightning",
    "from_skorch",
    "from_transformers",
    "plan_features",
]

__getattr__ = import_lazily(
    __name__,
    {
        "from_lightning": "cerebro.integrations.lightning",
        "from_skorch": "cerebro.integrations.skorch",
        "from_transformers": "cerebro.integrations.transformers",
    },
)


def __dir__() -> list[str]:
    """Return the public names, also those that are not imported yet."""
    return __all__

"""PyTorch models: networks, LightningModules, transformers models and skorch nets."""

from __future__ import annotations

from cerebro.torch.feature_plan import FeaturePlan, plan_features
from cerebro.torch.frozen_trunk import Features, features
from cerebro.torch.lightning import from_lightning
from cerebro.torch.model import Model
from cerebro.torch.skorch import from_skorch
from cerebro.torch.transformers import from_transformers

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

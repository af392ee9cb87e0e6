"""Models in PyTorch: `Model` makes a network, its loss and optimizer ready to hop."""

from __future__ import annotations

from cerebro.torch.model import Model

__all__ = ["Model"]

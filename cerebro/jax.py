"""JAX models: `Model` lets a function with its parameters and an optimizer hop between workers."""

from __future__ import annotations

from cerebro.integrations.jax.model import Model

__all__ = ["Model"]

"""Models in JAX: `Model` makes a function, its parameters and an optimizer ready to hop."""

from __future__ import annotations

from cerebro.jax.model import Model

__all__ = ["Model"]

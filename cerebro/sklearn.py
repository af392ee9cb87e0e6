"""scikit-learn models: `Model` for a search, `SearchCV` for searches in scikit-learn's style."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cerebro.integrations.sklearn.model import Model
from cerebro.integrations.sklearn.steps import SUPPORTED
from cerebro.machine.imports import import_lazily

if TYPE_CHECKING:
    from cerebro.integrations.sklearn.search_cv import SearchCV

__all__ = ["SUPPORTED", "Model", "SearchCV"]

# Workers train models without all that a search needs.
__getattr__ = import_lazily(__name__, {"SearchCV": "cerebro.integrations.sklearn.search_cv"})

"""scikit-learn models: `Model` for a search, `SearchCV` for searches in scikit-learn's style."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cerebro.sklearn.model import Model
from cerebro.sklearn.steps import SUPPORTED

if TYPE_CHECKING:
    from cerebro.sklearn.search_cv import SearchCV

__all__ = ["SUPPORTED", "Model", "SearchCV"]


def __getattr__(name: str) -> Any:
    if name == "SearchCV":
        from cerebro.sklearn.search_cv import SearchCV

        return SearchCV
    raise AttributeError(f"module 'cerebro.sklearn' has no attribute {name!r}")

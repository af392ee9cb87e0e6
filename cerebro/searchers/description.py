"""How a searcher is written down, so that it can be made again when a run is resumed.

A run keeps no code: of a searcher it records the class and the arguments that made it,
which are attributes of the same names, as in scikit-learn. What it has learnt since is
its `state_dict`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from cerebro.errors import InputError
from cerebro.guard import finding
from cerebro.searchers.base import DONE, Decision, Searcher
from cerebro.store.encoding import decode, encode


def describe(searcher: Searcher) -> dict[str, Any]:
    """Return ``class``, ``parameters`` and ``adaptive``, as JSON.

    ``parameters`` is None where they are not known: the searcher has then to be given
    again by whoever resumes the run.
    """
    kind = type(searcher)
    return {
        "class": f"{kind.__module__}:{kind.__qualname__}",
        "parameters": _parameters(searcher),
        "adaptive": bool(searcher.adaptive),
    }


def _parameters(searcher: Searcher) -> dict[str, Any] | None:
    values = {}
    for name, parameter in inspect.signature(type(searcher)).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return None
        for attribute in (name, f"_{name}"):
            if hasattr(searcher, attribute):
                values[name] = getattr(searcher, attribute)
                break
        else:
            return None
    try:
        known = decode(encode(values))
    except InputError:
        return None
    return known if known == values else None


def is_describable(description: Mapping[str, Any] | None) -> bool:
    """Whether another process can make the searcher that was described."""
    if not description:
        return False
    module, _, name = description["class"].partition(":")
    return description["parameters"] is not None and module != "__main__" and "<" not in name


def make_again(description: dict[str, Any]) -> Searcher | None:
    """Make the searcher that was described; None if that is not possible."""
    if not is_describable(description):
        return None
    module, _, name = description["class"].partition(":")
    try:
        with finding(name.partition(".")[0], target=module):
            kind: Any = importlib.import_module(module)
        for part in name.split("."):
            kind = getattr(kind, part)
        made: Searcher = kind(**description["parameters"])
        return made
    except (ImportError, AttributeError, TypeError, ValueError):
        return None


class NoSearcher:
    """Suggests nothing and lets every trial train to its end.

    In the place of a searcher that has nothing to say: where only some trials of a run go on,
    and where all have been suggested. Of what it knows nothing is recorded.
    """

    adaptive = False
    is_recorded = False
    total = 0

    def setup(self, space: Any, **arguments: Any) -> None:
        """Do nothing."""

    def suggest(self) -> Any:
        """Return `DONE`."""
        return DONE

    def report(self, trial: int, epoch: int, metrics: Any) -> Decision:
        """Return CONTINUE."""
        return Decision.CONTINUE

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Do nothing."""

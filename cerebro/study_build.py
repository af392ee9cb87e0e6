"""A ``build(trial)`` of `cerebro.optuna.optimize` as the ``build(config, info)`` of any run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from cerebro.protocol import Info
from cerebro.recipe import accepts_info


class StudyBuild:
    """What workers are given: calls `build` with a trial that suggests what was chosen.

    Each of the study's trials is `folds` trials of the run.
    """

    takes_trial = True  # on record, so that another day `build` is called in the same way

    def __init__(self, build: Callable[..., Any], folds: int = 1) -> None:
        self.build = build
        self.folds = folds
        self.__wrapped__ = build  # whose source is the run's
        names = ("config", "info")
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        )
        self.__module__ = getattr(build, "__module__", None) or "?"
        self.__qualname__ = getattr(build, "__qualname__", None) or type(build).__qualname__

    def __call__(self, config: Mapping[str, Any], info: Info) -> Any:
        from optuna.trial import FixedTrial

        trial = FixedTrial(dict(config), info.trial // self.folds)
        return self.build(trial, info) if accepts_info(self.build) else self.build(trial)

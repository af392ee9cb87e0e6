"""A ``build(trial)`` of `cerebro.optuna.optimize` as the ``build(config, info)`` of any run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from cerebro.protocol import Info
from cerebro.recipe import accepts_info
from cerebro.trial import STUDY, plain


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
        known = config.get(STUDY, {})  # of older runs nothing is
        trial = _trial_class()(plain(config), known.get("number", info.trial // self.folds))
        trial.user_attrs.update(known.get("user_attrs", {}))
        trial.system_attrs.update(known.get("system_attrs", {}))
        trial.study = StudyStandIn(known.get("study", ""), known.get("direction", "NOT_SET"))
        return self.build(trial, info) if accepts_info(self.build) else self.build(trial)


@functools.cache
def _trial_class() -> Any:
    """A trial that suggests what was chosen; Optuna is imported where there is one."""
    from optuna.trial import FixedTrial

    class StudyTrial(FixedTrial):
        study: StudyStandIn

    return StudyTrial


class StudyStandIn:
    """What a trial's ``study`` is in a worker, where the study itself is not."""

    def __init__(self, name: str, direction: str) -> None:
        from optuna.study import StudyDirection

        self.study_name = name
        self.direction = StudyDirection[direction]
        self.directions = [self.direction]

    def stop(self) -> None:
        """Do nothing: the study has heard it when `build` was called where it is."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trial.study.{name} cannot be asked for in a worker, where build is called again: "
            "only study_name, direction and stop() can. Keep what build needs with "
            "trial.set_user_attr() in define=, or read it before optimize()"
        )

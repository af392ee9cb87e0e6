"""Find out whether a model can begin with another trial's state, before the clone exists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cerebro.errors import CerebroError, one_line
from cerebro.model import BaseModel, framework_of
from cerebro.run.records import strip_study
from cerebro.worker.messages import CheckTask
from cerebro.worker.models import check_place, load_clone
from cerebro.worker.runner import UnitRunner


def find_misfits(runner: UnitRunner, task: CheckTask, model: Any) -> tuple[str, ...]:
    """Build the parent's model again; return why the clone's cannot take its state, by name."""
    of = task.clone_of
    if of is None:
        return ()
    parent = runner.build(of.trial, of.config, of.epochs, stream=of.stream).model
    names = _list_changes(of.config, strip_study(task.config))
    kinds = [[type(item).__name__ for item in _optimizers_of(each)] for each in (parent, model)]
    if kinds[0] != kinds[1]:
        before, now = (", ".join(kind) for kind in kinds)
        return (
            f"{names} makes the optimizer {now}, and the parent's is {before}, whose moments are "
            "others: clone it cold",
        )
    try:
        check_place(model, runner.context.batches, of.config, strip_study(task.config))
        if framework_of(model) != "torch":
            misfit = _compare_shapes(parent.state_dict(), model.state_dict(), names)
            if misfit or not isinstance(model, BaseModel):
                return misfit
        load_clone(model, parent.state_dict(), strip_study(task.config), rebuild=lambda _: parent)
    except CerebroError as error:
        text = str(error).replace("the configuration changes", f"{names} changes")
        return (f"{one_line(text, 500)}: clone it cold",)
    return ()


def _list_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    changed = [name for name in now if name not in before or before[name] != now[name]]
    return ", ".join(changed) or "the configuration"


def _optimizers_of(model: Any) -> list[Any]:
    optimizers = getattr(model, "_optimizers", None)
    return list(optimizers) if isinstance(optimizers, (list, tuple)) else []


def _compare_shapes(before: Any, now: Any, names: str, at: str = "") -> tuple[str, ...]:
    """Return the first array whose shape differs."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in before.keys() & now.keys():
            found = _compare_shapes(before[key], now[key], names, f"{at}{'.' if at else ''}{key}")
            if found:
                return found
        return ()
    shapes = [tuple(getattr(value, "shape", ())) for value in (before, now)]
    if not (hasattr(before, "shape") and hasattr(now, "shape")) or shapes[0] == shapes[1]:
        return ()
    sizes = ["x".join(map(str, shape)) or "a scalar" for shape in shapes]
    return (f"{names} changes {at} from {sizes[0]} to {sizes[1]}: clone it cold",)

"""The numbers that an optimizer's step takes from its settings: found, then updated.

PyTorch's optimizers compute in Python what they hand to operators: ``1 - lr * weight_decay``,
``-lr / (1 - beta1**t)``. A recorded step has these numbers as they were. They are found by
recording the optimizer once more, with other settings and another count of steps: a number that
changes must be what the optimizer's formulas give for both. Before every replay the formulas are
computed again, from the settings that hold then.

An optimizer that has no formulas here, or a number that none of them gives, means ordinary steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from cerebro.torch.cpu_recorder import Call, Program, Recording

Group = Mapping[str, Any]
Formula = Callable[[Group, float], Any]


def _of_adam(group: Group, t: float) -> dict[str, Any]:
    lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
    correction2 = 1 - beta2**t
    return {
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "1 - beta1": 1 - beta1,
        "1 - beta2": 1 - beta2,
        "weight_decay": decay,
        "1 - lr * weight_decay": 1 - lr * decay,
        "eps": group["eps"],
        "step size": -(lr / (1 - beta1**t)),
        "correction": correction2**0.5,
    }


def _of_sgd(group: Group, t: float) -> dict[str, Any]:
    return {
        "lr": group["lr"],
        "-lr": -group["lr"],
        "momentum": group["momentum"],
        "weight_decay": group["weight_decay"],
        "dampening": group["dampening"],
        "1 - dampening": 1 - group["dampening"],
    }


FORMULAS: dict[type, Callable[[Group, float], dict[str, Any]]] = {
    torch.optim.Adam: _of_adam,
    torch.optim.AdamW: _of_adam,
    torch.optim.SGD: _of_sgd,
}

COUNTED = ("step size", "correction")
"""Formulas that change with every step."""

NUMBERS = ("lr", "betas", "weight_decay", "eps", "momentum", "dampening")
"""Settings that formulas use; whether they are 0 decides which operators run."""

IGNORED = ("params", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
"""Entries of parameter groups that schedulers use and optimizers do not."""


class Unexplained(Exception):
    """An optimizer whose step cannot be repeated; the message gives the reason."""


class Hole:
    """Where a recorded call takes a number from the settings."""

    def __init__(self, group: int, formula: str, container: Any, key: Any) -> None:
        self.group = group
        self.formula = formula
        self.container = container
        self.key = key


class Numbers:
    """The settings of optimizers and their counts of steps."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._groups = [
            (group, FORMULAS.get(type(item)), item)
            for item in optimizers
            for group in item.param_groups
        ]

    def refusal(self) -> str | None:
        """Return the reason why the optimizers' steps cannot be repeated, or None."""
        for item in self._optimizers:
            kind = type(item).__name__
            if type(item) not in FORMULAS:
                return f"there are no formulas for {kind}'s numbers"
            if (
                item._optimizer_step_pre_hooks
                or item._optimizer_step_post_hooks
                or torch_optimizer._global_optimizer_pre_hooks
                or torch_optimizer._global_optimizer_post_hooks
            ):
                return f"{kind} has hooks"
            for group in item.param_groups:
                if group.get("capturable") or group.get("differentiable"):
                    return f"{kind} is capturable or differentiable"
                if any(isinstance(v, torch.Tensor) for k, v in group.items() if k != "params"):
                    return f"a setting of {kind} is a tensor"
        return None

    def settings(self) -> list[Any]:
        """Return all settings, for comparison."""
        return [
            [value for key, value in group.items() if key != "params"]
            for group, _, _ in self._groups
        ]

    def branches(self) -> Any:
        """Return the settings that decide which operators run."""
        found: list[Any] = []
        for group, _, _ in self._groups:
            for key, value in group.items():
                if key in NUMBERS:
                    found.append((key, key == "lr" or _nonzero(value)))
                elif key not in IGNORED:
                    found.append((key, value))
        return tuple(found)

    def counts(self) -> list[float]:
        """Return for each group the number of its next step."""
        found = []
        for group, _, item in self._groups:
            step = _step_of(item, group["params"])
            found.append(1.0 if step is None else float(step) + 1.0)
        return found

    def require_equal_counts(self) -> None:
        """Check that the parameters of a group have taken the same number of steps.

        Raises
        ------
        Unexplained
            If they have not.
        """
        for group, _, item in self._groups:
            steps = {
                float(item.state[p]["step"])
                for p in group["params"]
                if "step" in item.state.get(p, {})
            }
            if len(steps) > 1:
                raise Unexplained("parameters of one group have taken different numbers of steps")

    def values(self, group: int, count: float) -> dict[str, Any]:
        """Return the values of a group's formulas in the step with this number."""
        settings, formulas, _ = self._groups[group]
        assert formulas is not None
        return formulas(settings, count)

    def find(
        self, calls: Sequence[Call], counts: Sequence[float], program: Program, probe: Probe
    ) -> tuple[list[Hole], set[tuple[int, int, Any]]]:
        """Find the numbers of a recorded step that come from settings.

        Parameters
        ----------
        calls
            The recorded step's.
        counts
            Of the recorded step: see :meth:`counts`.
        program
            What is run; its arguments are where numbers will be set.
        probe
            The optimizers' calls under other settings.

        Returns
        -------
        tuple
            Where numbers are set, and the same places for :meth:`Program.differs_from`.

        Raises
        ------
        Unexplained
            If a number changes that no formula gives.
        """
        ours = [(i, call) for i, call in enumerate(calls) if call.section is not None]
        if [call.func for _, call in ours] != [call.func for call in probe.calls]:
            raise Unexplained("the optimizer calls other operators under other settings")
        now = [self.values(group, count) for group, count in enumerate(counts)]
        holes, free = [], set()
        for (index, call), changed in zip(ours, probe.calls, strict=True):
            if index not in program.containers:
                continue
            args, kwargs = program.containers[index]
            parts = ((call.args, changed.args, args), (call.kwargs, changed.kwargs, kwargs))
            for which, (here, there, into) in enumerate(parts):
                for path in _number_paths(here):
                    one, two = _at(here, path), _at(there, path)
                    if one == two:
                        continue
                    group, formula = _explained(one, two, now, probe.values, call.name)
                    container = _at(into, path[:-1])
                    holes.append(Hole(group, formula, container, path[-1]))
                    free.add((index, which, path))
        return holes, free


class Probe:
    """The optimizers' calls under settings that differ from the present ones in every number.

    The state must be put back afterwards: the optimizers step, with gradients of zeros.
    """

    def __init__(self, numbers: Numbers, stepped: Sequence[Any], recording: Recording) -> None:
        optimizers = numbers._optimizers
        for parameter in stepped:
            parameter.grad = torch.zeros_like(parameter)
        changed: list[tuple[Any, dict[str, Any]]] = []
        try:
            for place, (group, _, _) in enumerate(numbers._groups):
                changed.append((group, {key: group[key] for key in NUMBERS if key in group}))
                group.update(_altered(group, place))
            _advance(optimizers)
            counts = numbers.counts()
            self.values = [numbers.values(group, count) for group, count in enumerate(counts)]
            with recording, sections(recording, optimizers):
                for optimizer in optimizers:
                    optimizer.step()
        finally:
            for group, settings in changed:
                group.update(settings)
        self.calls = [call for call in recording.calls if call.section is not None]


@contextmanager
def sections(recording: Recording, optimizers: Sequence[Any]) -> Iterator[list[Any]]:
    """Mark an optimizer's calls in a recording; list the parameters that they update."""
    handles: list[Any] = []
    stepped: list[Any] = []

    def begin(number: int) -> Callable[..., None]:
        def hook(optimizer: Any, *_: Any) -> None:
            recording.section = number
            groups = optimizer.param_groups
            stepped.extend(p for g in groups for p in g["params"] if p.grad is not None)

        return hook

    def end(*_: Any) -> None:
        recording.section = None

    for number, optimizer in enumerate(optimizers):
        handles.append(optimizer.register_step_pre_hook(begin(number)))
        handles.append(optimizer.register_step_post_hook(end))
    try:
        yield stepped
    finally:
        recording.section = None
        for handle in handles:
            handle.remove()


def _altered(group: Group, place: int) -> dict[str, Any]:
    """Return the group's settings with distinct values; zeros stay 0."""
    found: dict[str, Any] = {}
    for index, key in enumerate(NUMBERS):
        value = group.get(key)
        shift = 1 - (0.013 + 0.0071 * index) / (1 + 0.37 * place)
        if key == "lr":
            found[key] = value * shift if value else 0.0137 * shift
        elif isinstance(value, tuple):
            found[key] = tuple(v * shift ** (1 + i) for i, v in enumerate(value))
        elif key in group and value:
            found[key] = value * shift
    return found


def _advance(optimizers: Sequence[Any]) -> None:
    """Change the number of the next step."""
    for optimizer in optimizers:
        for entries in optimizer.state.values():
            step = entries.get("step") if isinstance(entries, dict) else None
            if isinstance(step, torch.Tensor):
                step += 5


def _explained(one: Any, two: Any, now: Any, then: Any, name: str) -> tuple[int, str]:
    for group, (here, there) in enumerate(zip(now, then, strict=True)):
        for formula, value in here.items():
            if value == one and there[formula] == two:
                return group, formula
    raise Unexplained(f"no formula gives a number of {name}() in the optimizer")


def _nonzero(value: Any) -> Any:
    return tuple(map(bool, value)) if isinstance(value, tuple) else bool(value)


def _step_of(optimizer: Any, parameters: Sequence[Any]) -> Any:
    for parameter in parameters:
        entries = optimizer.state.get(parameter)
        if entries and "step" in entries:
            return entries["step"]
    return None


def _number_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path
    elif isinstance(value, (list, dict)):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from _number_paths(value[key], (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value

"""Find and update the numbers in an optimizer's step that come from its settings.

PyTorch's optimizers compute numbers in Python, such as ``-lr / (1 - beta1**t)``, and pass them to
operators. To find them in a recorded step, the optimizer is recorded once more with different
settings and a different count of steps. For every number that changes, a formula must give both
values; otherwise steps are not replayed. Before every replay, the formulas are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from cerebro.torch.cpu_recorder import Call, Recording, is_number, pair_leaves
from cerebro.torch.optimizer_step import are_different_objects, groups_of, has_hooks

Group = Mapping[str, Any]

Containers = dict[int, tuple[list[Any], dict[str, Any]]]
"""The arguments and keywords of a program's calls, by the number of the call."""


def _compute_adam_numbers(group: Group, t: float) -> dict[str, Any]:
    lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
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
        "correction": (1 - beta2**t) ** 0.5,
    }


def _compute_sgd_numbers(group: Group, t: float) -> dict[str, Any]:
    return {
        "lr": group["lr"],
        "-lr": -group["lr"],
        "momentum": group["momentum"],
        "weight_decay": group["weight_decay"],
        "dampening": group["dampening"],
        "1 - dampening": 1 - group["dampening"],
    }


FORMULAS: dict[type, Callable[[Group, float], dict[str, Any]]] = {
    torch.optim.Adam: _compute_adam_numbers,
    torch.optim.AdamW: _compute_adam_numbers,
    torch.optim.SGD: _compute_sgd_numbers,
}

COUNTED = ("step size", "correction")  # formulas whose values change with every step

NUMBERS = ("lr", "betas", "weight_decay", "eps", "momentum", "dampening")
"""Settings that formulas use. The operators that run depend on which settings are 0."""

IGNORED = (
    "params", "param_names",
    "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum",
)  # fmt: skip
"""Entries of parameter groups that only schedulers and users read, not optimizers."""

PLAIN = (type(None), bool, int, float, complex, str)
"""Types whose values can be compared."""


class Unexplained(Exception):
    """An optimizer's step cannot be repeated; the message gives the reason."""


@dataclass
class Hole:
    """A number in a recorded call that comes from an optimizer's settings."""

    group: int
    formula: str
    container: Any
    key: Any


class Numbers:
    """The settings of optimizers and their counts of steps."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.optimizers = optimizers
        self._groups: list[tuple[Any, Any]] = []  # with their optimizers
        self.settings: list[Any] = []  # equal settings stay the same object
        self.branches: Any = None  # the settings that decide which operators run
        self.take_groups()

    def take_groups(self) -> bool:
        """Store the optimizers' ``param_groups``; return whether any group was replaced."""
        before = [group for group, _ in self._groups]
        if not are_different_objects(groups_of(self.optimizers), before):
            return False
        self._groups = [(group, item) for item in self.optimizers for group in item.param_groups]
        return True

    def refusal(self) -> str | None:
        """Return the reason why the optimizers' steps cannot be repeated, or None."""
        for item in self.optimizers:
            kind = type(item).__name__
            if type(item) not in FORMULAS:
                return f"there are no formulas for {kind}'s numbers"
            if has_hooks(item):
                return f"{kind} has hooks"
            for group in item.param_groups:
                if group.get("capturable") or group.get("differentiable"):
                    return f"{kind} is capturable or differentiable"
                if any(isinstance(v, torch.Tensor) for k, v in group.items() if k != "params"):
                    return f"a setting of {kind} is a tensor"
        return None

    def take_settings(self) -> None:
        settings = [
            [
                value if type(value) in PLAIN else _make_comparable(value)
                for key, value in group.items()
                if key != "params"
            ]
            for group, _ in self._groups
        ]
        if settings == self.settings and self.branches is not None:
            return
        self.settings = settings
        values: list[Any] = []
        for group, _ in self._groups:
            for key, value in group.items():
                if key in NUMBERS:
                    values.append((key, key == "lr" or _are_nonzero(value)))
                elif key not in IGNORED:  # users may add entries of any type
                    values.append((key, repr(value)))
        self.branches = tuple(values)

    def counts(self) -> list[float]:
        """Return the number of each group's next step."""
        counts = []
        for group, item in self._groups:
            step = _find_step_count(item, group["params"])
            counts.append(1.0 if step is None else float(step) + 1.0)
        return counts

    def find_unequal_counts(self) -> str | None:
        """Return a refusal if a group's parameters have taken different numbers of steps."""
        for group, item in self._groups:
            steps = {
                float(item.state[p]["step"])
                for p in group["params"]
                if "step" in item.state.get(p, {})
            }
            if len(steps) > 1:
                return "parameters of one group have taken different numbers of steps"
        return None

    def values(self, group: int, count: float) -> dict[str, Any]:
        """Return the values of a group's formulas in step `count`."""
        settings, item = self._groups[group]
        return FORMULAS[type(item)](settings, count)

    def all_values(self, counts: Sequence[float]) -> list[dict[str, Any]]:
        return [self.values(group, count) for group, count in enumerate(counts)]

    def read_inputs(self, group: int, formula: str) -> tuple[float, float, Any]:
        """Return the inputs of a formula of `COUNTED`: rate, beta and the tensor of steps."""
        settings, item = self._groups[group]
        beta = settings["betas"][formula == "correction"]
        return float(settings["lr"]), float(beta), _find_step_count(item, settings["params"])

    def find(
        self, calls: Sequence[Call], counts: Sequence[float], containers: Containers, probe: Probe
    ) -> tuple[list[Hole], set[tuple[int, int, Any]]]:
        """Find the numbers of a recorded step's `calls` that come from settings.

        `counts` are the :meth:`counts` at the recorded step. Return the numbers' places, also in
        the form of :meth:`Program.differs_from`; raise `Unexplained` if no formula gives a number.
        """
        ours = [(i, call) for i, call in enumerate(calls) if call.section is not None]
        if [call.func for _, call in ours] != [call.func for call in probe.calls]:
            raise Unexplained("the optimizer calls different operators under different settings")
        now = self.all_values(counts)
        holes, free = [], set()
        for (index, call), changed in zip(ours, probe.calls, strict=True):
            if index not in containers:
                continue
            args, kwargs = containers[index]
            parts = ((call.args, changed.args, args), (call.kwargs, changed.kwargs, kwargs))
            for which, (here, there, into) in enumerate(parts):
                for path, before, after in pair_leaves(here, there):
                    if not is_number(before) or before == after:
                        continue
                    group, formula = _find_formula(before, after, now, probe.values, call.name)
                    container: Any = into
                    for key in path[:-1]:
                        container = container[key]
                    holes.append(Hole(group, formula, container, path[-1]))
                    free.add((index, which, path))
        return holes, free


class Probe:
    """The optimizers' calls under different settings, and the values of the formulas.

    The optimizers make a step with zero gradients; the caller must restore the state afterwards.
    """

    def __init__(self, numbers: Numbers, stepped: Sequence[Any], recording: Recording) -> None:
        optimizers, groups = numbers.optimizers, groups_of(numbers.optimizers)
        for parameter in stepped:
            parameter.grad = torch.zeros_like(parameter)
        saved = [{key: group[key] for key in NUMBERS if key in group} for group in groups]
        try:
            for place, group in enumerate(groups):
                group.update(_alter_settings(group, place))
            for entries in (entries for item in optimizers for entries in item.state.values()):
                step = entries.get("step") if isinstance(entries, dict) else None
                if isinstance(step, torch.Tensor):
                    step += 5
            self.values = numbers.all_values(numbers.counts())
            with recording, mark_sections(recording, optimizers):
                for optimizer in optimizers:
                    optimizer.step()
        finally:
            for group, settings in zip(groups, saved, strict=True):
                group.update(settings)
        self.calls = [call for call in recording.calls if call.section is not None]


@contextmanager
def mark_sections(recording: Recording, optimizers: Sequence[Any]) -> Iterator[list[Any]]:
    """Mark each optimizer's calls in a recording; yield the list of updated parameters."""
    stepped: list[Any] = []

    def begin(number: int) -> Callable[..., None]:
        def hook(optimizer: Any, *_: Any) -> None:
            recording.section = number
            groups = optimizer.param_groups
            stepped.extend(p for g in groups for p in g["params"] if p.grad is not None)

        return hook

    def end(*_: Any) -> None:
        recording.section = None

    with ExitStack() as hooks:
        hooks.callback(end)
        for number, optimizer in enumerate(optimizers):
            hooks.enter_context(optimizer.register_step_pre_hook(begin(number)))
            hooks.enter_context(optimizer.register_step_post_hook(end))
        yield stepped


def _alter_settings(group: Group, place: int) -> dict[str, Any]:
    """Return the group's settings with different values; zeros stay 0, except the rate."""
    settings: dict[str, Any] = {}
    for index, key in enumerate(NUMBERS):
        value = group.get(key)
        shift = 1 - (0.013 + 0.0071 * index) / (1 + 0.37 * place)
        if key == "lr":
            settings[key] = value * shift if value else 0.0137 * shift
        elif isinstance(value, tuple):
            settings[key] = tuple(v * shift ** (1 + i) for i, v in enumerate(value))
        elif key in group and value:
            settings[key] = value * shift
    return settings


def _find_formula(one: Any, two: Any, now: Any, then: Any, name: str) -> tuple[int, str]:
    for group, (here, there) in enumerate(zip(now, then, strict=True)):
        for formula, value in here.items():
            if value == one and there[formula] == two:
                return group, formula
    raise Unexplained(f"no formula gives a number of {name}() in the optimizer")


def _make_comparable(value: Any) -> Any:
    """Return a form of a value that ``==`` can compare."""
    if isinstance(value, (list, tuple)):
        return [_make_comparable(item) for item in value]
    return value if type(value) in PLAIN else id(value)


def _are_nonzero(value: Any) -> Any:
    return tuple(map(bool, value)) if isinstance(value, tuple) else bool(value)


def _find_step_count(optimizer: Any, parameters: Sequence[Any]) -> Any:
    states = (optimizer.state.get(parameter, {}) for parameter in parameters)
    return next((entries["step"] for entries in states if "step" in entries), None)

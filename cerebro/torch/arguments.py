"""Check the arguments of `cerebro.torch.Model`; an error names the argument and the cure."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from cerebro.errors import InputError
from cerebro.model import NO_KERAS, is_keras, named_functions
from cerebro.torch.torchmetrics import Metrics, accumulates, is_collection


def check_net(net: Any) -> None:
    if is_keras(net):
        raise InputError(f"net is a Keras {type(net).__name__}: {NO_KERAS}")
    if not isinstance(net, torch.nn.Module):
        raise InputError(f"net must be a torch.nn.Module, not {net!r}")
    for name, part in net.named_modules():
        if is_keras(part):
            raise InputError(f"net.{name} is a Keras {type(part).__name__}: {NO_KERAS}")


def split_metrics(metrics: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metrics that are functions of a batch, and those that accumulate batches."""
    named: Any = {"": metrics} if is_collection(metrics) else named_functions("metrics", metrics)
    functions = {name: f for name, f in named.items() if not accumulates(f)}
    return functions, {name: f for name, f in named.items() if accumulates(f)}


def name_epoch_metrics(metrics: Any) -> dict[str, Any]:
    return named_functions("epoch_metrics", {"": metrics} if is_collection(metrics) else metrics)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def check_optimizers(optimizer: Any, net: Any, loss: Any) -> tuple[Any, ...]:
    optimizers = _as_tuple(optimizer)
    if not optimizers:
        raise InputError("optimizer must be an optimizer or a list of them, not an empty list")
    modules = (net, loss) if isinstance(loss, torch.nn.Module) else (net,)
    ours = {id(parameter) for module in modules for parameter in module.parameters()}
    for item in optimizers:
        if is_keras(item):
            raise InputError(f"optimizer is a Keras {type(item).__name__}: {NO_KERAS}")
        if not all(hasattr(item, name) for name in ("step", "state_dict", "param_groups")):
            raise InputError(f"optimizer must be a torch.optim.Optimizer, not {item!r}")
        kind = type(item).__name__
        if isinstance(item, torch.optim.LBFGS):
            raise InputError(
                f"{kind} evaluates the loss several times per step, which needs a closure: choose "
                "an optimizer whose step() needs no closure"
            )
        if not any(id(p) in ours for group in item.param_groups for p in group["params"]):
            raise InputError(
                f"the {kind} has none of the network's parameters: make it from net.parameters()"
            )
        # Schedulers warn if they step before their optimizer object has stepped. After a hop, this
        # is normal: the trial has stepped, but not this object.
        item._opt_called = True
    return optimizers


def check_schedulers(scheduler: Any, optimizers: Sequence[Any]) -> tuple[Any, ...]:
    schedulers = () if scheduler is None else _as_tuple(scheduler)
    for item in schedulers:
        if not all(hasattr(item, name) for name in ("step", "state_dict", "load_state_dict")):
            raise InputError(f"scheduler must be a learning-rate scheduler, not {item!r}")
        its = getattr(item, "optimizer", None)
        if its is not None and not any(its is optimizer for optimizer in optimizers):
            raise InputError(
                f"the {type(item).__name__} belongs to a different optimizer than the one given: "
                "make it from the optimizer that you give"
            )
    return schedulers


def check_scheduler_step(scheduler_step: str, schedulers: Sequence[Any]) -> None:
    names = ("epoch", "batch", "metric")
    if scheduler_step not in names and not str(scheduler_step).startswith("metric:"):
        raise InputError(
            f"scheduler_step must be 'epoch', 'batch', 'metric' or 'metric:NAME', not "
            f"{scheduler_step!r}"
        )
    for scheduler in schedulers:
        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if plateau and not scheduler_step.startswith("metric"):
            raise InputError("ReduceLROnPlateau follows a metric: give scheduler_step='metric'")
        if scheduler_step == "metric" and getattr(scheduler, "mode", "min") == "max":
            raise InputError(
                "scheduler_step='metric' follows the loss, but the scheduler's mode is 'max': name "
                "the metric, such as scheduler_step='metric:accuracy'"
            )
    follows = scheduler_step.startswith("metric") and bool(schedulers)
    if follows and not any(map(needs_metric, schedulers)):
        kinds = ", ".join(type(scheduler).__name__ for scheduler in schedulers)
        raise InputError(
            f"scheduler_step={scheduler_step!r} is for schedulers that follow a metric, as "
            f"ReduceLROnPlateau does, but {kinds} takes none: give scheduler_step='epoch'"
        )


def needs_metric(scheduler: Any) -> bool:
    """Return whether a scheduler's `step` needs a metric, rather than an epoch's number."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return True
    try:
        parameters = list(inspect.signature(scheduler.step).parameters.values())
    except (TypeError, ValueError):  # not written in Python
        return False
    first = parameters[0] if parameters else None
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        return False
    return first.name == "metrics" or (first.default is first.empty and first.name != "epoch")


_asked: ContextVar[list[bool] | None] = ContextVar("cerebro_graph", default=None)


@contextmanager
def set_open_graph() -> Iterator[list[bool]]:
    """In this block, models whose `graph` is left open are built as with ``graph=True``.

    Yield a list with an entry for each of them.
    """
    asked: list[bool] = []
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def choose_graph(graph: bool | None) -> bool | None:
    asked = _asked.get()
    if graph is not None or asked is None:
        return graph
    asked.append(True)
    return True


def check_graph(graph: bool | None, amp: str | None, metrics: Metrics) -> None:
    if graph not in (None, True, False):
        raise InputError(f"graph must be None, True or False, not {graph!r}")
    if graph and amp == "fp16":
        raise InputError(
            "graph=True: amp='fp16' reads the gradients before each step: use amp='bf16'"
        )
    if graph and metrics:  # a recorded step would leave out their batches
        raise InputError(
            f"graph=True cannot count the batches of {metrics}: leave out graph, or give the "
            "metric in epoch_metrics"
        )


def check_state(state: str) -> None:
    if state not in ("all", "trainable"):
        raise InputError(f"state must be 'all' or 'trainable', not {state!r}")


def check_train_step(
    clip_norm: float | None, accumulate: int, amp: str | None, graph: bool | None
) -> None:
    """Raise InputError if a setting of updates was given, because `train_step` makes them."""
    is_given_by_name = {
        "clip_norm": clip_norm is not None,
        "accumulate": accumulate != 1,
        "amp": amp is not None,
        "graph": graph,
    }
    for name in (name for name, is_given in is_given_by_name.items() if is_given):
        raise InputError(
            f"train_step makes its own updates: leave out {name}, and do its work in train_step"
        )


def check_functions(**functions: Any) -> None:
    """Raise InputError unless the arguments, by name, can be called with tensors."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise InputError(f"{name} must be callable, not {value!r}")
        if isinstance(value, type) and issubclass(value, torch.nn.Module):
            raise InputError(f"{name} is the class {value.__name__}: give {value.__name__}()")


def make_amp(amp: str | None, device: str) -> tuple[Any, Any]:
    """Return the autocast context and the gradient scaler, each None if it is not used."""
    if amp is None:
        return None, None
    if amp not in ("bf16", "fp16"):
        raise InputError(f"amp must be None, 'bf16' or 'fp16', not {amp!r}")
    dtype = torch.bfloat16 if amp == "bf16" else torch.float16
    try:
        autocast = torch.autocast(device, dtype=dtype)
        scaler = torch.amp.GradScaler(device) if amp == "fp16" else None
    except (RuntimeError, ValueError) as error:
        raise InputError(f"amp={amp!r} is not available on {device}: {error}") from error
    return autocast, scaler

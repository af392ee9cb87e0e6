"""An optimizer's step on the CPU, with its arithmetic in the C core.

PyTorch's `Adam`, `AdamW` and `SGD` call up to a dozen operators for each parameter. The core makes
the whole step in one pass over each tensor, and rounds as those operators do
(`csrc/core/optimizer_step.c`).

The core knows only the default form: float32 tensors on the CPU without gaps, settings that are
Python numbers, no hooks, and none of the settings in `_OFF`. Each form is compared with PyTorch's
step at its first use in a process. PyTorch makes all other steps.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch.optim import adam as torch_adam
from torch.optim import optimizer as torch_optimizer
from torch.optim import sgd as torch_sgd

import cerebro._core as _core
from cerebro.torch import native_calls
from cerebro.torch.cpu_recorder import TENSORS

_WRAPPER: CodeType = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__

_NEEDS = frozenset(
    {"add", "add_number", "mul_number", "div_number", "sqrt", "lerp", "addcmul", "addcdiv"}
)
"""The core's operations that steps consist of."""

_OFF = ("amsgrad", "maximize", "foreach", "fused", "capturable", "differentiable")
"""Settings that must be false or missing."""

log = logging.getLogger("cerebro.torch")

Form = tuple[bool, bool, bool, bool, bool]
"""Whether it is SGD, has weight decay, decoupled, has momentum, and of Nesterov's kind."""


def make_step(optimizer: Any) -> None:
    """Make an optimizer's step, with the bits of ``optimizer.step()``."""
    groups = _gather_groups(optimizer)
    if groups is None or not _core.optimizer_step(groups[0]):
        optimizer.step()
        return
    torch.autograd.graph.increment_version(groups[1])
    if "step" in vars(optimizer):  # a scheduler asks whether the optimizer has stepped before it
        optimizer._opt_called = True


def groups_of(optimizers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the current parameter groups; ``Optimizer.load_state_dict`` replaces them."""
    return [group for item in optimizers for group in item.param_groups]


def are_different_objects(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Return whether two lists contain different objects, compared by identity."""
    return len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True))


# --- what the core knows ---------------------------------------------------------


def _unwrap_step(kind: type) -> Any:
    """Return a class's `step`, without the wrapper that PyTorch adds later."""
    function = vars(kind).get("step", kind.step)  # type: ignore[attr-defined]
    return function.__wrapped__ if getattr(function, "__code__", None) is _WRAPPER else function


_KINDS = {
    kind: _unwrap_step(kind) for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
}


def _list_functions() -> tuple[Any, ...]:
    """Return PyTorch's functions that make steps in the default form."""
    return (
        torch_adam.adam,
        torch_adam._single_tensor_adam,
        torch_adam._default_to_fused_or_foreach,
        torch_sgd.sgd,
        torch_sgd._single_tensor_sgd,
        torch_sgd._default_to_fused_or_foreach,
        torch.optim.Adam._init_group,
        torch.optim.SGD._init_group,
    )


_FUNCTIONS = _list_functions()


def has_hooks(optimizer: Any) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


def _is_plain(optimizer: Any) -> bool:
    """Return whether ``optimizer.step()`` runs only PyTorch's code."""
    kind = type(optimizer)
    if kind not in _KINDS or _unwrap_step(kind) is not _KINDS[kind]:
        return False
    replacement = vars(optimizer).get("step")
    if replacement is not None and not (
        getattr(replacement, "_wrapped_by_lr_sched", False) and replacement.__wrapped__ is kind.step
    ):
        return False
    return not (
        has_hooks(optimizer)
        or _list_functions() != _FUNCTIONS
        or getattr(optimizer, "grad_scale", None) is not None
        or getattr(optimizer, "found_inf", None) is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
    )


def _find_form(kind: type, group: Mapping[str, Any]) -> Form | None:
    """Return a group's form; None if only PyTorch can make its step."""
    if any(group.get(name) for name in _OFF):
        return None
    is_sgd = kind is torch.optim.SGD
    names = ("lr", "weight_decay", *(("momentum", "dampening") if is_sgd else ("eps",)))
    numbers = [*map(group.get, names), *(() if is_sgd else group["betas"])]
    if not all(type(number) is float or type(number) is int for number in numbers):
        return None
    decays = group["weight_decay"] != 0
    if is_sgd:
        return True, decays, False, group["momentum"] != 0, bool(group["nesterov"])
    return False, decays, bool(group["decoupled_weight_decay"]), False, False


def _list_settings(form: Form, group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a group's settings as `_core.optimizer_step` takes them."""
    how = native_calls.measure_rounding()
    flags = (form[2], form[4], how.fused)
    if form[0]:
        moments = (0.0, 0.0, 0.0, group["momentum"], group["dampening"])
    else:
        moments = (*group["betas"], group["eps"], 0.0, 0.0)
    return form[0], group["lr"], group["weight_decay"], *moments, flags, how.sqrt


def _gather_groups(optimizer: Any) -> tuple[tuple[Any, ...], list[Any]] | None:
    """Return groups for the core, and their parameters; None if PyTorch must make the step."""
    # Nothing is cached, because users may replace any part between two steps.
    if not _is_plain(optimizer):
        return None
    kind: Any = type(optimizer)
    groups, stepped = [], []
    for group in optimizer.param_groups:
        form = _find_form(kind, group)
        if form is None or not _has_same_bits(kind, form):
            return None
        tensors = _tensors_of(group, optimizer.state, form)
        if tensors is None:
            return None
        groups.append((_list_settings(form, group), tensors))
        stepped += [parameter for parameter in group["params"] if parameter.grad is not None]
    return tuple(groups), stepped


def _tensors_of(
    group: Mapping[str, Any], states: Mapping[Any, Any], form: Form
) -> list[int] | None:
    """Return a group's tensors as `_core.optimizer_step` takes them; None if it cannot."""
    is_sgd, _, _, momentum, _ = form
    most = native_calls.PARALLEL if torch.get_num_threads() > 1 else 1 << 62
    arguments: list[int] = []
    for parameter in group["params"]:
        gradient = parameter.grad
        if gradient is None:
            continue
        parts = [gradient]
        steps = 0
        if not is_sgd or momentum:
            state = states.get(parameter)
            if not state:
                return None  # PyTorch's own step makes it
            if is_sgd:
                parts.append(state.get("momentum_buffer"))
            elif _is_step_count(state["step"]):
                parts += (state["exp_avg"], state["exp_avg_sq"])
                steps = state["step"].data_ptr()
            else:
                return None
        if not _are_alike(parameter, parts, most):
            return None
        addresses = [part.data_ptr() for part in parts]
        absent = (0,) * (3 - len(parts))
        arguments += (parameter.numel(), parameter.data_ptr(), *addresses, *absent, steps)
    return arguments


def _are_alike(parameter: Any, parts: Sequence[Any], most: int) -> bool:
    """Return whether the core can pass over a parameter and tensors element by element."""
    shape, stride = parameter.shape, None
    if not parameter.is_contiguous():
        if not native_calls.is_dense(parameter):
            return False
        stride = parameter.stride()
    for tensor in (parameter, *parts):
        if not (
            type(tensor) in TENSORS
            and tensor.dtype is torch.float32
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and not tensor.is_neg()
            and (tensor is parameter or tensor.shape == shape)
            and (tensor.is_contiguous() if stride is None else tensor.stride() == stride)
        ):
            return False
    return bool(0 < parameter.numel() <= most)


def _is_step_count(steps: Any) -> bool:
    """Return whether a count of steps has the default form."""
    return (
        type(steps) is torch.Tensor
        and steps.dtype is torch.float32
        and steps.is_cpu
        and steps.dim() == 0
        and not steps.is_neg()
    )


# --- compared with PyTorch's -----------------------------------------------------


@functools.cache
def _has_same_bits(kind: type, form: Form) -> bool:
    if not native_calls.measure_rounding().names >= _NEEDS:
        return False
    try:
        with native_calls.use_float32():
            agrees = all(_compare_steps(kind, form, size) for size in (7, 1511))
    except Exception:  # from a setting of the user; the trial's own step may still succeed
        agrees = False
    if not agrees:
        log.info("PyTorch's %s rounds differently from the C core", kind.__name__)
    return agrees


def _compare_steps(kind: type, form: Form, size: int) -> bool:
    """Return whether six steps on example values have the same bits."""
    mine, its = (_make_example(kind, form, size) for _ in range(2))
    for number in range(6):
        for optimizer in (mine, its):
            group = optimizer.param_groups[0]
            group["lr"] = (0.01, 0.3, 1e-5)[number % 3]
            group["params"][0].grad = _make_finite_values(size, 2 * number + 3)
        its.step()
        if number == 0:  # the first step makes the state
            mine.step()
            continue
        (group,) = mine.param_groups
        tensors = _tensors_of(group, mine.state, form)
        if tensors is None or not _core.optimizer_step(((_list_settings(form, group), tensors),)):
            return False
        if not all(map(native_calls.have_same_floats, _list_tensors(mine), _list_tensors(its))):
            return False
    return True


def _make_example(kind: type, form: Form, size: int) -> Any:
    is_sgd, decays, decoupled, momentum, nesterov = form
    parameter = torch.nn.Parameter(_make_finite_values(size, 11))
    decay = 0.013 if decays else 0.0
    if is_sgd:
        dampening = 0.0 if nesterov or not momentum else 0.1
        return kind(
            [parameter], lr=0.1, weight_decay=decay, momentum=0.9 if momentum else 0.0,
            dampening=dampening, nesterov=nesterov,
        )  # fmt: skip
    optimizer = kind([parameter], lr=0.1, weight_decay=decay)
    optimizer.param_groups[0]["decoupled_weight_decay"] = decoupled
    return optimizer


def _make_finite_values(size: int, seed: int) -> Any:
    """Return example values whose squares are finite, so that no step makes NaN."""
    return native_calls.example_values(size, seed).nan_to_num().clamp_(-1e18, 1e18)


def _list_tensors(optimizer: Any) -> list[Any]:
    (parameter,) = optimizer.param_groups[0]["params"]
    state = optimizer.state.get(parameter, {})
    names = ("momentum_buffer", "exp_avg", "exp_avg_sq", "step")
    tensors = [state[name] for name in names if state.get(name) is not None]
    return [parameter.detach(), *tensors]

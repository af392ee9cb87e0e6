"""What a recorded step depends on besides its batch, its tensors and the user's promise.

With ``graph=True``, the user promises that the step's code does the same for every batch. Between
two units, something else may change: a function of PyTorch, the class of a module, a hook, a global
setting. `Surroundings` notices this.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

import cerebro._core as _core

_NAMESPACES = (
    torch, torch.nn.functional, torch.linalg, torch.special, torch.fft, torch.nn.Module,
    torch.Tensor, torch._C.TensorBase, type(torch._C._VariableFunctions), torch._C._nn,
)  # fmt: skip
"""Namespaces of functions that users call, or replace."""

_CALLABLES = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType,
    types.WrapperDescriptorType, type,
)  # fmt: skip


class Surroundings:
    """A record of what a step may depend on, between two of its units."""

    def __init__(self, modules: Sequence[Any], optimizers: Sequence[Any]) -> None:
        self._modules = modules
        self._optimizers = optimizers
        self._functions = [_functions_in(vars(space)) for space in _NAMESPACES]
        self._names = len(vars(torch.Tensor))  # a new name hides a name of the base class
        self._objects, self._values = self._collect()

    def are_unchanged(self) -> bool:
        """Return whether nothing has changed since."""
        objects, values = self._collect()
        return (
            values == self._values
            and len(objects) == len(self._objects)
            and all(map(is_, objects, self._objects))
            and self._names == len(vars(torch.Tensor))
            and all(_core.has_entries(*entries) for entries in self._functions)
        )

    def _collect(self) -> tuple[list[Any], list[Any]]:
        """Return what is compared by identity, and what is compared by value."""
        objects: list[Any] = []
        values: list[Any] = [_read_switches()]
        for part in (part for module in self._modules for part in module.modules()):
            kind, entries = type(part), vars(part)
            forward = entries.get("forward", kind.forward)
            objects += (kind, forward, getattr(forward, "__code__", None), kind.__call__)
            values.append([len(value) for key, value in entries.items() if key.endswith("_hooks")])
            values.append([(key, value) for key, value in entries.items() if _is_plain(value)])
        for module in self._modules:
            values += (
                (p.requires_grad, _count_hooks(p._backward_hooks), _count_hooks(_hooks_after(p)))
                for p in module.parameters()
            )
        for optimizer in self._optimizers:
            objects += (type(optimizer), type(optimizer).step, vars(optimizer).get("step"))
            values.append(len(optimizer._optimizer_step_pre_hooks))
            values.append(len(optimizer._optimizer_step_post_hooks))
        values += (
            len(torch_optimizer._global_optimizer_pre_hooks),
            len(torch_optimizer._global_optimizer_post_hooks),
            [len(v) for k, v in vars(torch_module).items() if _is_hook_list(k, v)],
        )
        return objects, values


def _functions_in(names: Any) -> tuple[Any, tuple[str, ...], tuple[Any, ...]]:
    """Return a namespace with the names and values of its functions and classes."""
    functions = {key: value for key, value in names.items() if isinstance(value, _CALLABLES)}
    return names, tuple(functions), tuple(functions.values())


def _read_switches() -> tuple[Any, ...]:
    """Return the settings of PyTorch that operators depend on."""
    return (
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._get_mkldnn_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),  # on the CPU, too
        torch.backends.cuda.math_sdp_enabled(),
        torch.get_float32_matmul_precision(),
    )


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a name or a tuple of these."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _is_hook_list(name: str, value: Any) -> bool:
    return name.startswith("_global_") and name.endswith("_hooks") and hasattr(value, "__len__")


def _count_hooks(hooks: Any) -> int:
    return len(hooks) if hooks else 0


def _hooks_after(parameter: Any) -> Any:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)

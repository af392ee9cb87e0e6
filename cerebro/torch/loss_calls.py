"""Which of PyTorch's losses a loss function calls, and so how outputs become probabilities.

The function is called with example outputs and targets, and watched. Comparing its values with
those of known losses is not enough: it may clamp the outputs or renumber the classes without
changing the values on the examples.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cerebro.data.manifest import Column

_ACTIVATIONS: dict[Any, str] = {
    functional.cross_entropy: "softmax",
    functional.nll_loss: "exp",
    functional.binary_cross_entropy_with_logits: "sigmoid",
    functional.binary_cross_entropy: "none",
}
"""What makes probabilities of the outputs on which a loss is computed."""
_BEFORE = {("log_softmax", "exp"): "softmax", ("sigmoid", "none"): "sigmoid"}
"""The same, if a function was applied to the outputs before the loss."""


def find_activation(loss: Callable[..., Any], shape: tuple[int, ...], column: Column) -> str | None:
    """Return what makes probabilities of outputs with rows of `shape`; None: not known.

    It is known if the loss calls one of PyTorch's losses, once, with the outputs as they are and
    the target, which may change in type and form only. `column` is the target.
    """
    names = len(column.classes or ())
    width = shape[0] if shape else 1
    is_map = bool(column.shape) and shape[1:] == column.shape  # a class for each pixel or token
    if column.shape:
        count = width if is_map else 2
    elif width > 1:
        count = width
    else:
        count = names or 3  # with 3 numbers, `target > 0.5` is not the target
    rows = 2 * max(4, count)
    numbers = torch.arange(rows * math.prod(column.shape)) % count
    target = numbers.reshape(rows, *column.shape).to(getattr(torch, column.dtype))
    for low, high in ((-8.0, 8.0), (0.1, 0.9)):  # the latter for losses of probabilities
        size = rows * math.prod(shape)
        outputs = torch.linspace(low, high, size).reshape(rows, *shape)
        calls = _LossCalls(outputs, target)
        with contextlib.suppress(Exception), torch.no_grad(), calls:
            loss(outputs, target)  # may fail after the call that tells, for want of real values
        if calls.found:
            break
    found = calls.found[0] if len(calls.found) == 1 and calls.kept_outputs else None
    if found in ("softmax", "exp"):
        return found if names in (0, width) else None
    return found if names <= 2 or column.shape else None  # else, one class against others


class _LossCalls(TorchFunctionMode):  # type: ignore[misc]
    """Notes the activation of each of PyTorch's losses that is called; None: of other numbers."""

    def __init__(self, outputs: Any, target: Any) -> None:
        super().__init__()
        self.found: list[str | None] = []
        self._outputs, self._before, self._target = outputs, outputs.clone(), target
        self._made: list[tuple[str, Any]] = []  # of the outputs, by functions of `_BEFORE`

    @property
    def kept_outputs(self) -> bool:
        """Whether the outputs were not changed in place."""
        return bool(torch.equal(self._outputs, self._before))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = dict(zip(("input", "target"), args, strict=False)) | (kwargs or {})
        activation = _ACTIVATIONS.get(func)
        if activation is not None:
            source, by_class = named["input"], activation in ("softmax", "exp")
            given = [
                _BEFORE[name, activation]
                for name, made in self._made
                if (name, activation) in _BEFORE and _is_view(source, made, same_shape=by_class)
            ]
            if _is_view(source, self._outputs, same_shape=by_class):
                given = [activation]
            is_known = bool(given) and self._is_target(named["target"])
            self.found.append(given[0] if is_known else None)
        result = func(*args, **(kwargs or {}))
        if func.__name__ in ("log_softmax", "sigmoid"):
            self._note(func.__name__, result, *args, **(kwargs or {}))
        return result

    def _note(
        self, name: str, result: Any, input: Any, dim: int | None = None, *more: Any, **options: Any
    ) -> None:
        by_class = name == "log_softmax"
        if by_class and dim not in (1, 1 - self._outputs.ndim):
            return
        if _is_view(input, self._outputs, same_shape=by_class):
            self._made.append((name, result))

    def _is_target(self, tensor: Any) -> bool:
        """Return whether this is the target, or the numbers of its labels in one-hot form."""
        target = self._target
        if tensor.numel() != target.numel() and target.ndim == 2:
            target = target.argmax(1)
        return bool(torch.equal(tensor.reshape(-1).double(), target.reshape(-1).double()))


def _is_view(tensor: Any, base: Any, *, same_shape: bool) -> bool:
    """Return whether these are the elements of `base` themselves, all of them."""
    return (
        tensor.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        and tensor.numel() == base.numel()
        and (not same_shape or tensor.shape == base.shape)
    )

"""Observe which PyTorch functions a model calls, with which tensors, and from which lines.

A `TorchFunctionMode` records the calls of loss functions, dropout and batch norm, and operations
that combine a column of targets with outputs of a different shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cerebro.machine.imports import find_calling_line

LOSSES = {
    "cross_entropy", "nll_loss", "kl_div",
    "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
}  # fmt: skip
DROPOUTS = {
    "dropout", "dropout1d", "dropout2d", "dropout3d",
    "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
}  # fmt: skip
LAYERS = {"linear", "conv1d", "conv2d", "conv3d"}
PAIRED = {
    "sub", "rsub", "add", "mul", "div", "true_divide", "eq", "ne",
    "__sub__", "__rsub__", "__add__", "__radd__", "__mul__", "__rmul__", "__eq__", "__ne__",
}  # fmt: skip
"""Operations that combine the output of a row with the target of the row."""
SAME_VALUES = {
    "float", "double", "half", "bfloat16", "long", "int", "to", "type", "type_as", "bool",
    "view", "view_as", "reshape", "squeeze", "unsqueeze", "flatten", "ravel",
    "detach", "clone", "contiguous", "__getitem__",
}  # fmt: skip
"""Operations whose result has the same values as their first argument."""


@dataclass
class LossCall:
    """A call of a loss function of `torch.nn.functional`."""

    name: str
    input: Any
    target: Any
    column: str  # the name of the column in `target`; empty if the target was computed
    ignored: int  # the label that cross entropy ignores
    result: Any
    place: str


@dataclass
class Mode:
    """A call of dropout or batch norm, with its own and its network's training mode."""

    kind: str
    trains: bool
    net_trains: bool
    place: str


@dataclass
class Broadcast:
    """An operation on tensors of shapes `(n, 1)` and `(n,)`, whose result has shape `(n, n)`."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    place: str


class Calls(TorchFunctionMode):  # type: ignore[misc]
    """The calls in a block; `targets` are the batch's tensors of targets by column."""

    def __init__(self, nets: Sequence[Any], targets: Mapping[str, Any]) -> None:
        super().__init__()
        self.losses: list[LossCall] = []
        self.modes: list[Mode] = []
        self.broadcasts: list[Broadcast] = []
        self.first_input: Any = None  # of the first linear or convolutional layer
        self._nets = nets
        # Keep the tensors alive, so that their ids stay unique.
        self._targets = {id(tensor): (name, tensor) for name, tensor in targets.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        name = getattr(func, "__name__", "")
        if name in LOSSES:
            self._note_loss(name, args, options, result)
        elif name in DROPOUTS or name == "scaled_dot_product_attention":
            self._note_dropout(name, args, options)
        elif name == "batch_norm":
            if _get_argument(args, options, 1, "running_mean") is not None:
                trains = bool(_get_argument(args, options, 5, "training", False))
                self._note_mode("batch norm", trains)
        elif name in PAIRED:
            self._note_pair(args)
        elif name in SAME_VALUES:
            entry = self._targets.get(id(args[0])) if args else None
            if entry is not None and isinstance(result, torch.Tensor):
                self._targets[id(result)] = (entry[0], result)
        elif name in LAYERS and self.first_input is None and args:
            self.first_input = args[0].detach()
        return result

    def _find_column(self, tensor: Any) -> str | None:
        entry = self._targets.get(id(tensor))
        return None if entry is None else entry[0]

    def _note_loss(
        self, name: str, args: tuple[Any, ...], options: Mapping[str, Any], result: Any
    ) -> None:
        output = _get_argument(args, options, 0, "input")
        target = _get_argument(args, options, 1, "target")
        if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
            return
        ignored = int(options.get("ignore_index", -100))
        column, place = self._find_column(target) or "", find_calling_line()
        self.losses.append(LossCall(name, output, target, column, ignored, result, place))
        if name.endswith(("mse_loss", "l1_loss", "huber_loss")) and _is_spread(output, target):
            self.broadcasts.append(Broadcast((_shape(output), _shape(target)), place))

    def _note_dropout(self, name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        if name == "scaled_dot_product_attention":
            if _get_argument(args, options, 4, "dropout_p", 0.0):
                self._note_mode("dropout", True)
        elif _get_argument(args, options, 1, "p", 0.5):
            self._note_mode("dropout", bool(_get_argument(args, options, 2, "training", True)))

    def _note_mode(self, kind: str, trains: bool) -> None:
        net_trains = any(net.training for net in self._nets)
        self.modes.append(Mode(kind, trains, net_trains, find_calling_line()))

    def _note_pair(self, args: tuple[Any, ...]) -> None:
        if len(args) < 2 or not all(isinstance(value, torch.Tensor) for value in args[:2]):
            return
        left, right = args[:2]
        are_targets = [self._find_column(side) is not None for side in (left, right)]
        if sum(are_targets) != 1 or not _is_spread(left, right):
            return
        target, other = (left, right) if are_targets[0] else (right, left)
        # Without a gradient, the row may be the class numbers of a one-hot encoding.
        if other.requires_grad or target.ndim == 1:
            self.broadcasts.append(Broadcast((_shape(left), _shape(right)), find_calling_line()))


def is_scripted(net: Any) -> bool:
    """Return whether a network has parts whose calls cannot be observed."""
    return any(isinstance(part, torch.jit.ScriptModule) for part in net.modules())


def _get_argument(
    args: tuple[Any, ...], options: Mapping[str, Any], place: int, name: str, default: Any = None
) -> Any:
    return args[place] if len(args) > place else options.get(name, default)


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _is_spread(left: Any, right: Any) -> bool:
    """Return whether two tensors have the shapes `(n, 1)` and `(n,)`, in any order, n >= 2."""
    shapes = sorted((_shape(left), _shape(right)), key=len)
    rows = len(left) if left.ndim else 0
    return rows >= 2 and shapes == [(rows,), (rows, 1)]

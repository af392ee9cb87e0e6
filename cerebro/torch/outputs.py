"""What all PyTorch models have in common, and their outputs, which may be nested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cerebro.model import BaseModel, is_joinable
from cerebro.torch.parameter_order import in_fixed_order, in_own_order
from cerebro.torch.state import load_clone

if TYPE_CHECKING:
    from cerebro.torch.network import Network


class TorchModel(BaseModel):
    """A network of PyTorch's with its optimizers and schedulers."""

    framework = "torch"
    loads_in_place = True
    _network: Network
    _optimizers: Sequence[Any]
    _schedulers: Sequence[Any]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def load_clone(self, state: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Continue from another trial's state with this trial's hyperparameters.

        Weights, moments and the scheduler's position come from the parent. The settings of
        parameter groups (learning rate, weight decay, ...) and of torch's schedulers (base learning
        rates, decay, milestones, ...) stay as `build` made them from `config`; schedulers that are
        not torch's keep only their base learning rates. If a scheduler has changed the parent's
        learning rate, this trial's learning rate is scaled by the same factor until its own
        scheduler steps.
        """
        state = in_own_order(state, self._optimizers, self._schedulers, self._network.names)
        load_clone(self.load_state_dict, self._optimizers, self._schedulers, state)

    def in_fixed_order(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state of this model in an order that is the same in every process."""
        return in_fixed_order(state, self._optimizers, self._schedulers)

    def _as_array(self, column: Any) -> Any:
        return torch.as_tensor(column)

    def _floats(self, values: list[Any]) -> list[float]:
        """Convert numbers and 0-d tensors to floats; copy tensors on a device in one transfer."""
        if values and all(isinstance(value, torch.Tensor) and value.is_cuda for value in values):
            return torch.stack([value.double() for value in values]).tolist()  # type: ignore[no-any-return]
        return [float(value) for value in values]

    def _to_host(self, output: Any) -> Any:
        return copy_to_host(output)

    def _join(self, parts: list[Any]) -> Any:
        return join_outputs(parts)


def copy_to_host(output: Any) -> Any:
    """Return a network's output in host memory, with the same structure."""
    if isinstance(output, torch.Tensor):
        return output.cpu()
    if isinstance(output, Mapping):
        return {key: copy_to_host(value) for key, value in output.items()}
    if isinstance(output, (list, tuple)):
        return tuple(copy_to_host(value) for value in output)
    return output


def join_outputs(parts: list[Any]) -> Any:
    """Join the batches' outputs along their rows; return a list if they do not fit."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts) if is_joinable(parts) else parts
    if isinstance(first, Mapping):
        return {key: join_outputs([part[key] for part in parts]) for key in first}
    if isinstance(first, (list, tuple)):
        return tuple(join_outputs([part[i] for part in parts]) for i in range(len(first)))
    return parts


def detach_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(detach_value(item) for item in value)
    return value.detach() if isinstance(value, torch.Tensor) else value


def to_float32(outputs: Any) -> Any:
    """Return outputs with 16-bit floats converted to float32, and others unchanged."""
    if isinstance(outputs, torch.Tensor):
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
    if isinstance(outputs, Mapping):
        return {key: to_float32(value) for key, value in outputs.items()}
    if isinstance(outputs, (list, tuple)):
        return type(outputs)([to_float32(value) for value in outputs])
    return outputs

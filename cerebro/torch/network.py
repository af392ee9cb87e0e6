"""A model's network: its parameters by name, its modes, its device, and its part of a state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from cerebro.data.depots import move_batch
from cerebro.errors import InputError
from cerebro.model import Batch, Part
from cerebro.torch.optimizer_step import groups_of
from cerebro.torch.parameter_order import ParameterNames
from cerebro.torch.state import frozen_names, gradients_of, load_gradients, load_net


class Network(Part):
    """A network as `build` made it, with a loss that is a module, and what training adds to it.

    With `is_partial`, states leave out parameters that do not require gradients.
    """

    def __init__(self, net: Any, loss: Any, optimizers: Sequence[Any], *, is_partial: bool) -> None:
        self.net, self._loss = net, loss
        self._optimizers = optimizers
        self._parameters = self._list_parameters()
        self.device = self._parameters[0].device
        self.names = ParameterNames(net, loss)
        self._built_with = len(self._parameters)
        self._grown: list[Any] = []  # parameters of layers that were added in training
        self._is_partial = is_partial
        # The size of the state tells how much memory a model uses, but these are not in the state.
        frozen = [*net.buffers(), *(p for p in net.parameters() if not p.requires_grad)]
        self.frozen_bytes: int = sum(t.nbytes for t in frozen) if is_partial else 0
        parts = net.modules() if net.training else ()
        self._keep_evaluating = [part for part in parts if not part.training]
        self._trained_as_built: list[tuple[str, Any, bool]] = []  # known after build

    @property
    def parts(self) -> list[Any]:
        """The modules with tensors that a training step may change."""
        return [self.net, self._loss] if isinstance(self._loss, torch.nn.Module) else [self.net]

    @property
    def parameters(self) -> list[Any]:
        """The network's parameters in order, then others of the optimizers: always one list."""
        return self._parameters

    def _list_parameters(self) -> list[Any]:
        theirs = (p for group in groups_of(self._optimizers) for p in group["params"])
        everything = (*self.net.parameters(), *theirs)
        return list({id(parameter): parameter for parameter in everything}.values())

    def note_flags(self) -> None:
        """Note which parameters `build` has frozen."""
        self._trained_as_built = [(n, p, p.requires_grad) for n, p in self.net.named_parameters()]

    def add_new_parameters(self) -> bool:
        """Note the parameters of layers that were added in training, in order of their names.

        Return whether there are any.
        """
        ids = {id(parameter) for parameter in self._parameters}
        new = [item for item in self._list_parameters() if id(item) not in ids]
        if new:
            self._grown = sorted(
                [*self._grown, *new], key=lambda item: self.names.name_of(item) or ""
            )
            self._parameters[self._built_with :] = self._grown
        return bool(new)

    def place_batch(self, batch: Batch) -> Batch:
        """Return a batch on the network's GPU, if it has one."""
        if self.device.type != "cuda":
            return batch
        away = (isinstance(v, torch.Tensor) and not v.is_cuda for v in batch.values())
        return move_batch(batch, self.device) if any(away) else batch

    def set_training_mode(self) -> None:
        self.net.train()
        for part in self._keep_evaluating:
            part.training = False

    def clip_gradients(self, norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(self._parameters, norm)

    def drop_gradients(self) -> None:
        # Include parameters without an optimizer: their gradients would accumulate, count in
        # clip_norm, and be lost in a hop.
        for parameter in self._parameters:
            parameter.grad = None

    # --- state ----------------------------------------------------------------

    def weights(self) -> dict[str, Any]:
        """Return the parts ``net`` and ``partial`` of a state."""
        net = dict(self.net.state_dict())
        if not self._is_partial:
            return {"net": net}
        for name in frozen_names(self.net):
            net.pop(name, None)
        return {"net": net, "partial": True}  # for code that reads states without the model

    def weights_of_loss(self) -> dict[str, Any]:
        """Return the part ``loss`` of a state, if the loss has tensors."""
        loss = {k: v for part in self.parts[1:] for k, v in part.state_dict().items()}
        return {"loss": loss} if loss else {}

    def changed_flags(self) -> dict[str, Any]:
        """Return the part ``requires_grad`` of a state, if a flag differs from that after build."""
        now = {n: p.requires_grad for n, p, built in self._trained_as_built
               if p.requires_grad != built}  # fmt: skip
        return {"requires_grad": now} if now else {}

    def gradients(self) -> dict[str, Any]:
        return gradients_of(self._parameters, self.names)

    def load_weights(self, state: Mapping[str, Any]) -> None:
        """Load ``requires_grad`` and ``net``, and drop all gradients."""
        self.drop_gradients()
        changed = state.get("requires_grad", {})
        for name, parameter, built in self._trained_as_built:
            is_trained = changed.get(name, built)
            if parameter.requires_grad != is_trained:
                parameter.requires_grad = is_trained
        load_net(self.net, state["net"], partial=self._is_partial)

    def load_rest(self, state: Mapping[str, Any]) -> None:
        """Load ``loss`` and ``gradients``."""
        if "loss" in state:
            load_net(self.parts[-1], state["loss"], partial=False)
        load_gradients(self._parameters, state.get("gradients", {}), self.names)


def place(net: Any, optimizers: Sequence[Any], others: Iterable[Any], device: str | None) -> None:
    """Move modules and optimizers' states from host memory to a device, in place.

    A network that `build` has already placed stays where it is. Raise InputError if moving the
    network replaces its parameters.
    """
    if device is None or torch.device(device).type == "cpu":
        return
    parameters = list(net.parameters())
    if any(parameter.device.type != "cpu" for parameter in parameters):
        return
    net.to(device)
    for other in others:
        if isinstance(other, torch.nn.Module):
            other.to(device)
    if any(a is not b for a, b in zip(parameters, net.parameters(), strict=True)):
        raise InputError(
            f"the network's parameters on {device} are not those the optimizer was made from: move "
            "it in build, net.to(info.device), before making its optimizer"
        )
    for optimizer in optimizers:  # some have a state already, such as Adagrad's sums
        for group in optimizer.param_groups:
            on_device = group.get("capturable") or group.get("fused")
            for parameter in group["params"]:
                entries = optimizer.state.get(parameter, {})
                for key, value in entries.items():
                    if isinstance(value, torch.Tensor) and (key != "step" or on_device):
                        entries[key] = value.to(parameter.device)


def is_channels_last(weight: Any) -> bool:
    return (
        weight.dim() == 4
        and not weight.is_contiguous()
        and weight.is_contiguous(memory_format=torch.channels_last)
    )

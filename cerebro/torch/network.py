"""What all PyTorch models have in common: their network, its part of a state, and its outputs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from cerebro.data.depots import move_batch
from cerebro.errors import InputError
from cerebro.model import BaseModel, Batch, Part, is_joinable
from cerebro.torch.clone import (
    RebuildParent,
    advance_new,
    check_optimizers,
    check_shapes,
    keep_own_buffers,
    position_of,
)
from cerebro.torch.frozen import (
    FrozenTensor,
    FrozenWeights,
    address_of,
    find_shared,
    find_whole,
    is_handed_out,
    make_own,
)
from cerebro.torch.optimizer_step import groups_of
from cerebro.torch.parameter_order import ParameterNames, in_fixed_order, in_own_order, split_state
from cerebro.torch.state import (
    advance_state,
    apply_settings,
    copy_settings,
    load_net,
    load_scheduler,
    restore_settings,
    to_plain,
)


class Network(Part):
    """A network as `build` made it, with a loss that is a module, and what training adds to it.

    With `is_partial`, states leave out parameters that do not require gradients.
    """

    def __init__(self, net: Any, loss: Any, optimizers: Sequence[Any], *, is_partial: bool) -> None:
        self.net, self._loss = net, loss
        self._optimizers = optimizers
        self._parameters = self._list_parameters()
        self.device = self._parameters[0].device
        self._is_on_gpu = self.device.type == "cuda"
        self.names = ParameterNames(net, loss)
        self._built_with = len(self._parameters)  # those of layers added in training follow these
        self._is_partial = is_partial
        self._left_out: dict[str, tuple[Any, FrozenTensor | None]] = {}
        """The parameters that states leave out, frozen since they were built, and what is shared"""
        self._find_left_out()
        self._frozen_bytes = self._count_frozen_bytes()
        parts = net.modules() if net.training else ()
        self._keep_evaluating = [part for part in parts if not part.training]
        self._trained_as_built: list[tuple[str, Any, bool]] = []  # known after build

    @property
    def frozen_bytes(self) -> int:
        """The bytes that only this network uses and that the state leaves out, and buffers."""
        shared = [item for _, item in self._left_out.values() if item is not None]
        alone = (item.tensor for item in shared if len(item.users) == 1)
        return self._frozen_bytes + sum(int(tensor.nbytes) for tensor in alone)

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

    def share_frozen(self, info: Any) -> None:
        """Share the frozen parameters that states leave out, and nothing else, with other models.

        `info` is the trial's; if its models share nothing, this model has all tensors to itself.
        """
        weights: FrozenWeights | None
        weights = getattr(getattr(info, "sharing", None), "weights", None)
        self._find_left_out()
        ids = {id(parameter) for parameter, _ in self._left_out.values()}
        others = [p for part in self.parts for p in (*part.parameters(), *part.buffers())]
        others = [tensor for tensor in others if id(tensor) not in ids]
        for tensor in others:
            if is_handed_out(tensor):
                make_own(tensor)
        moving = {address_of(tensor) for tensor in others}
        # On a GPU, the weights of a recurrent layer are views of one tensor that the layer has.
        layers = self.net.modules() if self._is_on_gpu else ()
        moving |= {
            address_of(p)
            for layer in layers
            if isinstance(layer, torch.nn.RNNBase)
            for p in layer.parameters()
        }
        for name, (parameter, _) in self._left_out.items():
            if weights is not None and address_of(parameter) not in moving:
                shared = weights.share(parameter, name)
                if shared is not None:
                    self._left_out[name] = parameter, shared
                    shared.users.add(self)
        self._frozen_bytes = self._count_frozen_bytes()

    def _find_left_out(self) -> None:
        named = self.net.named_parameters() if self._is_partial else ()
        self._left_out = {name: (p, None) for name, p in named if not p.requires_grad}

    def own_trained(self, loaded: Collection[str] = ()) -> bool:
        """Note frozen parameters that are unfrozen or `loaded`; return whether there are any.

        From now on they are the model's own, and part of its states even if they are frozen again.
        """
        gone = [n for n, (p, _) in self._left_out.items() if p.requires_grad or n in loaded]
        for name in gone:
            parameter, shared = self._left_out.pop(name)
            if shared is not None:
                shared.users.discard(self)
                if find_shared(parameter) is not None:
                    make_own(parameter)
        if gone:
            self._frozen_bytes = self._count_frozen_bytes()
        return bool(gone)

    def _count_frozen_bytes(self) -> int:
        """Return the bytes of buffers, and of frozen parameters that are not shared."""
        if not self._is_partial:
            return 0
        frozen = (p for p, shared in self._left_out.values() if shared is None)
        return sum(tensor.nbytes for tensor in (*self.net.buffers(), *frozen))

    def add_new_parameters(self) -> bool:
        """Note new parameters in the order of their names; return whether there are any."""
        ids = {id(parameter) for parameter in self._parameters}
        new = [item for item in self._list_parameters() if id(item) not in ids]
        if new:
            grown = [*self._parameters[self._built_with :], *new]
            grown.sort(key=lambda parameter: self.names.name_of(parameter) or "")
            self._parameters[self._built_with :] = grown
        return bool(new)

    def place_batch(self, batch: Batch) -> Batch:
        """Return a batch on the network's GPU, if it has one."""
        if not self._is_on_gpu:
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
        self.own_trained()
        net = dict(self.net.state_dict())
        if not self._is_partial:
            return {"net": net}
        ids = {id(parameter) for parameter, _ in self._left_out.values()}
        for name, parameter in self.net.named_parameters(remove_duplicate=False):
            if id(parameter) in ids:
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
        return {name: item.grad for name, item in self._name_parameters() if item.grad is not None}

    def load_weights(self, state: Mapping[str, Any]) -> None:
        """Load ``requires_grad`` and ``net``, and drop all gradients."""
        self.drop_gradients()
        changed = state.get("requires_grad", {})
        for name, parameter, built in self._trained_as_built:
            parameter.requires_grad = changed.get(name, built)
        self.own_trained(state["net"])
        load_net(self.net, state["net"], partial=self._is_partial)

    def load_rest(self, state: Mapping[str, Any]) -> None:
        """Load ``loss`` and copies of ``gradients``; parameters without one there lose theirs."""
        if "loss" in state:
            load_net(self.parts[-1], state["loss"], partial=False)
        gradients = state.get("gradients", {})
        for name, parameter in self._name_parameters():
            value = gradients.get(name)
            parameter.grad = (
                None if value is None else torch.as_tensor(value).to(parameter.device, copy=True)
            )

    def _name_parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield the parameters with their names; those without a name are numbered."""
        numbers = itertools.count()
        for parameter in self._parameters:
            yield self.names.name_of(parameter) or f"#{next(numbers)}", parameter


class TorchModel(BaseModel):
    """A network of PyTorch's with its optimizers and schedulers."""

    framework = "torch"
    loads_in_place = True
    _network: Network
    _optimizers: Sequence[Any]
    _schedulers: Sequence[Any]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def load_clone(
        self,
        state: Mapping[str, Any],
        config: Mapping[str, Any],
        *,
        epoch: int | None = None,
        rebuild: RebuildParent | None = None,
    ) -> None:
        """Continue from another trial's state with this trial's hyperparameters.

        Weights, moments and the scheduler's position come from the parent. The settings of
        parameter groups (learning rate, weight decay, ...) and of torch's schedulers (base learning
        rates, decay, milestones, ...) stay as `build` made them from `config`; schedulers that are
        not torch's keep only their base learning rates. If a scheduler has changed the parent's
        learning rate, this trial's learning rate is scaled by the same factor until its own
        scheduler steps. With another batch size, schedulers that step after each batch begin
        where their own first `epoch` epochs would have brought them.

        Buffers of the network and the loss that the parent's training has not changed, such as
        class weights, are settings, too. `rebuild` tells: it builds the parent's configuration
        again, with the parent's seed or, if called with True, this trial's.

        Raises
        ------
        StateError
            The parent has another optimizer, or tensors of other names or shapes.
        """
        parts = {"net": self._network.parts[0], "loss": self._network.parts[-1]}
        if len(self._network.parts) == 1:
            del parts["loss"]
        check_optimizers(self._optimizers, state, rebuild)
        state = keep_own_buffers(parts, state, rebuild)
        check_shapes(parts, state)
        state = in_own_order(state, self._optimizers, self._schedulers, self._network.names)
        pairs = split_state(self._schedulers, state.get("scheduler", {}))
        steps = None if epoch is None else self._count_scheduler_steps(epoch)
        if steps is None or all(position_of(part) in (None, steps) for _, part in pairs):
            advanced = [advance_state(scheduler, part) for scheduler, part in pairs]
            apply = apply_settings
        else:
            advance_new(self._schedulers, steps)
            advanced = [to_plain(scheduler.state_dict()) for scheduler in self._schedulers]
            apply = restore_settings
        own_settings = [copy_settings(optimizer) for optimizer in self._optimizers]
        self.load_state_dict(state)
        for optimizer, settings in zip(self._optimizers, own_settings, strict=True):
            apply(optimizer, settings)
        for scheduler, part in zip(self._schedulers, advanced, strict=True):
            load_scheduler(scheduler, part)

    def _count_scheduler_steps(self, epochs: int) -> int | None:
        """Return the steps of the schedulers in a trial's first epochs; None if not by batch."""
        return None

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
        if isinstance(output, torch.Tensor):
            return output.cpu()
        if isinstance(output, Mapping):
            return {key: self._to_host(value) for key, value in output.items()}
        if isinstance(output, (list, tuple)):
            return tuple(map(self._to_host, output))
        return output

    def _join(self, parts: list[Any]) -> Any:
        return join_outputs(parts)


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


def to_float32(outputs: Any) -> Any:
    """Return outputs with 16-bit floats converted to float32, and others unchanged."""
    if isinstance(outputs, torch.Tensor):
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
    if isinstance(outputs, Mapping):
        return {key: to_float32(value) for key, value in outputs.items()}
    if isinstance(outputs, (list, tuple)):
        return type(outputs)([to_float32(value) for value in outputs])
    return outputs


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
    for parameter in parameters:
        shared = find_whole(parameter)
        if shared is not None and not parameter.requires_grad:
            shared.weights.move(parameter, shared, torch.device(device))
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

"""Models in PyTorch: an ordinary network, optimizer and loss, made ready to hop.

:class:`Model` trains exactly as the usual loop does::

    for batch in batches:
        loss = loss_function(net(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

bit for bit. It adds what a model needs to move between workers: a state with everything that
further training depends on.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cerebro.arguments import TORCH_MODEL, answers, real_number, whole_number
from cerebro.data.moved import moved
from cerebro.errors import InputError, StateError
from cerebro.machine.devices import build_device
from cerebro.model import (
    NO_KERAS,
    BaseModel,
    Batch,
    Columns,
    check_batch,
    check_metrics,
    column_names,
    is_joinable,
    is_keras,
    loss_of,
    make_getter,
    named_functions,
)
from cerebro.torch.graph import CudaRecorder, GraphedStep, Recorder, make_capturable
from cerebro.torch.place import place
from cerebro.torch.recorded_step import RecordedStep
from cerebro.torch.state import (
    advanced_state,
    apply_settings,
    frozen_names,
    group_settings,
    load_net,
    load_optimizer,
    load_scheduler,
    optimizer_state,
    scheduler_state,
)

# Values by metric, loss with its graph (or None), output, target.
_Objective = Callable[[Batch], tuple[dict[str, Any], Any, Any, Any]]


class Model(BaseModel):
    """A network with its optimizer, loss and schedule.

    Parameters
    ----------
    net
        A `torch.nn.Module`. If it is in host memory and the trial trains on a GPU, it is moved
        there, together with any loss and metrics that are modules.
    optimizer
        A `torch.optim.Optimizer` over parameters of `net`, or a list of optimizers, which step one
        after the other. Optimizers that need a closure (LBFGS) are not supported.
    loss
        ``loss(output, target) -> 0-d tensor``, the mean over the batch's rows. None: the network's
        output has it, as ``output.loss`` or ``output["loss"]``. If it is a module, its parameters
        and buffers are part of the state.
    metrics
        ``metric(output, target)`` by name: a float, a 0-d tensor (a mean over the rows) or
        ``(mean, weight)``. Computed without gradients on every training and validation batch, in
        training on the outputs before the update. Functions of ``torchmetrics.functional`` work; a
        ``torchmetrics.Metric`` keeps a state and belongs in `epoch_metrics`.
    epoch_metrics
        ``metric(outputs, targets)`` by name, for metrics that are not means over batches (AUC,
        F1): computed once per validation pass on all outputs and targets, which are kept for it.
        With `amp` the outputs are float32.
    inputs
        The network's inputs: a column, a list of columns (positional) or a mapping of keywords to
        columns.
    target
        The target of loss and metrics: a column (for an autoencoder the column of `inputs`), a
        list (a tuple of tensors), a mapping (a dict of tensors), or None: loss and metrics are
        called with the output alone.
    step
        ``step(net, batch) -> {"loss": ..., metric: ...}`` replaces `inputs`,
        `target`, `loss` and `metrics`, in training and in validation.
    augment
        ``augment(batch) -> batch``, applied in training only. Random numbers from the global
        generators of `random`, NumPy and torch are exactly repeatable.
    scheduler
        A learning-rate scheduler (or a list) over `optimizer`.
    scheduler_step
        When the scheduler steps: "batch", after every training batch (even inside a window of
        `accumulate`); "epoch", at the end of every epoch; "metric", at the end of every epoch with
        the validation loss (without validation, the training loss), as for `ReduceLROnPlateau`;
        "metric:NAME" with a different metric.
    clip_norm
        Gradients are clipped to this norm before every update.
    accumulate
        Batches per update. Each loss is divided by it, as in plain loops. The last window of a
        unit ends with the unit; if it is shorter, its step is smaller.
    amp
        "bf16" or "fp16": forward pass and loss under autocast; "fp16" scales the loss
        (`torch.amp.GradScaler`).
    graph
        True: record the training step once and replay it for every batch of its shape, which saves
        most of the time of a small network's step. The step is replayed only if it gives the bits
        of the ordinary step; otherwise steps are ordinary, and the trial's log gives the reason.
        Python in the step (in the network, loss and metrics) must do the same for every batch. Not
        supported with ``amp="fp16"``. On the CPU, the operators are recorded, those of `eval_batch`
        too, and the states are those of ``graph=False``. On a GPU, the step is captured as a CUDA
        graph, which saves the time to launch its kernels one by one; whether replayed or not, it is
        the step of ``capturable=True`` optimizers, and `accumulate` is refused.
    state
        "all", or "trainable": leave parameters that do not require gradients (a frozen backbone)
        out of states; `build` must then make them alike every time. Buffers, such as batch norm's
        statistics, are always part of the state: they change in training even if parameters are
        frozen.

    Attributes
    ----------
    net
        The network.

    Notes
    -----
    If the network is in training mode when the model is made, but some submodules are in
    evaluation mode, these stay so in training.

    Raises
    ------
    InputError
        An argument is invalid; the message says which and why.
    """

    framework = "torch"
    _array_types = (torch.Tensor, np.ndarray)
    loads_in_place = True

    @answers(TORCH_MODEL, name="cerebro.torch.Model")
    def __init__(
        self,
        net: Any,
        *,
        optimizer: Any,
        loss: Callable[..., Any] | None = None,
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        epoch_metrics: Mapping[str, Callable[..., Any]] | None = None,
        inputs: Columns = "x",
        target: Columns | None = "y",
        step: Callable[[Any, Batch], Mapping[str, Any]] | None = None,
        augment: Callable[[Batch], Batch] | None = None,
        scheduler: Any = None,
        scheduler_step: str = "epoch",
        clip_norm: float | None = None,
        accumulate: int = 1,
        amp: str | None = None,
        graph: bool = False,
        state: str = "all",
    ) -> None:
        _check_net(net)
        self.net = net
        self._loss = loss
        self._metrics = named_functions("metrics", metrics)
        self._epoch_metrics = named_functions("epoch_metrics", epoch_metrics)
        self._inputs, self._target = inputs, target
        self._step = step
        self._augment = augment
        self._clip_norm = real_number("clip_norm", clip_norm, above=0, optional=True)
        self._accumulate = whole_number("accumulate", accumulate, 1, math.inf)
        self._optimizers = _check_optimizers(optimizer, net, loss)
        self._schedulers = _check_schedulers(scheduler, self._optimizers)
        self._scheduler_step = _check_scheduler_step(scheduler_step, self._schedulers)
        self._check_combinations(graph, state, amp)
        _refuse_torchmetrics(net, {"loss": loss, **self._metrics})
        self._partial = state == "trainable"
        others = (loss, *self._metrics.values(), *self._epoch_metrics.values())
        place(net, self._optimizers, others, build_device())

        self._parameters = _all_parameters(net, self._optimizers)
        self._device = self._parameters[0].device
        self._on_gpu = self._device.type == "cuda"
        self._autocast, self._scaler = _make_amp(amp, self._device.type)
        self._no_grad = torch.no_grad()
        self._keep_evaluating = _evaluating_parts(net)
        self._to_training()
        self._pending = 0  # batches since the last update
        self._scheduler_due = False
        self._objective = self._compile_objective()
        self._graphed: GraphedStep | None = None
        self._recorded: tuple[RecordedStep, ...] = ()
        if graph and self._on_gpu:
            if self._accumulate != 1:
                raise InputError("graph=True on a GPU replays whole steps: leave out accumulate")
            make_capturable(self._optimizers)
            self._train = self._compile_graphed(CudaRecorder(self._device))
        else:
            self._train = self._compile_train(record=graph and self._device.type == "cpu")

    def _check_combinations(self, graph: bool, state: str, amp: str | None) -> None:
        if graph and amp == "fp16":
            raise InputError(
                "graph=True: amp='fp16' reads the gradients before each step: use amp='bf16'"
            )
        if state not in ("all", "trainable"):
            raise InputError(f"state must be 'all' or 'trainable', not {state!r}")
        check_metrics(self._loss, self._step, self._metrics, self._epoch_metrics)
        for name, value in (("step", self._step), ("augment", self._augment), ("loss", self._loss)):
            if value is not None and not callable(value):
                raise InputError(f"{name} must be callable, not {value!r}")
            if isinstance(value, type) and issubclass(value, torch.nn.Module):
                raise InputError(f"{name} is the class {value.__name__}: give {value.__name__}()")
        column_names("inputs", self._inputs)
        column_names("target", self._target)

    # --- training and evaluation ----------------------------------------------

    def train_batch(self, batch: Batch) -> dict[str, Any]:
        """Train on one batch.

        Parameters
        ----------
        batch
            Tensors by column; those in host memory are moved to the network's device.

        Returns
        -------
        dict
            The loss, a detached 0-d tensor, and the metrics.
        """
        if self._on_gpu:
            batch = self._placed(batch)
        try:
            return self._train(batch)
        except KeyError:
            self._explain_missing_column(batch)
            raise
        except RuntimeError as error:
            if "implicitly created only for scalar" in str(error):
                raise InputError(
                    "the loss must be a mean over the batch's rows, a tensor without dimensions: "
                    "not one value for each row (reduction='none')"
                ) from error
            raise

    def end_unit(self) -> None:
        """Finish an update that waits for more batches: a window ends with its unit."""
        for recorded in self._recorded:
            recorded.look_again()
        if self._pending:
            self._update()
        if self._scheduler_due:
            self._step_schedulers()

    def end_epoch(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Step the schedulers that step by epoch.

        Parameters
        ----------
        epoch
            The epoch's number, from 0.
        metrics
            The epoch's metrics, such as ``train_loss`` and ``val_accuracy``.

        Raises
        ------
        InputError
            The scheduler follows a metric that is not among them.
        """
        self.end_unit()
        if self._scheduler_step == "epoch":
            self._step_schedulers()
        elif self._scheduler_step != "batch":
            value = _find_metric(self._scheduler_step, metrics)
            for scheduler in self._schedulers:
                scheduler.step(value)

    def eval_batch(self, batch: Batch) -> dict[str, Any]:
        """Return loss and metrics of one batch; the model is not changed.

        Gradients are off, but without inference mode: tensors that a network caches under it
        (masks, rotary tables) could not be used in training afterwards.
        """
        if self._recorded:
            if self.net.training:
                self.net.eval()
            return self._recorded[1](batch)
        return self._measure(batch)[0]

    @property
    def inputs(self) -> Columns:
        """The network's inputs: a column, a list of columns or a mapping."""
        return self._inputs

    @property
    def held_bytes(self) -> int:
        """The memory of recorded steps, in addition to that of the state."""
        return sum(recorded.held_bytes for recorded in self._recorded)

    def predict_batch(self, batch: Batch) -> Any:
        """Return the network's output for a batch, in evaluation mode, without gradients."""
        if self.net.training:
            self.net.eval()
        if self._on_gpu:
            batch = self._placed(batch)
        try:
            with self._no_grad:
                if self._autocast is None:
                    return self._forward(batch)
                with self._autocast:
                    return self._forward(batch)
        except KeyError:
            self._explain_missing_column(batch, with_target=False)
            raise

    # --- state ----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state: live tensors, not copies.

        It holds ``net``, ``optimizer`` and, if they exist, ``scheduler``, ``scaler`` and ``loss``;
        with ``state="trainable"`` also ``partial``, which is true. States are taken between units,
        so this ends an open window of `accumulate` (see :meth:`end_unit`).
        """
        self.end_unit()
        net = dict(self.net.state_dict())
        if self._partial:
            for name in frozen_names(self.net):
                net.pop(name, None)
        state: dict[str, Any] = {"net": net}
        if self._partial:  # for readers of states without the model
            state["partial"] = True
        state["optimizer"] = _each(optimizer_state, self._optimizers)
        if self._schedulers:
            state["scheduler"] = _each(scheduler_state, self._schedulers)
        if self._scaler is not None:
            state["scaler"] = self._scaler.state_dict()
        if isinstance(self._loss, torch.nn.Module):
            loss = dict(self._loss.state_dict())
            if loss:
                state["loss"] = loss
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of an equally built model; its tensors are copied, not kept.

        Raises
        ------
        StateError
            The state is of a different network or optimizer.
        """
        for part, there in (("net", True), ("optimizer", True), ("scheduler", self._schedulers)):
            if bool(there) != (part in state):
                raise StateError(
                    f"the state has {'no' if there else 'a'} {part!r}, unlike the model that build "
                    "made: build must make the same model from the same configuration"
                )
        self._pending, self._scheduler_due = 0, False
        if self._graphed is not None:
            self._graphed.moved()
        for recorded in self._recorded:
            recorded.look_again()
        self._drop_gradients()
        load_net(self.net, state["net"], partial=self._partial)
        for optimizer, part in self._parts(self._optimizers, state["optimizer"]):
            load_optimizer(optimizer, part)
        for scheduler, part in self._parts(self._schedulers, state.get("scheduler")):
            load_scheduler(scheduler, part)
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
        if "loss" in state:
            load_net(self._loss, state["loss"], partial=False)

    def load_clone(self, state: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Continue from another trial's state with this trial's hyperparameters.

        Weights, moments and the scheduler's position are the parent's. The settings of parameter
        groups (learning rate, weight decay, ...) and of torch's schedulers (base learning rates,
        decay, milestones, ...) stay as `build` made them from `config`; other schedulers keep only
        the base learning rates. If a scheduler has changed the parent's learning rate, this one's
        is scaled in the same proportion until its scheduler steps.
        """
        own = [group_settings(optimizer) for optimizer in self._optimizers]
        advanced = [
            advanced_state(scheduler, part)
            for scheduler, part in self._parts(self._schedulers, state.get("scheduler", {}))
        ]
        self.load_state_dict(state)
        for optimizer, settings in zip(self._optimizers, own, strict=True):
            apply_settings(optimizer, settings)
        for scheduler, part in zip(self._schedulers, advanced, strict=True):
            load_scheduler(scheduler, part)

    @staticmethod
    def _parts(objects: Sequence[Any], state: Any) -> list[tuple[Any, Any]]:
        if len(objects) == 1:
            return [(objects[0], state)]
        try:
            return [(item, state[str(index)]) for index, item in enumerate(objects)]
        except (KeyError, TypeError):
            raise StateError(
                f"the state is not of {len(objects)} optimizers or schedulers"
            ) from None

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.net.parameters())
        kinds = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)
        return f"cerebro.torch.Model({type(self.net).__name__}, {count:,} parameters, {kinds})"

    # --- the parts of a training step -----------------------------------------

    def _compile_train(self, *, record: bool) -> Callable[[Batch], dict[str, Any]]:
        """Return the function that trains on a batch, with all settings resolved in advance."""
        net, objective, augment = self.net, self._objective, self._augment
        autocast, scaler, accumulate = self._autocast, self._scaler, self._accumulate
        by_batch = bool(self._schedulers) and self._scheduler_step == "batch"

        def step(batch: Batch, pending: int) -> dict[str, Any]:
            if autocast is None:
                values, loss, _, _ = objective(batch)
            else:
                with autocast:
                    values, loss, _, _ = objective(batch)
            if accumulate != 1:
                loss = loss / accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()
            if pending + 1 == accumulate:
                self._update()
            return values

        take = self._record(step) if record else step

        def train(batch: Batch) -> dict[str, Any]:
            if not net.training:
                self._to_training()
            if self._scheduler_due:
                self._step_schedulers()
            if augment is not None:
                batch = augment(batch)
            pending = self._pending
            values = take(batch, pending)
            self._pending = (pending + 1) % accumulate
            if by_batch:
                # Inside a unit the next batch steps it: if this batch is the unit's last,
                # end_unit makes its update first.
                self._scheduler_due = True
                if accumulate == 1:
                    self._step_schedulers()
            return values

        return train

    def _record(
        self, step: Callable[[Batch, int], dict[str, Any]]
    ) -> Callable[[Batch, int], dict[str, Any]]:
        """Return the step as one that is recorded and replayed; record evaluation, too."""

        def evaluate(batch: Batch, pending: int) -> dict[str, Any]:
            return self._measure(batch)[0]

        modules = [self.net, self._loss] if isinstance(self._loss, torch.nn.Module) else [self.net]
        gathered = self._parameters if self._accumulate != 1 else ()
        training = RecordedStep(
            step, "training step", modules, self._optimizers, gathered, self._drop_gradients
        )
        self._recorded = (training, RecordedStep(evaluate, "evaluation", modules))
        return training

    def _compile_graphed(self, recorder: Recorder) -> Callable[[Batch], dict[str, Any]]:
        """Return the function that trains on a batch with a capturable step."""
        net, objective, augment = self.net, self._objective, self._augment
        by_batch = bool(self._schedulers) and self._scheduler_step == "batch"

        def step(batch: Batch) -> dict[str, Any]:
            with contextlib.nullcontext() if self._autocast is None else self._autocast:
                values, loss, _, _ = objective(batch)
            loss.backward()
            self._update()
            return values

        modules = [net, self._loss] if isinstance(self._loss, torch.nn.Module) else [net]
        graphed = GraphedStep(step, modules, self._optimizers, recorder, self._drop_gradients)
        self._graphed = graphed

        def train(batch: Batch) -> dict[str, Any]:
            if not net.training:
                self._to_training()
            if augment is not None:
                batch = augment(batch)
            values = graphed(batch)
            if by_batch:
                self._step_schedulers()
            return values

        return train

    def _update(self) -> None:
        """Update the parameters with the accumulated gradients, and drop these."""
        self._pending = 0
        scaler = self._scaler
        if scaler is not None and self._clip_norm is not None:
            for optimizer in self._optimizers:
                scaler.unscale_(optimizer)
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        for optimizer in self._optimizers:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        # Including parameters without an optimizer: gradients accumulated there would count in
        # clip_norm, and would be lost in a hop.
        for parameter in self._parameters:
            parameter.grad = None

    def _step_schedulers(self) -> None:
        self._scheduler_due = False
        for scheduler in self._schedulers:
            scheduler.step()

    def _to_training(self) -> None:
        self.net.train()
        for part in self._keep_evaluating:
            part.training = False

    def _compile_objective(self) -> _Objective:
        self._forward = _make_forward(self.net, self._inputs)
        if self._step is not None:
            return self._step_objective
        if self._target is None:
            return self._targetless_objective
        get_target, forward, no_grad = make_getter(self._target), self._forward, self._no_grad
        loss_function, metrics = self._loss, list(self._metrics.items())
        needs_target = bool(metrics or self._epoch_metrics)

        def objective(batch: Batch) -> tuple[dict[str, Any], Any, Any, Any]:
            output = forward(batch)
            if loss_function is None:
                target = get_target(batch) if needs_target else None
                loss = loss_of(output)
            else:
                target = get_target(batch)
                loss = loss_function(output, target)
            values = {"loss": loss.detach()}
            if metrics:
                with no_grad:
                    for name, metric in metrics:
                        values[name] = metric(output, target)
            return values, loss, output, target

        return objective

    def _targetless_objective(self, batch: Batch) -> tuple[dict[str, Any], Any, Any, Any]:
        output = self._forward(batch)
        loss = loss_of(output) if self._loss is None else self._loss(output)
        values = {"loss": loss.detach()}
        with self._no_grad:
            for name, metric in self._metrics.items():
                values[name] = metric(output)
        return values, loss, output, None

    def _step_objective(self, batch: Batch) -> tuple[dict[str, Any], Any, Any, Any]:
        assert self._step is not None
        returned = self._step(self.net, batch)
        if not isinstance(returned, Mapping) or "loss" not in returned:
            raise InputError(f"step must return a dict with 'loss', not {returned!r}")
        loss = returned["loss"]
        values = {name: _detached(value) for name, value in returned.items()}
        return values, loss[0] if isinstance(loss, tuple) else loss, None, None

    def _measure(self, batch: Batch) -> tuple[dict[str, Any], tuple[Any, Any]]:
        if self.net.training:
            self.net.eval()
        if self._on_gpu:
            batch = self._placed(batch)
        try:
            with torch.no_grad():
                if self._autocast is None:
                    values, _, output, target = self._objective(batch)
                else:
                    with self._autocast:
                        values, _, output, target = self._objective(batch)
        except KeyError:
            self._explain_missing_column(batch)
            raise
        return values, (output, target)

    def _whole(self, parts: Sequence[Any]) -> dict[str, float]:
        outputs, targets = parts
        if self._autocast is not None:  # NumPy and scikit-learn know no bfloat16
            outputs = _in_float32(outputs)
        return super()._whole([outputs, targets])

    def _call(self, metric: Callable[..., Any], *arguments: Any) -> Any:
        with self._no_grad:
            value = metric(*arguments)
        if _is_torchmetric(metric):
            metric.reset()  # type: ignore[attr-defined]  # it would keep all passes
        return value

    # --- data -----------------------------------------------------------------

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
            return tuple(self._to_host(value) for value in output)
        return output

    def _join(self, parts: list[Any]) -> Any:
        """Join the batches' outputs along their rows; return them as a list if they do not fit."""
        first = parts[0]
        if isinstance(first, torch.Tensor):
            return torch.cat(parts) if is_joinable(parts) else parts
        if isinstance(first, Mapping):
            return {key: self._join([part[key] for part in parts]) for key in first}
        if isinstance(first, (list, tuple)):
            return tuple(self._join([part[i] for part in parts]) for i in range(len(first)))
        return parts

    def _placed(self, batch: Batch) -> Batch:
        """Return the batch on the network's device; the batch itself if it is already there."""
        away = (isinstance(v, torch.Tensor) and not v.is_cuda for v in batch.values())
        return moved(batch, self._device) if any(away) else batch

    def _explain_missing_column(self, batch: Batch, with_target: bool = True) -> None:
        """Raise InputError if a KeyError came from a column that the batch lacks."""
        if self._step is None:
            check_batch(batch, self._inputs, self._target if with_target else None)


def _make_forward(net: Any, inputs: Columns) -> Callable[[Batch], Any]:
    """Return the function that calls the network with a batch's columns."""
    if isinstance(inputs, str):
        return lambda batch: net(batch[inputs])
    get = make_getter(inputs)
    if isinstance(inputs, Mapping):
        return lambda batch: net(**get(batch))
    return lambda batch: net(*get(batch))


def _detached(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_detached(item) for item in value)
    return value.detach() if isinstance(value, torch.Tensor) else value


def _in_float32(outputs: Any) -> Any:
    """Return outputs of mixed precision in single precision; others as they are."""
    if isinstance(outputs, torch.Tensor):
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
    if isinstance(outputs, Mapping):
        return {key: _in_float32(value) for key, value in outputs.items()}
    if isinstance(outputs, (list, tuple)):
        return type(outputs)([_in_float32(value) for value in outputs])
    return outputs


def _each(take: Callable[[Any], dict[str, Any]], objects: Sequence[Any]) -> dict[str, Any]:
    if len(objects) == 1:
        return take(objects[0])
    return {str(index): take(item) for index, item in enumerate(objects)}


def _find_metric(step: str, metrics: Mapping[str, Any]) -> float:
    name = step.partition(":")[2] or "loss"
    for key in (f"val_{name}", name, f"train_{name}"):
        if key in metrics:
            return float(metrics[key])
    raise InputError(
        f"scheduler_step={step!r} needs the metric {name!r}, but the epoch has "
        f"{', '.join(metrics) or 'none'}"
    )


def _check_net(net: Any) -> None:
    if is_keras(net):
        raise InputError(f"net is a Keras {type(net).__name__}: {NO_KERAS}")
    if not isinstance(net, torch.nn.Module):
        raise InputError(f"net must be a torch.nn.Module, not {net!r}")
    for name, part in net.named_modules():
        if is_keras(part):
            raise InputError(f"net.{name} is a Keras {type(part).__name__}: {NO_KERAS}")


def _is_torchmetric(value: object) -> bool:
    """Whether an object is a ``torchmetrics.Metric``, without importing its package."""
    kinds = {(kind.__module__, kind.__name__) for kind in type(value).__mro__}
    return ("torchmetrics.metric", "Metric") in kinds


def _refuse_torchmetrics(net: Any, functions: Mapping[str, Any]) -> None:
    """Raise InputError for metrics that accumulate batches, which workers would mix up."""
    found = [(f"net.{name}", part) for name, part in net.named_modules()]
    for name, function in functions.items():
        what = "loss" if name == "loss" else f"metrics[{name!r}]"
        parts = function.modules() if isinstance(function, torch.nn.Module) else [function]
        found += [(what, part) for part in parts]
    for what, part in found:
        if _is_torchmetric(part):
            raise InputError(
                f"{what} is a torchmetrics {type(part).__name__}, which accumulates batches in a "
                "state that does not move with the trial: give it in epoch_metrics=, or use the "
                "function of torchmetrics.functional in metrics="
            )


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _check_optimizers(optimizer: Any, net: Any, loss: Any) -> tuple[Any, ...]:
    optimizers = _several(optimizer)
    if not optimizers:
        raise InputError("optimizer must be an optimizer or a list of them, not an empty list")
    ours = {id(parameter) for parameter in net.parameters()}
    if isinstance(loss, torch.nn.Module):
        ours |= {id(parameter) for parameter in loss.parameters()}
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
        taken = [parameter for group in item.param_groups for parameter in group["params"]]
        if not any(id(parameter) in ours for parameter in taken):
            raise InputError(
                f"the {kind} has none of the network's parameters: make it from net.parameters()"
            )
        # Schedulers warn if they step before their optimizer object has. After a hop that is
        # normal: the trial has stepped, not the object.
        item._opt_called = True
    return optimizers


def _check_schedulers(scheduler: Any, optimizers: Sequence[Any]) -> tuple[Any, ...]:
    schedulers = () if scheduler is None else _several(scheduler)
    for item in schedulers:
        if not all(hasattr(item, name) for name in ("step", "state_dict", "load_state_dict")):
            raise InputError(f"scheduler must be a learning-rate scheduler, not {item!r}")
        its = getattr(item, "optimizer", None)
        if its is not None and not any(its is optimizer for optimizer in optimizers):
            raise InputError(
                f"the {type(item).__name__} belongs to a different optimizer than the one given"
            )
    return schedulers


def _check_scheduler_step(scheduler_step: str, schedulers: Sequence[Any]) -> str:
    known = ("epoch", "batch", "metric")
    if scheduler_step not in known and not str(scheduler_step).startswith("metric:"):
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
    return scheduler_step


def _all_parameters(net: Any, optimizers: Sequence[Any]) -> list[Any]:
    """Return the network's parameters in order, then any others that optimizers have."""
    parameters = list(net.parameters())
    known = {id(parameter) for parameter in parameters}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known:
                    known.add(id(parameter))
                    parameters.append(parameter)
    return parameters


def _evaluating_parts(net: Any) -> list[Any]:
    """Return the submodules that `build` put into evaluation mode permanently."""
    return [part for part in net.modules() if not part.training] if net.training else []


def _make_amp(amp: str | None, device: str) -> tuple[Any, Any]:
    """Return the autocast context and the gradient scaler; None for each that is not used."""
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

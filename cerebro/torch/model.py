"""PyTorch models: an ordinary network, optimizer and loss that can hop between workers.

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
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

import cerebro._core as _core
from cerebro.arguments import TORCH_MODEL, check_real_number, check_whole_number, explain_keywords
from cerebro.data import Dataset
from cerebro.data.depots import move_batch
from cerebro.errors import InputError, StateError
from cerebro.machine.devices import build_device
from cerebro.model import (
    BaseModel,
    Batch,
    Columns,
    Words,
    check_batch,
    check_metrics,
    column_names,
    loss_of,
    make_getter,
)
from cerebro.torch import optimizer_step
from cerebro.torch.arguments import (
    check_countable,
    check_functions,
    check_graph,
    check_net,
    check_optimizers,
    check_scheduler_step,
    check_schedulers,
    check_state,
    check_train_step,
    make_amp,
    name_epoch_metrics,
    needs_metric,
    split_metrics,
)
from cerebro.torch.graph import CudaRecorder, GraphedStep, Recorder, make_capturable
from cerebro.torch.outputs import copy_to_host, detach_value, join_outputs, to_float32
from cerebro.torch.parameter_order import (
    ParameterNames,
    in_fixed_order,
    in_own_order,
)
from cerebro.torch.place import place
from cerebro.torch.recorded_step import RecordedStep
from cerebro.torch.row_weights import check_column, check_weight, weighted_mean
from cerebro.torch.state import (
    collect_states,
    frozen_names,
    gradients_of,
    load_clone,
    load_gradients,
    load_net,
    load_optimizer,
    load_scheduler,
    optimizer_state,
    scheduler_state,
    split_state,
)
from cerebro.torch.torchmetrics import (
    Metrics,
    accumulates,
    extract_numbers,
    flatten_collections,
    is_metric,
    is_updated,
    reset,
)

# Methods that get whole batches if a subclass or a user replaces them.
_SEE_BATCHES = ("train_batch", "eval_batch", "predict_batch", "evaluate")

# Returns values by metric, the loss with its graph (or None), the output and the target.
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
        output contains the loss, as ``output.loss`` or ``output["loss"]``. If `loss` is a module,
        its parameters and buffers are part of the state.
    metrics
        ``metric(output, target)`` by name: a float, a 0-d tensor (a mean over the rows) or
        ``(mean, weight)``; a mean of weight 0 does not count. Computed without gradients on every
        training and validation batch; in training, on the outputs from before the update. A
        ``torchmetrics.Metric`` or ``MetricCollection`` is updated with every batch and computed at
        the end of the epoch and of the validation pass; its state moves with the trial. A
        collection may also be passed in place of the mapping.
    epoch_metrics
        ``metric(outputs, targets)`` by name, for metrics that are not means over batches (AUC,
        F1): computed once per validation pass on all outputs and targets, which are kept in memory
        until then. With `amp`, the outputs are float32.
    inputs
        The network's inputs: a column, a list of columns (positional) or a mapping of keywords to
        columns.
    target
        The target of loss and metrics: a column (for an autoencoder the column of `inputs`), a
        list (a tuple of tensors), a mapping (a dict of tensors), or None: loss and metrics are
        called with the output alone.
    step
        ``step(net, batch) -> {"loss": ..., metric: ...}`` replaces `inputs`,
        `target`, `loss` and `metrics`, in training and in validation. A value may be a
        ``torchmetrics.Metric`` that is a submodule of `net`; it is computed at the end of the pass.
    augment
        ``augment(batch) -> batch``, applied in training only. Random numbers from the global
        generators of `random`, NumPy and torch are exactly repeatable.
    scheduler
        A learning-rate scheduler (or a list) over `optimizer`.
    scheduler_step
        When the scheduler steps: "batch", after every training batch (even inside a window of
        `accumulate`); "epoch", at the end of every epoch; "metric", at the end of every epoch with
        the validation loss (without validation, the training loss), as for `ReduceLROnPlateau`;
        "metric:NAME" with a different metric. Only schedulers whose `step` needs a metric get it:
        a `StepLR` beside a `ReduceLROnPlateau` steps at the same time, without it.
    clip_norm
        Gradients are clipped to this norm before every update.
    accumulate
        Batches per update. An epoch of n batches has ``round(n / accumulate)`` updates, at least
        one, whose numbers of batches differ by at most one; each loss is divided by the number of
        batches of its update. (With ``shuffle="shards"``, this is so within each group of shards.)
    amp
        "bf16" or "fp16": forward pass and loss under autocast; "fp16" scales the loss
        (`torch.amp.GradScaler`).
    graph
        How the training step is computed. On the CPU, all three settings give the same states, bit
        for bit.

        None (default): ordinary steps. On the CPU, the arithmetic of `Adam`, `AdamW` and `SGD` in
        their default form (float32, no hooks, none of ``amsgrad``, ``foreach``, ``fused`` and the
        like) runs in Cerebro's core, which saves much of the time of a small network's step.

        True: record the step once, and replay it for every batch of the same shape. You promise
        that the Python code of the step (of the network, loss and metrics) does the same for every
        batch. The promise is checked on the first batches and after every unit. If the step cannot
        be recorded, the trial's log gives the reason. Not supported with ``amp="fp16"``. On a GPU,
        the step is captured as a CUDA graph, which saves the time to launch its kernels one by one.
        The optimizers then have ``capturable=True``, even if the step is not replayed, and
        `accumulate` is rejected.

        False: ordinary steps, all of them PyTorch's own.
    state
        "all", or "trainable": leave parameters that do not require gradients (a frozen backbone)
        out of states; `build` must then make the same frozen parameters every time. Buffers, such
        as batch norm's statistics, are always part of the state, because training changes them even
        if parameters are frozen.
    train_step
        ``train_step(net, batch, *optimizers) -> {"loss": ..., ...}`` does the whole training step
        itself: it calls ``backward``, ``step`` and ``zero_grad`` (for GANs or several losses). It
        returns detached metrics, an empty dict or None. Gradients that it leaves are part of the
        state. Validation uses `step`, or `loss` and `metrics`.
    weight
        A column with the weight of each row, at least 0. A search checks the weights of its
        training data. `loss` must then return a value for each row (``reduction="none"``; further
        dimensions are averaged). The loss of a batch is the weighted mean,
        ``sum(weight * loss) / sum(weight)``, as in scikit-learn's metrics and in torch's
        ``CrossEntropyLoss(weight=)``; Keras' `fit` divides by the number of rows instead. The mean
        over an epoch weights each batch by the sum of its weights, so it is the weighted mean of
        all rows. A batch whose weights are all 0 has a loss of 0. With `accumulate`, all batches of
        a window count equally. Metrics are not weighted. Data without the column can be evaluated,
        without weights.

    Attributes
    ----------
    net
        The network.
    channels_last
        Whether the network computes in ``channels_last``, as after
        ``net.to(memory_format=torch.channels_last)``. Images with the transform
        `cerebro.transforms.ToCHW` then arrive in this memory format.

    Notes
    -----
    If the network is in training mode when the model is made, but some of its submodules are in
    evaluation mode, these submodules stay in evaluation mode during training.

    Raises
    ------
    InputError
        An argument is invalid; the message says which and why.
    """

    framework = "torch"
    overlaps = True  # other units may run between its batches; see `cerebro.machine.turns`
    loads_in_place = True
    _steps_by_update = False  # whether scheduler_step="batch" means after every update
    _made_by = "cerebro.torch.Model"  # the function that the user has called

    @property
    def words(self) -> Words:  # type: ignore[override]
        """What users call the parts of the model, for messages."""
        add = f"add it to metrics= of {self._made_by}"
        if self._train_step is not None:
            report = "return it from train_step"
            return Words("train_step", "step", report, "return it from step" if self._step else add)
        if self._step is not None:
            return Words("step", "step", "return it from step", "return it from step")
        return Words.of_metrics(add)

    @property
    def declares_metrics(self) -> bool:  # type: ignore[override]
        """Whether the arguments fix the names of all metrics."""
        return self._step is None and self._train_step is None

    @explain_keywords(TORCH_MODEL, name="cerebro.torch.Model")
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
        graph: bool | None = None,
        state: str = "all",
        train_step: Callable[..., Mapping[str, Any] | None] | None = None,
        weight: str | None = None,
    ) -> None:
        check_net(net)
        self.net, self._loss = net, loss
        self._inputs, self._target, self._weight = inputs, target, weight
        self._step, self._train_step, self._augment = step, train_step, augment
        self._metrics, self._accumulating = split_metrics(metrics)
        self._epoch_metrics = name_epoch_metrics(epoch_metrics)
        self._clip_norm = check_real_number("clip_norm", clip_norm, above=0, optional=True)
        self.accumulate = check_whole_number("accumulate", accumulate, 1, math.inf)
        self._optimizers = check_optimizers(optimizer, net, loss)
        self._schedulers = check_schedulers(scheduler, self._optimizers)
        self._scheduler_step = check_scheduler_step(scheduler_step, self._schedulers)
        all_metrics = {**self._metrics, **self._accumulating}
        metered = {f"metrics.{name}": metric for name, metric in self._accumulating.items()}
        self._meters = Metrics({"net": net, "loss": loss, **metered})
        self._returned: dict[str, str] = {}  # metrics that step returned: their paths by name

        check_graph(graph, amp)
        check_state(state)
        check_metrics(loss, step, all_metrics, self._epoch_metrics)
        check_countable(graph, self._meters)
        if train_step is not None:
            check_train_step(
                clip_norm=self._clip_norm, accumulate=self.accumulate, amp=amp, graph=graph
            )
        check_functions({"step": step, "train_step": train_step, "augment": augment, "loss": loss})
        column_names("inputs", inputs)
        column_names("target", target)
        if weight is not None:
            check_weight(weight, loss, step or train_step)

        others = (loss, *all_metrics.values(), *self._epoch_metrics.values())
        place(net, self._optimizers, others, build_device())
        self._parameters = _all_parameters(net, self._optimizers)
        self._names = ParameterNames(net, loss)
        self._built_with = len(self._parameters)
        self._grown: list[Any] = []  # parameters of layers that were added in training
        self.channels_last = any(map(_is_channels_last, net.parameters()))
        self._device = self._parameters[0].device
        self._on_gpu = self._device.type == "cuda"
        self._partial = state == "trainable"
        # The size of the state tells how much memory a model uses, but these are not in the state.
        frozen = [*net.buffers(), *(p for p in net.parameters() if not p.requires_grad)]
        self._frozen_bytes = sum(t.nbytes for t in frozen) if self._partial else 0
        self._autocast, self._scaler = make_amp(amp, self._device.type)
        self._in_core = graph is None and self._device.type == "cpu"
        self._no_grad = torch.no_grad()

        self._keep_evaluating = _evaluating_parts(net)
        self._trained_as_built: list[tuple[str, Any, bool]] = []  # known after build
        self._set_training_mode()
        self._pending = 0  # batches since the last update
        self._windows: Iterator[int] = iter(())  # batches of each update that the unit has left
        self._window = self.accumulate
        self._scheduler_due = False
        self._objective = self._compile_objective()
        self._graphed: GraphedStep | None = None
        self._recorded: tuple[RecordedStep, ...] = ()
        self._train = self._compile(graph)

    def bind_info(self, info: Any) -> None:
        """Check the weights of the training data; note which parameters `build` has frozen."""
        self._trained_as_built = [
            (name, parameter, parameter.requires_grad)
            for name, parameter in self.net.named_parameters()
        ]
        if self._weight is not None and isinstance(info.data, Dataset):
            check_column(info.data, self._weight)

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
            The loss, a detached 0-d tensor, and the metrics. With `weight` the loss is a pair with
            the sum of the batch's weights.
        """
        if self._on_gpu:
            batch = self._place_batch(batch)
        try:
            return self._train(batch)
        except KeyError:
            self._explain_missing_column(batch)
            raise
        except RuntimeError as error:
            if "implicitly created only for scalar" in str(error):
                raise InputError(
                    "the loss must be a mean over the batch's rows, a tensor without dimensions: "
                    "not one value for each row (reduction='none'), unless weight= names a column"
                ) from error
            if "backward through the graph a second time" in str(error) and self._step is not None:
                raise InputError(
                    "step has called backward(), and so does Cerebro with the loss that step "
                    "returns: give a function that makes its own updates as train_step="
                ) from error
            raise

    def begin_unit(self, updates: Sequence[int]) -> None:
        """Begin a unit, with the number of batches of each of its updates.

        An epoch's batches are divided among its updates as evenly as rows among batches, so an
        update has about `accumulate` batches. Without this call it has as many, and the last one of
        a unit what is left.
        """
        self._add_new_parameters()
        if self.accumulate != 1:
            self._windows = iter(updates)
            self._window = next(self._windows, self.accumulate)

    def end_unit(self) -> None:
        """Make an update that is still pending: a window of `accumulate` ends with its unit."""
        self._windows, self._window = iter(()), self.accumulate
        for recorded in self._recorded:
            recorded.request_check()
        if self._pending:
            self._update()
            if self._steps_by_update and self._scheduler_step == "batch":
                self._step_schedulers()
        if self._scheduler_due:
            self._step_schedulers()

    def end_epoch(self, epoch: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Step the schedulers that step once per epoch; compute and reset torchmetrics metrics.

        Parameters
        ----------
        epoch
            The epoch's number, from 0.
        metrics
            The epoch's metrics, such as ``train_loss`` and ``val_accuracy``.

        Returns
        -------
        dict
            The training metrics that torchmetrics has accumulated.

        Raises
        ------
        InputError
            The scheduler follows a metric that is not in `metrics`.
        """
        self.end_unit()
        computed = self._compute_meters()
        self._meters.reset()
        self._returned = {}
        metrics = {**{f"train_{name}": value for name, value in computed.items()}, **metrics}
        if self._scheduler_step == "epoch":
            self._step_schedulers()
        elif self._scheduler_step != "batch":
            value = _find_metric(self._scheduler_step, metrics)
            for scheduler in self._schedulers:
                if needs_metric(scheduler):
                    scheduler.step(value)
                else:  # would take the value for the epoch's number
                    scheduler.step()
        return computed

    def eval_batch(self, batch: Batch) -> dict[str, Any]:
        """Return loss and metrics of one batch; the model is not changed.

        Gradients are off, but inference mode is not used: tensors that a network caches in
        inference mode (masks, rotary tables) could not be used in training afterwards.
        """
        if self._recorded:
            if self.net.training:
                self.net.eval()
            return self._recorded[1](batch)
        if not self._meters:
            return self._measure(batch)[0]
        with self._metering():
            return {**self._measure(batch)[0], **self._compute_meters()}

    @property
    def evaluates_whole(self) -> bool:
        """Whether some metrics are not means over batches."""
        return bool(self._epoch_metrics or self._meters)

    @property
    def _keeps_outputs(self) -> bool:
        return bool(self._epoch_metrics)

    def evaluate(self, data: Any, *, batch_size: int | None = None) -> dict[str, float]:
        """Return the loss and all metrics over all rows; see `cerebro.model.BaseModel.evaluate`."""
        if not self._meters:
            return super().evaluate(data, batch_size=batch_size)
        with self._metering():
            means = super().evaluate(data, batch_size=batch_size)
            return {**means, **self._compute_meters()}

    @contextlib.contextmanager
    def _metering(self) -> Iterator[None]:
        """Reset torchmetrics metrics for this block, and restore their states at the end."""
        returned, self._returned = self._returned, {}
        try:
            with self._meters.set_aside():
                yield
        finally:
            self._returned = returned

    def _compute_meters(self) -> dict[str, float]:
        """Return the values of the torchmetrics metrics that have accumulated batches."""
        values: dict[str, float] = {}
        with self._no_grad:
            for name, metric in self._accumulating.items():
                if is_updated(metric):
                    values.update(extract_numbers(name, metric.compute(), metric))
            for name, path in self._returned.items():
                metric = self._meters.metric(path)
                values.update(extract_numbers(name, metric.compute(), metric))
        return values

    def replays_for(self, step: Any) -> list[_core.Replay] | None:
        """Return the recorded steps that may replace calls of `train_batch` or `eval_batch`.

        The epoch runner runs them without Python code. The list changes as steps are recorded or
        dropped. None: every batch needs a call of the method.

        Parameters
        ----------
        step
            The method of this model: `train_batch` or `eval_batch`.
        """
        if not self._recorded:
            return None
        function = getattr(step, "__func__", None)
        if function is Model.eval_batch:
            return self._recorded[1].ready
        by_batch = bool(self._schedulers) and self._scheduler_step == "batch"
        if function is not Model.train_batch or by_batch:
            return None
        if self.accumulate != 1 or self._augment is not None:
            return None
        return self._recorded[0].ready

    @property
    def columns_read(self) -> list[str] | None:  # type: ignore[override]
        """The columns of `inputs`, `target` and `weight`; None if user code sees whole batches."""
        if type(self) is not Model or any(name in vars(self) for name in _SEE_BATCHES):
            return None
        if self._step or self._train_step or self._augment:
            return None
        read = [*column_names("inputs", self._inputs), *column_names("target", self._target)]
        return read if self._weight is None else [*read, self._weight]

    @property
    def inputs(self) -> Columns:
        """The network's inputs: a column, a list of columns or a mapping."""
        return self._inputs

    @property
    def held_bytes(self) -> int:
        """The bytes of memory that only this model uses, in addition to its state.

        They belong to recorded steps, and to weights that the state leaves out.
        """
        graphed = 0 if self._graphed is None else self._graphed.held_bytes
        recorded = sum(recorded.held_bytes for recorded in self._recorded)
        return self._frozen_bytes + graphed + recorded

    def predict_batch(self, batch: Batch) -> Any:
        """Return the network's output for a batch, in evaluation mode, without gradients."""
        if self.net.training:
            self.net.eval()
        if self._on_gpu:
            batch = self._place_batch(batch)
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

        Its keys are ``net``, ``optimizer`` and, if they exist, ``scheduler``, ``scaler`` and
        ``loss``; ``partial``, which is true, with ``state="trainable"``; ``metrics`` with
        torchmetrics; ``gradients`` with `train_step`; and ``requires_grad`` with the flags that
        differ from those after `build`, as in gradual unfreezing. An optimizer's state also has the
        names of its parameters, ``parameter_names``, by group. States are taken between units, so
        this call ends an open window of `accumulate` (see :meth:`end_unit`).
        """
        self.end_unit()
        net = dict(self.net.state_dict())
        if self._partial:
            for name in frozen_names(self.net):
                net.pop(name, None)
        state: dict[str, Any] = {"net": net}
        if self._partial:  # for code that reads states without the model
            state["partial"] = True
        state["optimizer"] = collect_states(self._optimizer_state, self._optimizers)
        if self._schedulers:
            state["scheduler"] = collect_states(scheduler_state, self._schedulers)
        if self._scaler is not None:
            state["scaler"] = self._scaler.state_dict()
        if isinstance(self._loss, torch.nn.Module):
            loss = dict(self._loss.state_dict())
            if loss:
                state["loss"] = loss
        if self._meters:
            state["metrics"] = {
                "metrics": self._meters.state_dict(),
                "returned": dict(self._returned),
            }
        if self._train_step is not None:
            state["gradients"] = gradients_of(self._parameters, self._names)
        changed = {
            name: parameter.requires_grad
            for name, parameter, built in self._trained_as_built
            if parameter.requires_grad != built
        }
        if changed:
            state["requires_grad"] = changed
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of an equally built model; its tensors are copied, not kept.

        The model may have its layers and parameter groups in another order: they are found by name.

        Raises
        ------
        StateError
            The state is from a different network or optimizer, or the order differs and the
            parameters cannot be told apart.
        """
        for part, there in (
            ("net", True),
            ("optimizer", True),
            ("scheduler", self._schedulers),
            ("metrics", self._meters),
            ("gradients", self._train_step),
        ):
            if bool(there) != (part in state):
                raise StateError(
                    f"the state has {'no' if there else 'a'} {part!r}, unlike the model that build "
                    "made: build must make the same model from the same configuration"
                )
        self._pending, self._scheduler_due = 0, False
        if self._graphed is not None:
            self._graphed.request_check()
        for recorded in self._recorded:
            recorded.request_check()
        self._drop_gradients()
        changed = state.get("requires_grad", {})
        for name, parameter, built in self._trained_as_built:
            trained = changed.get(name, built)
            if parameter.requires_grad != trained:
                parameter.requires_grad = trained
        load_net(self.net, state["net"], partial=self._partial)
        state = in_own_order(state, self._optimizers, self._schedulers, self._names)
        for optimizer, part in split_state(self._optimizers, state["optimizer"]):
            load_optimizer(optimizer, part)
        for scheduler, part in split_state(self._schedulers, state.get("scheduler")):
            load_scheduler(scheduler, part)
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
        if "loss" in state:
            load_net(self._loss, state["loss"], partial=False)
        if self._meters:
            self._meters.load_state_dict(state["metrics"]["metrics"])
            self._returned = dict(state["metrics"]["returned"])
        load_gradients(self._parameters, state.get("gradients", {}), self._names)

    def load_clone(self, state: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Continue from another trial's state with this trial's hyperparameters.

        Weights, moments and the scheduler's position come from the parent. The settings of
        parameter groups (learning rate, weight decay, ...) and of torch's schedulers (base learning
        rates, decay, milestones, ...) stay as `build` made them from `config`; schedulers that are
        not torch's keep only their base learning rates. If a scheduler has changed the parent's
        learning rate, this trial's learning rate is scaled by the same factor until its own
        scheduler steps.
        """
        state = in_own_order(state, self._optimizers, self._schedulers, self._names)
        load_clone(self.load_state_dict, self._optimizers, self._schedulers, state)

    def _optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return optimizer_state(optimizer, self._names)

    def in_fixed_order(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state of this model in an order that is the same in every process."""
        return in_fixed_order(state, self._optimizers, self._schedulers)

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.net.parameters())
        kinds = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)
        return f"cerebro.torch.Model({type(self.net).__name__}, {count:,} parameters, {kinds})"

    # --- the parts of a training step -----------------------------------------

    def _compile(self, graph: bool | None) -> Callable[[Batch], dict[str, Any]]:
        """Return the function that trains on a batch."""
        if graph and self._on_gpu:
            if self.accumulate != 1:
                raise InputError("graph=True on a GPU replays whole steps: leave out accumulate")
            make_capturable(self._optimizers)
            return self._compile_graphed(CudaRecorder(self._device))
        if self._train_step is not None:
            return self._compile_own(self._train_step)
        return self._compile_train(graph=graph if self._device.type == "cpu" else False)

    def _compile_train(self, *, graph: bool | None) -> Callable[[Batch], dict[str, Any]]:
        """Return the function that trains on a batch, with all settings resolved in advance."""
        net, objective, augment = self.net, self._objective, self._augment
        autocast, scaler, accumulate = self._autocast, self._scaler, self.accumulate
        by_batch = bool(self._schedulers) and self._scheduler_step == "batch"
        by_update = self._steps_by_update
        # A phase encodes the batch's position in its update, and by how many batches the update is
        # longer than `accumulate`. Each phase has its own program. Phase 0 is the first batch of an
        # update of the usual length.
        longest = 2 * accumulate

        def step(batch: Batch, phase: int) -> dict[str, Any]:
            longer, pending = divmod(phase, longest)
            window = accumulate + longer
            if autocast is None:
                values, loss, _, _ = objective(batch)
            else:
                with autocast:
                    values, loss, _, _ = objective(batch)
            if accumulate != 1:
                loss = loss / window
            (loss if scaler is None else scaler.scale(loss)).backward()
            if pending + 1 == window:
                self._update()
            return values

        # Torchmetrics metrics count batches in Python code, which a replayed step does not run.
        take = self._record(step) if graph and not self._meters else step

        def train(batch: Batch) -> dict[str, Any]:
            if not net.training:
                self._set_training_mode()
            if self._scheduler_due:
                self._step_schedulers()
            if augment is not None:
                batch = augment(batch)
            pending, window = self._pending, self._window
            values = take(batch, pending + (window - accumulate) * longest)
            self._pending = (pending + 1) % window
            if self._pending == 0 and accumulate != 1:
                self._window = next(self._windows, accumulate)
            if by_batch and by_update:
                if self._pending == 0:
                    self._step_schedulers()
            elif by_batch:
                # The unit's next batch steps the schedulers. After the unit's last batch, end_unit
                # makes a pending update first.
                self._scheduler_due = True
                if accumulate == 1:
                    self._step_schedulers()
            return values

        return train

    def _record(
        self, step: Callable[[Batch, int], dict[str, Any]]
    ) -> Callable[[Batch, int], dict[str, Any]]:
        """Return `step` wrapped to be recorded and replayed; also wrap the evaluation step."""

        def evaluate(batch: Batch, pending: int) -> dict[str, Any]:
            return self._measure(batch)[0]

        modules = [self.net, self._loss] if isinstance(self._loss, torch.nn.Module) else [self.net]
        gathered = self._parameters if self.accumulate != 1 else ()
        training = RecordedStep(
            step, "training step", modules, self._optimizers, gathered, self._drop_gradients
        )
        self._recorded = (training, RecordedStep(evaluate, "evaluation", modules))
        return training

    def begin_recorded_unit(self, *, training: bool) -> None:
        """Begin a unit whose steps may be recorded."""
        if not self._recorded:
            return
        at_once = self.replays_for(self.train_batch if training else self.eval_batch) is not None
        if at_once and training != self.net.training:
            if training:
                self._set_training_mode()
            else:
                self.net.eval()
        self._recorded[0 if training else 1].begin_unit(at_once=at_once)

    def end_recorded_unit(self, *, training: bool) -> str | None:
        """Compare the unit's replayed step with the ordinary step.

        Call this after the unit's last batch, before :meth:`end_unit`.

        Returns
        -------
        str or None
            How the steps differ; the unit's results may then be wrong. None if they are equal.
        """
        if not self._recorded:
            return None
        pending = self._pending
        how = self._recorded[0 if training else 1].end_unit()
        self._pending = pending
        return how

    def has_failed_replay(self, *, training: bool) -> bool:
        """Return whether an exception in the unit is from a replayed step."""
        return bool(self._recorded) and self._recorded[0 if training else 1].has_failed()

    @property
    def may_be_recorded(self) -> bool:
        """Whether `graph` was left open, and ``graph=True`` would record this model's steps."""
        return (
            self._in_core and self._train_step is None and not self._meters and self._scaler is None
        )

    def record(self) -> None:
        """Record steps from now on, as with ``graph=True``."""
        self._in_core = False
        self._train = self._compile_train(graph=True)

    @property
    def replays(self) -> int:
        """The number of training steps that were replayed without a comparison."""
        return self._recorded[0].replays if self._recorded else 0

    def stop_recording(self) -> None:
        """Take ordinary steps from now on."""
        for recorded in self._recorded:
            recorded.refuse("it has differed from the ordinary step before")

    def _compile_graphed(self, recorder: Recorder) -> Callable[[Batch], dict[str, Any]]:
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
                self._set_training_mode()
            if augment is not None:
                batch = augment(batch)
            values = graphed(batch)
            if by_batch:
                self._step_schedulers()
            return values

        return train

    def _compile_own(
        self, train_step: Callable[..., Mapping[str, Any] | None]
    ) -> Callable[[Batch], dict[str, Any]]:
        net, optimizers, augment = self.net, self._optimizers, self._augment
        by_batch = bool(self._schedulers) and self._scheduler_step == "batch"

        def train(batch: Batch) -> dict[str, Any]:
            if not net.training:
                self._set_training_mode()
            if augment is not None:
                batch = augment(batch)
            returned = train_step(net, batch, *optimizers)
            if by_batch:
                self._step_schedulers()
            if returned is not None and not isinstance(returned, Mapping):
                raise InputError(f"train_step must return a dict of metrics, not {returned!r}")
            return self._values_of(returned or {})

        return train

    def _update(self) -> None:
        self._pending = 0
        scaler = self._scaler
        if scaler is not None and self._clip_norm is not None:
            for optimizer in self._optimizers:
                scaler.unscale_(optimizer)
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        for optimizer in self._optimizers:
            if scaler is not None:
                scaler.step(optimizer)
            elif self._in_core:
                optimizer_step.make_step(optimizer)
            else:
                optimizer.step()
        if scaler is not None:
            scaler.update()
        self._drop_gradients()

    def _add_new_parameters(self) -> None:
        """Note the parameters of layers that were added in training, in order of their names."""
        ids = {id(parameter) for parameter in self._parameters}
        everything = _all_parameters(self.net, self._optimizers)
        new = [item for item in everything if id(item) not in ids]
        if new:
            for recorded in self._recorded:
                recorded.refuse("layers were added in training")
            self._grown = sorted(
                [*self._grown, *new], key=lambda item: self._names.name_of(item) or ""
            )
            self._parameters[self._built_with :] = self._grown

    def _drop_gradients(self) -> None:
        # Include parameters without an optimizer: their gradients would accumulate, count in
        # clip_norm, and be lost in a hop.
        for parameter in self._parameters:
            parameter.grad = None

    def _step_schedulers(self) -> None:
        self._scheduler_due = False
        for scheduler in self._schedulers:
            scheduler.step()

    def _set_training_mode(self) -> None:
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
        accumulating = list(self._accumulating.values())
        needs_target = bool(metrics or accumulating or self._epoch_metrics)
        weight, net = self._weight, self.net

        def objective(batch: Batch) -> tuple[dict[str, Any], Any, Any, Any]:
            output = forward(batch)
            if loss_function is None:
                target = get_target(batch) if needs_target else None
                loss = loss_of(output)
            else:
                target = get_target(batch)
                loss = loss_function(output, target)
            if weight is None:
                _check_loss(loss, loss_function)
                values: dict[str, Any] = {"loss": loss.detach()}
            else:
                loss, total = weighted_mean(loss, batch, weight, required=net.training)
                values = {"loss": (loss.detach(), total)}
            if metrics:
                with no_grad:
                    for name, metric in metrics:
                        values[name] = metric(output, target)
            for metric in accumulating:
                with no_grad:
                    metric.update(output, target)
            return values, loss, output, target

        return objective

    def _targetless_objective(self, batch: Batch) -> tuple[dict[str, Any], Any, Any, Any]:
        output = self._forward(batch)
        loss = loss_of(output) if self._loss is None else self._loss(output)
        if self._weight is None:
            _check_loss(loss, self._loss)
            values: dict[str, Any] = {"loss": loss.detach()}
        else:
            loss, total = weighted_mean(loss, batch, self._weight, required=self.net.training)
            values = {"loss": (loss.detach(), total)}
        with self._no_grad:
            for name, metric in self._metrics.items():
                values[name] = metric(output)
            for metric in self._accumulating.values():
                metric.update(output)
        return values, loss, output, None

    def _step_objective(self, batch: Batch) -> tuple[dict[str, Any], Any, Any, Any]:
        assert self._step is not None
        returned = self._step(self.net, batch)
        if not isinstance(returned, Mapping) or "loss" not in returned:
            raise InputError(f"step must return a dict with 'loss', not {returned!r}")
        loss = returned["loss"]
        if isinstance(loss, tuple):
            loss = loss[0]
        if self.net.training and not isinstance(loss, torch.Tensor):
            raise InputError(
                f"step returned a loss of type {type(loss).__name__}, with which Cerebro cannot "
                "call backward(): return the tensor itself, without .item(), float() or .numpy()"
            )
        return self._values_of(returned), loss, None, None

    def _values_of(self, returned: Mapping[str, Any]) -> dict[str, Any]:
        """Return a step's values, detached; keep torchmetrics metrics for the end of the epoch."""
        if not self._meters:
            return {name: detach_value(value) for name, value in returned.items()}
        values = {}
        for name, value in flatten_collections(returned):
            if not is_metric(value):
                values[name] = detach_value(value)
                continue
            path = self._meters.name_of(value)
            if path is None:
                raise InputError(
                    f"the step returned a {type(value).__name__} as {name!r}, which is not a part "
                    "of net: make it an attribute of the network"
                )
            self._returned[name] = path
        return values

    def _measure(self, batch: Batch) -> tuple[dict[str, Any], tuple[Any, Any]]:
        if self._train_step is not None and self._step is None and self._loss is None:
            raise InputError(
                "train_step only trains: give step= or loss= for validation, or leave out "
                "the validation data"
            )
        if self.net.training:
            self.net.eval()
        if self._on_gpu:
            batch = self._place_batch(batch)
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

    def _measure_whole(self, parts: Sequence[Any]) -> dict[str, float]:
        outputs, targets = parts
        if self._autocast is not None:  # NumPy and scikit-learn lack bfloat16
            outputs = to_float32(outputs)
        arguments = (outputs,) if self._target is None else (outputs, targets)
        values: dict[str, float] = {}
        for name, metric in self._epoch_metrics.items():
            values.update(extract_numbers(name, self._call(metric, *arguments), metric))
        return values

    def _call(self, metric: Callable[..., Any], *arguments: Any) -> Any:
        with self._no_grad:
            value = metric(*arguments)
        if accumulates(metric):
            reset(metric)  # it would keep all passes
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
        return copy_to_host(output)

    def _join(self, parts: list[Any]) -> Any:
        return join_outputs(parts)

    def _place_batch(self, batch: Batch) -> Batch:
        away = (isinstance(v, torch.Tensor) and not v.is_cuda for v in batch.values())
        return move_batch(batch, self._device) if any(away) else batch

    def _explain_missing_column(self, batch: Batch, with_target: bool = True) -> None:
        """Raise InputError if a KeyError was caused by a column that the batch lacks."""
        if self._step is None:
            check_batch(batch, self._inputs, self._target if with_target else None)


def _make_forward(net: Any, inputs: Columns) -> Callable[[Batch], Any]:
    if isinstance(inputs, str):
        return lambda batch: net(batch[inputs])
    get = make_getter(inputs)
    if isinstance(inputs, Mapping):
        return lambda batch: net(**get(batch))
    return lambda batch: net(*get(batch))


def _check_loss(loss: Any, function: Any) -> None:
    """Raise InputError unless a loss is a tensor; `function` is None if the network computed it."""
    if isinstance(loss, torch.Tensor):
        return
    kind = type(loss).__name__
    if function is None:
        raise InputError(
            "loss=None takes the loss from the network's output, where it must be one tensor, not "
            f"a value of type {kind}: give loss=, or for several values step="
        )
    if isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    raise InputError(
        f"loss must return one tensor, the mean over the batch's rows, but {name} returned a value "
        f"of type {kind}: return the tensor itself; for several values use step="
    )


def _find_metric(step: str, metrics: Mapping[str, Any]) -> float:
    name = step.partition(":")[2] or "loss"
    for key in (f"val_{name}", name, f"train_{name}"):
        if key in metrics:
            return float(metrics[key])
    raise InputError(
        f"scheduler_step={step!r} needs the metric {name!r}, but the epoch has "
        f"{', '.join(metrics) or 'none'}"
    )


def _is_channels_last(weight: Any) -> bool:
    return (
        weight.dim() == 4
        and not weight.is_contiguous()
        and weight.is_contiguous(memory_format=torch.channels_last)
    )


def _all_parameters(net: Any, optimizers: Sequence[Any]) -> list[Any]:
    """Return the network's parameters in order, then any other parameters of the optimizers."""
    parameters = list(net.parameters())
    ids = {id(parameter) for parameter in parameters}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in ids:
                    ids.add(id(parameter))
                    parameters.append(parameter)
    return parameters


def _evaluating_parts(net: Any) -> list[Any]:
    """Return the submodules that `build` put into evaluation mode permanently."""
    return [part for part in net.modules() if not part.training] if net.training else []

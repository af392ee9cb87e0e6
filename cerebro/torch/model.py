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

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cerebro.arguments import TORCH_MODEL, check_optional_real, check_whole_number, explain_keywords
from cerebro.data import Dataset
from cerebro.errors import InputError
from cerebro.machine.devices import build_device
from cerebro.model import (
    Batch,
    Columns,
    Words,
    check_batch,
    check_metrics,
    column_names,
    make_forward,
)
from cerebro.torch import arguments
from cerebro.torch.graph import GraphedStep, StepCapturer
from cerebro.torch.graph_rates import make_capturable
from cerebro.torch.graph_recorder import CudaRecorder
from cerebro.torch.network import Network, TorchModel, is_channels_last, place, to_float32
from cerebro.torch.objective import Meters, Objective, check_column, check_weight
from cerebro.torch.parameter_order import in_own_order
from cerebro.torch.recorded_step import RecordedStep
from cerebro.torch.state import require_parts
from cerebro.torch.step_state import Values
from cerebro.torch.torchmetrics import Metrics
from cerebro.torch.updates import Updates

# Methods that get whole batches if a subclass or a user replaces them.
_SEE_BATCHES = ("train_batch", "eval_batch", "predict_batch", "evaluate")


class Model(TorchModel):
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
        the steps of training and evaluation are captured as CUDA graphs, one for each of up to four
        shapes of batches, which saves the time to launch their kernels one by one. The optimizers
        then have ``capturable=True`` (SGD: ``fused=True``) and read learning rates in single
        precision, even if no step is replayed, so that states differ from those of ``graph=False``;
        `accumulate` is rejected.

        False: ordinary steps, all of them PyTorch's own.
    state
        "all", or "trainable": leave parameters that are frozen from the beginning (a backbone) out
        of states; `build` must then make the same frozen parameters every time. Models share
        those of equal content, see :meth:`cerebro.Info.shared`. Buffers, such
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

    overlaps = True  # other units may run between its batches; see `cerebro.machine.turns`
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
        arguments.check_net(net)
        functions, accumulating = arguments.split_metrics(metrics)
        whole = arguments.name_epoch_metrics(epoch_metrics)
        clip_norm = check_optional_real("clip_norm", clip_norm, above=0)
        accumulate = check_whole_number("accumulate", accumulate, 1, math.inf)
        optimizers = arguments.check_optimizers(optimizer, net, loss)
        schedulers = arguments.check_schedulers(scheduler, optimizers)
        arguments.check_scheduler_step(scheduler_step, schedulers)
        metered = Metrics(
            {"net": net, "loss": loss, **{f"metrics.{name}": m for name, m in accumulating.items()}}
        )
        arguments.check_state(state)
        check_metrics(loss, step, {**functions, **accumulating}, whole)
        graph = arguments.choose_graph(graph)
        arguments.check_graph(graph, amp, metered)
        if train_step is not None:
            arguments.check_train_step(clip_norm, accumulate, amp, graph)
        arguments.check_functions(step=step, train_step=train_step, augment=augment, loss=loss)
        column_names("inputs", inputs)
        column_names("target", target)
        if weight is not None:
            check_weight(weight, loss, step or train_step)
        others = (loss, *functions.values(), *accumulating.values(), *whole.values())
        place(net, optimizers, others, build_device())

        self.net = net
        self._inputs, self._target = inputs, target
        self._step, self._train_step, self._augment = step, train_step, augment
        self._optimizers, self._schedulers = optimizers, schedulers
        self.channels_last = any(map(is_channels_last, net.parameters()))
        self._network = Network(net, loss, optimizers, is_partial=state == "trainable")
        device = self._network.device
        autocast, scaler = arguments.make_amp(amp, device.type)
        self._meters = Meters(metered, accumulating, whole)
        self._objective = Objective(
            net,
            self._make_forward(),
            loss=loss,
            metrics=functions,
            meters=self._meters,
            step=step,
            target=target,
            weight=weight,
            autocast=autocast,
        )
        self._updates = Updates(
            self._network,
            optimizers,
            schedulers,
            scheduler_step=scheduler_step,
            steps_by_update=self._steps_by_update,
            clip_norm=clip_norm,
            accumulate=accumulate,
            scaler=scaler,
            in_core=graph is None and device.type == "cpu",
        )
        self._network.set_training_mode()
        self._recorded: tuple[RecordedStep | GraphedStep, ...] = ()  # training, evaluation
        if graph and device.type == "cuda":
            if accumulate != 1:
                raise InputError("graph=True on a GPU replays whole steps: leave out accumulate")
            make_capturable(optimizers)
            self.capture(CudaRecorder(device))
        elif train_step is not None:
            self._train = self._compile(self._call_train_step)
        else:
            self._train = self._compile(self._take_step)
            if graph and device.type == "cpu":
                self.record()

    @property
    def accumulate(self) -> int:
        """Batches per update; see the argument."""
        return self._updates.accumulate

    def bind_info(self, info: Any) -> None:
        """Check the weights of the training data; note and share what `build` has frozen."""
        self._network.note_flags()
        self._network.share_frozen(info)
        if info is None:
            return
        self._updates.bind_steps(info.steps or [info.steps_per_epoch] * info.epochs)
        weight = self._objective.weight
        if weight is not None and isinstance(info.data, Dataset):
            check_column(info.data, weight)

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
        batch = self._network.place_batch(batch)
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
        if self._network.own_trained():
            for recorded in self._recorded:
                recorded.request_check()
        if self._network.add_new_parameters():
            for recorded in self._recorded:
                recorded.refuse("layers were added in training")
        self._updates.begin_unit(updates)

    def end_unit(self) -> None:
        """Make an update that is still pending: a window of `accumulate` ends with its unit."""
        for recorded in self._recorded:
            recorded.request_check()
        self._updates.end_unit()

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
        computed = self._meters.compute()
        self._meters.reset()
        named = {f"train_{name}": value for name, value in computed.items()}
        self._updates.end_epoch({**named, **metrics})
        return computed

    def eval_batch(self, batch: Batch) -> dict[str, Any]:
        """Return loss and metrics of one batch; the model is not changed.

        Gradients are off, but inference mode is not used: tensors that a network caches in
        inference mode (masks, rotary tables) could not be used in training afterwards.
        """
        if self._recorded:
            self._set_mode(training=False)
            return self._recorded[1](self._network.place_batch(batch))
        if not self._meters:
            return self._measure(batch)[0]
        with self._meters.set_aside():
            return {**self._measure(batch)[0], **self._meters.compute()}

    @property
    def evaluates_whole(self) -> bool:
        """Whether some metrics are not means over batches."""
        return self._meters.needs_outputs or bool(self._meters)

    @property
    def _keeps_outputs(self) -> bool:
        return self._meters.needs_outputs

    def evaluate(self, data: Any, *, batch_size: int | None = None) -> dict[str, float]:
        """Return the loss and all metrics over all rows; see `cerebro.model.BaseModel.evaluate`."""
        with self._meters.set_aside():
            means = super().evaluate(data, batch_size=batch_size)
            return {**means, **self._meters.compute()}

    @property
    def columns_read(self) -> list[str] | None:  # type: ignore[override]
        """The columns of `inputs`, `target` and `weight`; None if user code sees whole batches."""
        if type(self) is not Model or any(name in vars(self) for name in _SEE_BATCHES):
            return None
        if self._step or self._train_step or self._augment:
            return None
        weight = self._objective.weight
        names = [*column_names("inputs", self._inputs), *column_names("target", self._target)]
        return names if weight is None else [*names, weight]

    @property
    def columns_spared(self) -> list[str]:
        """The columns that evaluation can do without: `weight`."""
        weight = self._objective.weight
        return [] if weight is None else [weight]

    @property
    def inputs(self) -> Columns:
        """The network's inputs: a column, a list of columns or a mapping."""
        return self._inputs

    @property
    def replays_graphs(self) -> bool:
        """Whether training replays its steps as CUDA graphs."""
        return bool(self._recorded) and self._network.device.type == "cuda"

    @property
    def held_bytes(self) -> int:
        """The bytes of memory that only this model uses, in addition to its state.

        They belong to recorded steps, and to weights that the state leaves out.
        """
        recorded = sum(step.held_bytes for step in self._recorded)
        return self._network.frozen_bytes + recorded

    def predict_batch(self, batch: Batch) -> Any:
        """Return the network's output for a batch, in evaluation mode, without gradients."""
        self._set_mode(training=False)
        batch = self._network.place_batch(batch)
        try:
            with torch.no_grad():
                return self._objective.predict(batch)
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
        network = self._network
        state = network.weights() | self._updates.state_dict() | network.weights_of_loss()
        if self._meters:
            state["metrics"] = self._meters.state_dict()
        if self._train_step is not None:
            state["gradients"] = network.gradients()
        return state | network.changed_flags()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of an equally built model; its tensors are copied, not kept.

        The model may have its layers and parameter groups in another order: they are found by name.

        Raises
        ------
        StateError
            The state is from a different network or optimizer, or the order differs and the
            parameters cannot be told apart.
        """
        parts = {"net": True, "optimizer": True, "scheduler": self._schedulers}
        require_parts(state, {**parts, "metrics": self._meters, "gradients": self._train_step})
        for recorded in self._recorded:
            recorded.request_check()
        self._updates.forget_pending()
        self._network.load_weights(state)
        state = in_own_order(state, self._optimizers, self._schedulers, self._network.names)
        self._updates.load_state_dict(state)
        if self._meters:
            self._meters.load_state_dict(state["metrics"])
        self._network.load_rest(state)

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.net.parameters())
        kinds = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)
        return f"cerebro.torch.Model({type(self.net).__name__}, {count:,} parameters, {kinds})"

    # --- a training step ------------------------------------------------------

    def _compile(self, take: Callable[[Batch, int], Values]) -> Callable[[Batch], Values]:
        """Return the function that trains on a batch; ``take(batch, phase)`` makes its step."""
        net, updates, augment = self.net, self._updates, self._augment
        # If each batch is an update and no scheduler steps, nothing is left to later batches.
        is_simple = updates.accumulate == 1 and not updates.by_batch

        def train(batch: Batch) -> Values:
            if not net.training:
                self._set_mode(training=True)
            if not is_simple:
                updates.catch_up()
            if augment is not None:
                batch = augment(batch)
            if is_simple:
                return take(batch, 0)
            phase = updates.phase
            values = take(batch, phase)
            updates.end_batch(phase)
            return values

        return train

    def _take_step(self, batch: Batch, phase: int) -> Values:
        values, loss, _, _ = self._objective(batch)
        self._updates.add(loss, phase)
        return values

    def _call_train_step(self, batch: Batch, phase: int) -> Values:
        assert self._train_step is not None
        returned = self._train_step(self.net, batch, *self._optimizers)
        if returned is not None and not isinstance(returned, Mapping):
            raise InputError(f"train_step must return a dict of metrics, not {returned!r}")
        return self._meters.keep_returned(returned or {})

    def _set_mode(self, *, training: bool) -> None:
        """Put the network into a mode, unless it is in it."""
        if training and not self.net.training:
            self._network.set_training_mode()
        elif self.net.training and not training:
            self.net.eval()

    # --- recorded steps -------------------------------------------------------

    @property
    def may_be_recorded(self) -> bool:
        """Whether `graph` was left open, and ``graph=True`` would record this model's steps."""
        updates = self._updates
        is_ordinary = self._train_step is None and not self._meters
        return updates.in_core and updates.scaler is None and is_ordinary

    def record(self) -> None:
        """Record steps from now on, as with ``graph=True``."""
        network = self._network
        self._updates.in_core = False
        gathered = network.parameters if self.accumulate != 1 else ()
        drop = network.drop_gradients
        training = RecordedStep(
            self._take_step,
            "training step",
            network.parts,
            self._optimizers,
            gathered,
            drop,
            is_alone=self.accumulate == 1 and self._augment is None and not self._updates.by_batch,
        )
        evaluation = RecordedStep(
            lambda batch, phase: self._measure(batch)[0], "evaluation", network.parts
        )
        self._recorded = (training, evaluation)
        self._train = self._compile(training)

    def capture(self, recorder: CudaRecorder) -> None:
        """Capture steps as CUDA graphs from now on, as with ``graph=True`` on a GPU."""
        parts, drop = self._network.parts, self._network.drop_gradients
        training = GraphedStep(
            StepCapturer(
                lambda batch: self._take_step(batch, 0), parts, self._optimizers, recorder, drop
            ),
            "training step",
            lambda: self._set_mode(training=True),
            self._updates,
            is_alone=self._augment is None and self._updates.may_step_ahead,
        )
        evaluation = GraphedStep(
            StepCapturer(lambda batch: self._measure(batch)[0], parts, (), recorder, drop),
            "evaluation",
            lambda: self._set_mode(training=False),
            None,
            is_alone=True,
        )
        self._recorded = (training, evaluation)
        self._train = self._compile(training)

    def replays_for(self, step: Any) -> list[Any] | None:
        """Return the recorded steps that may replace calls of `train_batch` or `eval_batch`.

        They are of `_core.Replay`, or of `_core.GraphReplay` on a GPU. The epoch runner runs them
        without Python code. The list changes as steps are recorded or dropped. None: every batch
        needs a call of the method `step`.
        """
        function: Any = getattr(step, "__func__", None)
        number = {Model.train_batch: 0, Model.eval_batch: 1}.get(function)
        if not self._recorded or number is None:
            return None
        recorded = self._recorded[number]
        return recorded.unit.ready if recorded.is_alone else None

    def begin_recorded_unit(self, *, training: bool) -> None:
        """Begin a unit whose steps may be recorded."""
        if not self._recorded:
            return
        at_once = self.replays_for(self.train_batch if training else self.eval_batch) is not None
        if at_once:
            self._set_mode(training=training)
        self._recorded[0 if training else 1].begin_unit(at_once=at_once)

    def end_recorded_unit(self, *, training: bool) -> str | None:
        """Compare the unit's replayed step with the ordinary step, before :meth:`end_unit`.

        Return how they differ; the unit's results may then be wrong. None if they are equal.
        """
        if not self._recorded:
            return None
        pending = self._updates.pending
        how = self._recorded[0 if training else 1].end_unit()
        self._updates.pending = pending
        return how

    def has_failed_replay(self, *, training: bool) -> bool:
        """Return whether an exception in the unit is from a replayed step."""
        return bool(self._recorded) and self._recorded[0 if training else 1].has_failed()

    @property
    def replays(self) -> int:
        """The number of training steps that were replayed without a comparison."""
        return self._recorded[0].replays if self._recorded else 0

    def stop_recording(self) -> None:
        """Take ordinary steps from now on."""
        for recorded in self._recorded:
            recorded.refuse("it has differed from the ordinary step before")

    # --- evaluation and data --------------------------------------------------

    def _count_scheduler_steps(self, epochs: int) -> int | None:
        return self._updates.count_scheduler_steps(epochs)

    def _make_forward(self) -> Callable[[Batch], Any]:
        return make_forward(self.net, self._inputs)

    def _measure(self, batch: Batch) -> tuple[Values, tuple[Any, Any]]:
        if self._train_step is not None and self._step is None and not self._objective.has_loss:
            raise InputError(
                "train_step only trains: give step= or loss= for validation, or leave out "
                "the validation data"
            )
        self._set_mode(training=False)
        batch = self._network.place_batch(batch)
        try:
            with torch.no_grad():
                values, _, output, target = self._objective(batch)
        except KeyError:
            self._explain_missing_column(batch)
            raise
        return values, (output, target)

    def _measure_whole(self, parts: Sequence[Any]) -> dict[str, float]:
        outputs, targets = parts
        if self._objective.autocast is not None:  # NumPy and scikit-learn lack bfloat16
            outputs = to_float32(outputs)
        given = (outputs,) if self._target is None else (outputs, targets)
        return self._meters.compute_whole(*given)

    def _explain_missing_column(self, batch: Batch, with_target: bool = True) -> None:
        """Raise InputError if a KeyError was caused by a column that the batch lacks."""
        if self._step is None:
            check_batch(batch, self._inputs, self._target if with_target else None)

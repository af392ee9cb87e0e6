"""Train a LightningModule exactly as ``lightning.Trainer.fit`` does, bit for bit.

The batches and their order are the same. The order of hooks, updates and schedules is that of
Lightning's loops.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from cerebro.arguments import check_one_of
from cerebro.errors import InputError
from cerebro.integrations.lightning.state import Attributes, ModuleLog
from cerebro.integrations.lightning.trainer import (
    Hooks,
    Options,
    Trainer,
    check_module,
    find_base,
    overrides,
    read_optimizers,
)
from cerebro.model import (
    TARGETS,
    Batch,
    Columns,
    Info,
    Words,
    check_batch,
    column_names,
    make_forward,
    make_getter,
)
from cerebro.torch.network import Network, TorchModel
from cerebro.torch.parameter_order import in_own_order
from cerebro.torch.state import collect_updates, load_updates, require_parts


class WholeBatch(dict[str, Any]):
    """All columns, for steps that look them up, ``batch["x"]``, or unpack them, ``x, y = batch``.

    Iterating gives the values, as a loader's tuples do; everything else is a dict's.
    """

    def __iter__(self) -> Iterator[Any]:
        return iter(self._list_values())

    def __missing__(self, key: Any) -> Any:
        if isinstance(key, int):
            return self._list_values()[key]
        raise KeyError(key)

    def _list_values(self) -> list[Any]:
        """Return the columns in order; refuse a target before inputs, which steps expect first."""
        names = list(self.keys())
        if len(names) > 1 and names[0] in TARGETS:
            raise InputError(
                f"the module's step unpacks its batch, whose first column is the target "
                f"{names[0]!r}: name the columns in the step's order, "
                "cerebro.torch.from_lightning(module, inputs=[...])"
            )
        return list(self.values())


class BatchForm:
    """The form in which a module's steps and ``forward`` get columns; see `from_lightning`."""

    def __init__(self, inputs: Columns | None, forward: Columns | None) -> None:
        if inputs is not None:
            column_names("inputs", inputs)
        if forward is not None:
            column_names("forward", forward)
        elif isinstance(inputs, (str, Mapping)):
            forward = inputs
        elif inputs is not None:
            forward = inputs[0]
        self.inputs, self.forward = inputs, forward
        self.doubt = ""

    def bind_columns(self, module: Any, columns: Sequence[str]) -> None:
        """If nothing says what ``forward`` gets, choose columns by its signature.

        Training does not need them: if they cannot be told, `check_forward` says so.
        """
        if columns and self.inputs is None and self.forward is None:
            try:
                self.forward = _match_columns(module.forward, columns)
            except InputError as error:
                self.doubt = str(error)

    def check_forward(self) -> None:
        """Raise InputError if the signature of ``forward`` does not tell its columns."""
        if self.doubt:
            raise InputError(self.doubt)

    def arrange(self, batch: Batch) -> Any:
        """Return a batch as steps receive it; several columns are a list, as in torch's loader."""
        if self.inputs is None:
            return WholeBatch(batch)
        columns = make_getter(self.inputs)(batch)
        return list(columns) if isinstance(columns, tuple) else columns

    def call(self, net: Any, batch: Batch) -> Any:
        """Call a module with the columns of ``forward``."""
        self.check_forward()
        if self.forward is None:
            return net(batch)
        check_batch(batch, self.forward, None)
        return make_forward(net, self.forward)(batch)

    @contextlib.contextmanager
    def explain_errors(self, batch: Batch) -> Iterator[None]:
        """Raise InputError if a step unpacks another number of columns than the data has."""
        try:
            yield
        except ValueError as error:
            if self.inputs is None and "values to unpack" in str(error):
                names = ", ".join(map(repr, batch))
                raise InputError(
                    f"the module's step unpacks its batch, which has the columns {names}: name "
                    f"those that it takes, cerebro.torch.from_lightning(module, inputs=[...])"
                ) from error
            raise


def _match_columns(forward: Any, columns: Sequence[str]) -> Columns | None:
    """Return the columns that ``forward`` takes by its signature; None for the whole batch.

    Parameters with the names of columns get these; ``forward(batch)`` and ``forward(**batch)`` get
    all; otherwise a single parameter gets the single column that is no target. Raise InputError if
    there are several.
    """
    parameters = inspect.signature(forward).parameters.values()
    named = [
        p.name for p in parameters
        if p.kind is not p.VAR_KEYWORD and p.name in columns
        and (p.default is p.empty or p.name not in TARGETS)  # with its target, it computes a loss
    ]  # fmt: skip
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if named and set(required) <= set(named):
        return {name: name for name in named}
    if required == ["batch"] or not required:
        return None
    inputs = [name for name in columns if name not in TARGETS]
    if len(required) == 1 and len(inputs) == 1:
        return inputs[0]
    raise InputError(
        f"forward({', '.join(required)}) does not tell which of the columns "
        f"{', '.join(map(repr, columns))} it reads: name them, "
        "cerebro.torch.from_lightning(module, forward=...)"
    )


class LightningModel(TorchModel):
    """A LightningModule in a search; see :func:`cerebro.torch.from_lightning`."""

    words = Words(
        "training_step",
        "validation_step",
        "log it in training_step with self.log",
        "log it in validation_step with self.log",
        "make it a buffer of the module with register_buffer",
        by_step=True,
    )
    begins_once = True
    evaluates_whole = True

    def __init__(
        self,
        module: Any,
        inputs: Columns | None,
        forward: Columns | None,
        options: Options,
        state: str,
    ) -> None:
        check_module(module)
        clip_algorithm = options.gradient_clip_algorithm
        check_one_of("precision", options.precision, ("32-true", "bf16-mixed"))
        check_one_of("state", state, ("all", "trainable"))
        check_one_of("gradient_clip_algorithm", clip_algorithm, (None, "norm", "value"))
        if not module.automatic_optimization:
            _check_manual(options)
        self.net = module
        self._form = BatchForm(inputs, forward)
        self._options = options
        self._partial = state == "trainable"
        self._hooks = Hooks(module)
        self._trainer: Trainer | None = None

    # --- before training --------------------------------------------------------

    def bind_info(self, info: Info) -> None:
        """Set the module up for a trial, in the same order as a Trainer."""
        self._form.bind_columns(self.net, list(info.columns or ()))
        module, device, call_hook = self.net, torch.device(info.device), self._hooks.call
        trainer = Trainer(module, info, device, self._options, self._hooks)
        self._trainer = module.trainer = trainer
        self._log = ModuleLog(trainer, self._hooks)
        self._autocast: Any = contextlib.nullcontext()
        if self._options.precision == "bf16-mixed":
            self._autocast = torch.autocast(device.type, dtype=torch.bfloat16)
        for part in module.modules():
            if find_base(part):
                vars(part)["log"] = self._log.log
        call_hook("setup", "fit")
        call_hook("configure_model")
        module.to(device)
        self._optimizers, self._configs = read_optimizers(module, call_hook("configure_optimizers"))
        self._schedulers = tuple(config.scheduler for config in self._configs)
        trainer.set_optimizers(self._optimizers, self._configs)
        self._network = Network(module, None, self._optimizers, is_partial=self._partial)
        self._network.share_frozen(info)
        self._log.find_metrics(module)
        self._attributes = Attributes(module, find_base(module))
        call_hook("on_fit_start")
        call_hook("on_train_start")

    @property
    def _bound_trainer(self) -> Trainer:
        if self._trainer is None:
            raise InputError("the model has not been set up: call bind_info(info) first")
        return self._trainer

    # --- training -----------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        trainer = self._bound_trainer
        trainer.current_epoch, trainer.batch_index = epoch, -1
        self._hooks.call("on_train_epoch_start")
        self._network.own_trained()

    def train_batch(self, batch: Batch) -> dict[str, Any]:
        """Train on one batch; return the step's loss, detached, unless the step returns None."""
        trainer, call_hook = self._bound_trainer, self._hooks.call
        trainer.batch_index += 1
        index = trainer.batch_index
        trainer.read_logs = self._log.train.list_step_values
        try:
            with self._form.explain_errors(batch):
                prepared = self._prepare_batch(batch)
                if call_hook("on_train_batch_start", prepared, index) == -1:
                    raise InputError(
                        "on_train_batch_start returned -1, which ends an epoch in Lightning: "
                        "return None, because every trial of a search trains on all batches"
                    )
                automatic = self.net.automatic_optimization
                take = self._step_automatically if automatic else self._step_manually
                loss, outputs = take(prepared, index)
                self._step_schedulers("step", plateau=False)
                if trainer.is_last_batch:
                    self._step_schedulers("epoch", plateau=False)
                call_hook("on_train_batch_end", outputs, prepared, index)
        finally:
            trainer.read_logs = None
        trainer.callback_metrics.update(self._log.train.list_step_values())
        if not trainer.is_last_batch:
            self._step_schedulers("step", plateau=True)
        return {} if loss is None else {"loss": loss}

    def _step_automatically(self, batch: Any, index: int) -> tuple[Any, Any]:
        """Return the loss, and what the step has returned, with the loss that was scaled."""
        trainer, call_hook = self._bound_trainer, self._hooks.call
        window, optimizer = trainer.accumulate_grad_batches, self._optimizers[0]
        result: tuple[Any, Any] = None, {}

        @torch.enable_grad()  # type: ignore[untyped-decorator]
        def closure() -> Any:
            nonlocal result
            returned = self._training_step(batch, index)
            loss = _loss_of(returned)
            scaled = None if loss is None else loss / window
            if index % window == 0:
                call_hook("on_before_zero_grad", optimizer)
                call_hook("optimizer_zero_grad", trainer.current_epoch, index, optimizer)
            if scaled is None:
                result = None, {}
                return None
            detached = scaled.detach().clone()
            trainer.strategy.backward(scaled, optimizer)
            extra = returned if isinstance(returned, Mapping) else {}
            result = loss.detach(), {**extra, "loss": detached}
            return detached

        if trainer.is_accumulating:
            closure()
        else:
            wrapped = trainer.strategy._lightning_optimizers[0]
            call_hook("optimizer_step", trainer.current_epoch, index, wrapped, closure)
            trainer.count_step()
        return result

    def _step_manually(self, batch: Any, index: int) -> tuple[Any, Any]:
        """Return the loss, or None, and what the step has returned."""
        with torch.enable_grad():
            returned = self._training_step(batch, index)
        outputs = dict(returned) if isinstance(returned, Mapping) else {}
        loss = returned if isinstance(returned, torch.Tensor) else outputs.get("loss")
        if not isinstance(loss, torch.Tensor):
            return None, outputs
        outputs["loss"] = loss.detach()
        return outputs["loss"] if loss.numel() == 1 else None, outputs

    def _training_step(self, batch: Any, index: int) -> Any:
        with self._autocast:
            return self._call_step("training_step", batch, index)

    def _call_step(self, name: str, batch: Any, index: int) -> Any:
        """Call a step with the batch, and with its number if the step takes one."""
        parameters = inspect.signature(getattr(self.net, name)).parameters.values()
        several = any(p.kind is p.VAR_POSITIONAL for p in parameters) or len(parameters) > 1
        return self._hooks.call(name, batch, *([index] if several else []))

    def _step_schedulers(self, interval: str, *, plateau: bool) -> None:
        """Step the schedulers that a Trainer steps now; only with automatic optimization."""
        trainer = self._bound_trainer
        if not self.net.automatic_optimization or (interval == "step" and trainer.is_accumulating):
            return
        count = (trainer.batch_index if interval == "step" else trainer.current_epoch) + 1
        for config in self._configs:
            is_due = config.interval == interval and count % config.frequency == 0
            if config.reduce_on_plateau != plateau or not is_due:
                continue
            value = trainer.callback_metrics.get(config.monitor) if plateau else None
            if plateau and value is None:
                if not config.strict:
                    continue
                names = ", ".join(trainer.callback_metrics) or "nothing"
                raise InputError(
                    f"the scheduler monitors {config.monitor!r}, but the module has logged "
                    f"{names}: log it with self.log, or give the search validation="
                )
            self._hooks.call("lr_scheduler_step", config.scheduler, value)

    def end_epoch(self, epoch: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Call ``on_train_epoch_end``, step epoch schedulers, and return the logged values."""
        trainer = self._bound_trainer
        if not trainer.is_last_batch:  # part of an epoch, as in cerebro.check
            self._step_schedulers("epoch", plateau=False)
        self._step_schedulers("step", plateau=True)
        values = self._log.finish("train", "on_train_epoch_end")
        self._step_schedulers("epoch", plateau=True)
        self._log.train.reset()
        trainer.current_epoch, trainer.batch_index = epoch + 1, -1
        return values

    # --- evaluation -----------------------------------------------------------------

    def evaluate(self, data: Any, *, batch_size: int | None = None) -> dict[str, float]:
        """Run ``validation_step`` on all rows; return the values that the module logs.

        If it logs no loss, the loss is the mean of what the step returns; see `BaseModel.evaluate`.
        """
        if not overrides(self.net, "validation_step"):
            raise InputError(
                f"{type(self.net).__name__} has no validation_step: define it, or leave out the "
                "validation data"
            )
        batches: Any = self._batches(data, batch_size)
        trainer = self._bound_trainer
        trainer.num_val_batches = [len(batches)] if hasattr(batches, "__len__") else []
        # Drop gradients as a Trainer does; older versions have no hook for it.
        is_closed = trainer.batch_index >= 0 and not trainer.is_accumulating
        if is_closed and hasattr(self.net, "on_validation_model_zero_grad"):
            self._hooks.call("on_validation_model_zero_grad")
        with self._evaluating():
            try:
                return self._evaluate(batches)
            finally:
                self._log.val.reset()

    def _evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        call_hook = self._hooks.call
        total = weights = 0.0
        index = -1
        call_hook("on_validation_start")
        call_hook("on_validation_epoch_start")
        for index, batch in enumerate(batches):
            with self._form.explain_errors(batch):
                prepared = self._prepare_batch(batch)
                call_hook("on_validation_batch_start", prepared, index)
                with self._autocast:
                    returned = self._call_step("validation_step", prepared, index)
                call_hook("on_validation_batch_end", returned, prepared, index)
            loss = returned.get("loss") if isinstance(returned, Mapping) else returned
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                total += float(loss) * self._log.rows
                weights += self._log.rows
        if index < 0:
            raise InputError("there are no rows to evaluate")
        values = self._log.finish("val", "on_validation_epoch_end")
        call_hook("on_validation_end")
        return {"loss": total / weights, **values} if weights else values

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [(part, part.training) for part in self.net.modules()]
        trainer = self._bound_trainer
        self.net.eval()
        trainer.validating = True
        try:
            with torch.no_grad():
                yield
        finally:
            for part, mode in modes:
                part.training = mode
            trainer.validating = False

    def predict_batch(self, batch: Batch) -> Any:
        """Return the result of ``predict_step``, or of ``forward`` if it is not defined."""
        with self._evaluating(), self._autocast:
            if overrides(self.net, "predict_step"):
                return self._call_step("predict_step", self._prepare_batch(batch), 0)
            return self._form.call(self.net, self._network.place_batch(batch))

    @property
    def inputs(self) -> Columns:
        """The columns that are passed to ``forward``."""
        self._form.check_forward()
        if self._form.forward is None:
            raise InputError("name the columns of forward: from_lightning(..., forward='x')")
        return self._form.forward

    @property
    def _inputs(self) -> Columns | None:  # type: ignore[override]
        """The columns that predictions read; None: perhaps any."""
        form = self._form
        return None if form.doubt or overrides(self.net, "predict_step") else form.forward

    def _prepare_batch(self, batch: Batch) -> Any:
        """Return a batch as the steps receive it, after the hooks of its transfer."""
        self._log.rows = len(next(iter(batch.values())))
        if self._form.inputs is not None:
            check_batch(batch, self._form.inputs, None)
        prepared = self._form.arrange(self._network.place_batch(batch))
        prepared = self._hooks.call("on_before_batch_transfer", prepared, 0)
        return self._hooks.call("on_after_batch_transfer", prepared, 0)

    # --- state --------------------------------------------------------------------------

    @property
    def batch_schedule(self) -> str | None:
        """The class of a scheduler that steps by batch, whose place is the number of batches."""
        by_step = [c.scheduler for c in self._configs if c.interval == "step"]
        if not self.net.automatic_optimization:
            by_step = list(self._schedulers)  # the module steps them as it likes
        return type(by_step[0]).__name__ if by_step else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state: live tensors, not copies.

        It has the parts of a state of :class:`cerebro.torch.Model`. In addition, ``lightning`` has
        the module's position, logged values and changed attributes, and ``gradients`` has the
        gradients that an unfinished window or the module's ``optimizer_zero_grad`` leaves.
        """
        trainer = self._bound_trainer
        network = self._network
        state = network.weights()
        state |= collect_updates(self._optimizers, self._schedulers, network.names)
        if self._log.metrics:
            state["metrics"] = self._log.metrics.state_dict()
        # Lightning's own optimizer_zero_grad removes gradients. Another may set them to 0, which is
        # not the same for momentum and weight decay.
        keeps_gradients = (
            not self.net.automatic_optimization
            or overrides(self.net, "optimizer_zero_grad")
            or (trainer.batch_index >= 0 and trainer.is_accumulating)
        )
        network.add_new_parameters()
        state["gradients"] = network.gradients() if keeps_gradients else {}
        state["lightning"] = {
            "epoch": trainer.current_epoch,
            "batch": trainer.batch_index,
            "step": trainer.global_step,
            "logged": self._log.train.state_dict(),
            "callback_metrics": {
                name: value
                for name, value in trainer.callback_metrics.items()
                if isinstance(value, torch.Tensor)
            },
            **self._attributes.state_dict(),
        }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of an equally built module; its tensors are copied, not kept."""
        trainer, device = self._bound_trainer, self.net.device
        parts = {"scheduler": self._configs, "metrics": self._log.metrics}
        require_parts(state, {"lightning": True, **parts})
        self._network.load_weights(state)
        state = in_own_order(state, self._optimizers, self._schedulers, self._network.names)
        load_updates(self._optimizers, self._schedulers, state)
        if self._log.metrics:
            self._log.metrics.load_state_dict(state["metrics"])
        self._network.add_new_parameters()
        self._network.load_rest(state)
        of_module = state["lightning"]
        trainer.current_epoch, trainer.global_step = of_module["epoch"], of_module["step"]
        trainer.batch_index = of_module["batch"]
        self._log.train.load_state_dict(of_module["logged"], device)
        trainer.callback_metrics = {
            name: torch.as_tensor(value).to(device, copy=True)
            for name, value in of_module["callback_metrics"].items()
        }
        self._attributes.load_state_dict(of_module)

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.net.parameters())
        return f"cerebro.torch.LightningModel({type(self.net).__name__}, {count:,} parameters)"


def _check_manual(options: Options) -> None:
    """Raise InputError if options need Lightning to make the updates, but the module makes them."""
    if options.gradient_clip_val is not None:
        raise InputError(
            "gradient_clip_val needs automatic optimization: call self.clip_gradients(...) in "
            "training_step"
        )
    if options.accumulate_grad_batches != 1:
        raise InputError(
            "accumulate_grad_batches needs automatic optimization: count batches in training_step"
        )


def _loss_of(returned: Any) -> Any:
    if isinstance(returned, Mapping):
        if returned.get("loss") is None:
            raise InputError("training_step returned a dict without 'loss': add it")
        return returned["loss"]
    if returned is None or isinstance(returned, torch.Tensor):
        return returned
    raise InputError(
        f"training_step must return a tensor, a dict with 'loss' or None, not {returned!r}"
    )

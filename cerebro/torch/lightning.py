"""LightningModules as models: steps, hooks, logged values and optimizers, as in a Trainer.

:func:`from_lightning` trains a module exactly as ``lightning.Trainer.fit`` does with the same
batches in the same order, bit for bit. The order of hooks, updates and schedules is that of
Lightning's loops.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cerebro.arguments import (
    LIGHTNING_WORDS,
    check_one_of,
    check_real_number,
    check_whole_number,
    explain_keywords,
)
from cerebro.data.depots import move_batch
from cerebro.errors import InputError, StateError
from cerebro.model import (
    BaseModel,
    Batch,
    Columns,
    Info,
    Words,
    check_batch,
    column_names,
    make_getter,
)
from cerebro.torch.attributes import Attributes
from cerebro.torch.lightning_trainer import LIGHTNING, Trainer, import_part
from cerebro.torch.logged import Logs
from cerebro.torch.outputs import copy_to_host, join_outputs
from cerebro.torch.parameter_order import (
    ParameterNames,
    in_fixed_order,
    in_own_order,
)
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
from cerebro.torch.torchmetrics import Metrics, extract_numbers, is_metric

_REFUSED = {
    "configure_callbacks": "give callbacks= and stop= to search()",
    "configure_sharded_model": "make the layers in __init__ or configure_model",
    "train_dataloader": "shard the data with cerebro.shard and leave this method out",
    "val_dataloader": "give validation= to search() and leave this method out",
    "transfer_batch_to_device": "batches are on the device already: use on_after_batch_transfer",
    "on_train_end": "a trial may continue later: give search() a callback with on_trial_end",
    "on_fit_end": "a trial may continue later: give search() a callback with on_trial_end",
    "teardown": "a trial may continue later: give search() a callback with on_trial_end",
    "on_validation_model_eval": "do it in on_validation_start",
    "on_validation_model_train": "do it in on_validation_end",
}

_STEP_HOOKS = {
    "training_step", "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad",
    "optimizer_zero_grad", "on_before_backward", "backward", "on_after_backward",
    "on_before_optimizer_step", "optimizer_step", "configure_gradient_clipping",
}  # fmt: skip
"""Hooks in which ``self.log`` by default logs for the step, not for the epoch."""

_PREFIXES = {
    "train": ("train_", "train/", "training_", "training/"),
    "val": ("val_", "val/", "valid_", "valid/", "validation_", "validation/"),
}


@explain_keywords(LIGHTNING_WORDS)
def from_lightning(
    module: Any,
    *,
    inputs: Columns | None = None,
    forward: Columns | None = None,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
    accumulate_grad_batches: int = 1,
    precision: str = "32-true",
    state: str = "all",
) -> LightningModel:
    """Make a model from a LightningModule, without a Trainer.

    Parameters
    ----------
    module
        A ``LightningModule`` of ``lightning`` or ``pytorch_lightning``.
    inputs
        The columns of the batch that the module's steps receive. A list of columns gives a batch
        that steps unpack, ``x, y = batch``; a mapping of keys to columns gives a dict; a name gives
        that column alone. None: a dict of all columns.
    forward
        The columns passed to ``forward`` in :meth:`~cerebro.model.BaseModel.predict`, in the form
        of `inputs` of :class:`cerebro.torch.Model`. None: the first column if `inputs` is a list,
        otherwise all of `inputs`. Not used if the module defines ``predict_step``.
    gradient_clip_val, gradient_clip_algorithm, accumulate_grad_batches
        As in ``lightning.Trainer``. A window of accumulated batches may cross units: its gradients
        move with the trial.
    precision
        "32-true" or "bf16-mixed".
    state
        "all", or "trainable" as in :class:`cerebro.torch.Model`.

    Returns
    -------
    LightningModel
        A model for `build` to return.

    Raises
    ------
    InputError
        The module overrides a method that a search cannot support; the message names it and a fix.
    """
    return LightningModel(
        module,
        inputs,
        forward,
        clip_val=check_real_number("gradient_clip_val", gradient_clip_val, above=0, optional=True),
        clip_algorithm=gradient_clip_algorithm,
        accumulate=check_whole_number("accumulate_grad_batches", accumulate_grad_batches, 1),
        precision=precision,
        state=state,
    )


class LightningModel(BaseModel):
    """A LightningModule in a search; see :func:`from_lightning`."""

    framework = "torch"
    words = Words(
        "training_step",
        "validation_step",
        "log it in training_step with self.log",
        "log it in validation_step with self.log",
        "make it a buffer of the module with register_buffer",
        by_step=True,
    )
    loads_in_place = True
    begins_once = True
    evaluates_whole = True

    def __init__(
        self,
        module: Any,
        inputs: Columns | None,
        forward: Columns | None,
        *,
        clip_val: float | None,
        clip_algorithm: str | None,
        accumulate: int,
        precision: str,
        state: str,
    ) -> None:
        base = _base_of(module)
        _refuse(module, base)
        check_one_of("precision", precision, ("32-true", "bf16-mixed"))
        check_one_of("state", state, ("all", "trainable"))
        check_one_of("gradient_clip_algorithm", clip_algorithm, (None, "norm", "value"))
        if clip_val is not None and not module.automatic_optimization:
            raise InputError(
                "gradient_clip_val needs automatic optimization: call self.clip_gradients(...) in "
                "training_step"
            )
        if accumulate != 1 and not module.automatic_optimization:
            raise InputError(
                "accumulate_grad_batches needs automatic optimization: count batches in "
                "training_step"
            )
        if inputs is not None:
            column_names("inputs", inputs)
        self.net = module
        self._batch_columns = inputs
        self._get_batch = _make_batch_getter(inputs)
        self._forward_columns = _forward_columns(inputs, forward)
        self._options = (accumulate, clip_val, clip_algorithm, precision)
        self._partial = state == "trainable"
        self._predicts = _overrides(module, base, "predict_step")
        self._validates = _overrides(module, base, "validation_step")
        # Lightning's own optimizer_zero_grad removes gradients. Another may set them to 0, which is
        # not the same for momentum and weight decay.
        self._keeps_gradients = _overrides(module, base, "optimizer_zero_grad")
        self._hook_name: str | None = None
        self._rows = 0
        self._trainer: Trainer | None = None

    # --- before training --------------------------------------------------------

    def bind_info(self, info: Info) -> None:
        """Set the module up for a trial, in the same order as a Trainer."""
        module = self.net
        device = torch.device(info.device)
        accumulate, clip_val, clip_algorithm, precision = self._options
        trainer = Trainer(
            module,
            info,
            device,
            accumulate=accumulate,
            clip_val=clip_val,
            clip_algorithm=clip_algorithm,
            precision=precision,
            hook=self._call_hook,
        )
        self._trainer = module.trainer = trainer
        self._autocast: Any = contextlib.nullcontext()
        if precision == "bf16-mixed":
            self._autocast = torch.autocast(device.type, dtype=torch.bfloat16)
        for part in module.modules():
            if _base_of(part, strict=False):
                vars(part)["log"] = self._log
        self._call_hook("setup", "fit")
        self._call_hook("configure_model")
        module.to(device)
        self._optimizers, self._configs = _configure(
            module, self._call_hook("configure_optimizers")
        )
        self._schedulers = tuple(config.scheduler for config in self._configs)
        trainer.optimizers = list(self._optimizers)
        trainer.lr_scheduler_configs = list(self._configs)
        kind = import_part(module, "core.optimizer").LightningOptimizer
        for optimizer in self._optimizers:
            wrapped = kind(optimizer)
            wrapped._strategy = trainer.strategy
            if not module.automatic_optimization:
                wrapped._on_after_step = self._count_step
            trainer.strategy._lightning_optimizers.append(wrapped)
        self._parameters = list(module.parameters())
        self._names = ParameterNames(module)
        self._meters = Metrics({"net": module})
        self._train_logs = Logs(self._meters.name_of, self._meters.metric)
        self._val_logs = Logs(self._meters.name_of, self._meters.metric)
        self._attributes = Attributes(module, _base_of(module))
        self._call_hook("on_fit_start")
        self._call_hook("on_train_start")

    def _count_step(self) -> None:
        self._required_trainer.global_step += 1

    @property
    def _required_trainer(self) -> Trainer:
        if self._trainer is None:
            raise InputError("the model has not been set up: call bind_info(info) first")
        return self._trainer

    # --- training -----------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Call ``on_train_epoch_start``."""
        self._required_trainer.current_epoch = epoch
        self._required_trainer.batch_index = -1
        self._call_hook("on_train_epoch_start")

    def train_batch(self, batch: Batch) -> dict[str, Any]:
        """Train on one batch; return the step's loss, detached, unless the step returns None."""
        trainer = self._required_trainer
        trainer.batch_index += 1
        index = trainer.batch_index
        trainer.read_logs = self._train_logs.list_step_values
        try:
            prepared = self._prepare_batch(batch)
            if self._call_hook("on_train_batch_start", prepared, index) == -1:
                raise InputError(
                    "on_train_batch_start returned -1, which ends an epoch in Lightning: return "
                    "None, because every trial of a search trains on all batches"
                )
            automatic = self.net.automatic_optimization
            take = self._step_automatically if automatic else self._step_manually
            loss, outputs = take(prepared, index)
            if automatic:
                self._step_schedulers("step", plateau=False)
                if trainer.is_last_batch:
                    self._step_schedulers("epoch", plateau=False)
            self._call_hook("on_train_batch_end", outputs, prepared, index)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            self._explain_batch(batch, error)
            raise
        finally:
            trainer.read_logs = None
        trainer.callback_metrics.update(self._train_logs.list_step_values())
        if automatic and not trainer.is_last_batch:
            self._step_schedulers("step", plateau=True)
        return {} if loss is None else {"loss": loss}

    @property
    def _gathers(self) -> bool:
        """Whether the window of ``accumulate_grad_batches`` needs more batches."""
        trainer = self._required_trainer
        count, window = trainer.batch_index + 1, trainer.accumulate_grad_batches
        return count % window != 0 and not trainer.is_last_batch

    def _step_automatically(self, batch: Any, index: int) -> tuple[Any, Any]:
        trainer, window = self._required_trainer, self._required_trainer.accumulate_grad_batches
        optimizer = self._optimizers[0]
        result: list[Any] = [None, {}]

        @torch.enable_grad()  # type: ignore[untyped-decorator]
        def closure() -> Any:
            returned = self._training_step(batch, index)
            loss = _loss_of(returned)
            scaled = None if loss is None else loss / window
            if index % window == 0:
                self._call_hook("on_before_zero_grad", optimizer)
                self._call_hook("optimizer_zero_grad", trainer.current_epoch, index, optimizer)
            if scaled is None:
                result[:] = None, {}
                return None
            detached = scaled.detach().clone()
            trainer.strategy.backward(scaled, optimizer)
            extra = returned if isinstance(returned, Mapping) else {}
            result[:] = loss.detach(), {**extra, "loss": detached}
            return detached

        if self._gathers:
            closure()
        else:
            wrapped = trainer.strategy._lightning_optimizers[0]
            self._call_hook("optimizer_step", trainer.current_epoch, index, wrapped, closure)
            trainer.global_step += 1
        return result[0], result[1]

    def _step_manually(self, batch: Any, index: int) -> tuple[Any, Any]:
        with torch.enable_grad():
            returned = self._training_step(batch, index)
        outputs = dict(returned) if isinstance(returned, Mapping) else {}
        if isinstance(returned, torch.Tensor):
            outputs["loss"] = returned
        if isinstance(outputs.get("loss"), torch.Tensor):
            outputs["loss"] = outputs["loss"].detach()
        loss = outputs.get("loss")
        return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None, outputs

    def _training_step(self, batch: Any, index: int) -> Any:
        with self._autocast:
            return self._call_hook("training_step", *self._arguments("training_step", batch, index))

    def _arguments(self, step: str, batch: Any, index: int) -> tuple[Any, ...]:
        """Return a step's arguments: the batch, and its number if the step takes one."""
        parameters = inspect.signature(getattr(self.net, step)).parameters.values()
        several = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        return (batch, index) if several or len(parameters) > 1 else (batch,)

    def _step_schedulers(self, interval: str, *, plateau: bool) -> None:
        trainer = self._required_trainer
        if not self.net.automatic_optimization or (interval == "step" and self._gathers):
            return
        count = (trainer.batch_index if interval == "step" else trainer.current_epoch) + 1
        for config in self._configs:
            is_due = config.interval == interval and count % config.frequency == 0
            if config.reduce_on_plateau != plateau or not is_due:
                continue
            value = None
            if plateau:
                value = trainer.callback_metrics.get(config.monitor)
                if value is None:
                    if not config.strict:
                        continue
                    names = ", ".join(trainer.callback_metrics) or "nothing"
                    raise InputError(
                        f"the scheduler monitors {config.monitor!r}, but the module has logged "
                        f"{names}: log it with self.log, or give the search validation="
                    )
            self._call_hook("lr_scheduler_step", config.scheduler, value)

    def end_epoch(self, epoch: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Call ``on_train_epoch_end``, step epoch schedulers, and return the logged values."""
        trainer = self._required_trainer
        if not trainer.is_last_batch:  # part of an epoch, as in cerebro.check
            self._step_schedulers("epoch", plateau=False)
        self._step_schedulers("step", plateau=True)
        with self._let_hooks_read(self._train_logs):
            self._call_hook("on_train_epoch_end")
        values = self._close_logs(self._train_logs, "train")
        self._step_schedulers("epoch", plateau=True)
        self._train_logs.reset()
        trainer.batch_index = -1
        trainer.current_epoch = epoch + 1
        return values

    # --- evaluation -----------------------------------------------------------------

    def evaluate(self, data: Any, *, batch_size: int | None = None) -> dict[str, float]:
        """Run ``validation_step`` on all rows; return the values that the module logs.

        If the module logs no loss, the loss is the mean of what the step returns. See
        `cerebro.model.BaseModel.evaluate` for the arguments.
        """
        if not self._validates:
            raise InputError(
                f"{type(self.net).__name__} has no validation_step: define it, or leave out the "
                "validation data"
            )
        batches: Any = self._batches(data, batch_size)
        trainer = self._required_trainer
        trainer.num_val_batches = [len(batches)] if hasattr(batches, "__len__") else []
        if trainer.batch_index >= 0 and not self._gathers:
            self._drop_gradients()
        with self._evaluating():
            try:
                return self._evaluate(batches)
            finally:
                self._val_logs.reset()

    def _drop_gradients(self) -> None:
        """Drop gradients before validation, as a Trainer does."""
        if hasattr(self.net, "on_validation_model_zero_grad"):  # not in older versions
            self._call_hook("on_validation_model_zero_grad")

    def _evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        total = weights = 0.0
        index = -1
        self._call_hook("on_validation_start")
        self._call_hook("on_validation_epoch_start")
        for index, batch in enumerate(batches):
            try:
                prepared = self._prepare_batch(batch)
                self._call_hook("on_validation_batch_start", prepared, index)
                with self._autocast:
                    returned = self._call_hook(
                        "validation_step", *self._arguments("validation_step", prepared, index)
                    )
                self._call_hook("on_validation_batch_end", returned, prepared, index)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                self._explain_batch(batch, error)
                raise
            loss = returned.get("loss") if isinstance(returned, Mapping) else returned
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                total += float(loss) * self._rows
                weights += self._rows
        if index < 0:
            raise InputError("there are no rows to evaluate")
        with self._let_hooks_read(self._val_logs):
            self._call_hook("on_validation_epoch_end")
        values = self._close_logs(self._val_logs, "val")
        self._call_hook("on_validation_end")
        return {"loss": total / weights, **values} if weights else values

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [(part, part.training) for part in self.net.modules()]
        trainer = self._trainer
        self.net.eval()
        if trainer is not None:
            trainer.training, trainer.validating = False, True
        try:
            with torch.no_grad():
                yield
        finally:
            for part, mode in modes:
                part.training = mode
            if trainer is not None:
                trainer.training, trainer.validating = True, False

    def predict_batch(self, batch: Batch) -> Any:
        """Return the result of ``predict_step``, or of ``forward`` if it is not defined."""
        with self._evaluating(), self._autocast:
            if self._predicts:
                return self._call_hook("predict_step", *self._arguments(
                    "predict_step", self._prepare_batch(batch), 0
                ))  # fmt: skip
            batch = self._place_batch(batch)
            columns = self._forward_columns
            if columns is None:
                return self.net(batch)
            check_batch(batch, columns, None)
            arguments = make_getter(columns)(batch)
            if isinstance(columns, str):
                return self.net(arguments)
            return self.net(**arguments) if isinstance(columns, Mapping) else self.net(*arguments)

    @property
    def inputs(self) -> Columns:
        """The columns that are passed to ``forward``."""
        if self._forward_columns is None:
            raise InputError("name the columns of forward: from_lightning(..., forward='x')")
        return self._forward_columns

    @property
    def _inputs(self) -> Columns:  # type: ignore[override]
        return self.inputs

    # --- logged values ---------------------------------------------------------------

    def _log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Replace ``LightningModule.log``; arguments that do not affect values are ignored."""
        hook = self._hook_name
        if hook is None or hook in ("setup", "configure_model", "configure_optimizers"):
            raise InputError(f"self.log({name!r}, ...) works only in steps and hooks")
        if hook == "predict_step":
            raise InputError(f"self.log({name!r}, ...) does not work in predict_step")
        steps = hook in _STEP_HOOKS
        on_step = steps if on_step is None else on_step
        on_epoch = not steps if on_epoch is None else on_epoch
        if not on_step and not on_epoch:
            raise InputError(f"self.log({name!r}, on_step=False, on_epoch=False) logs nothing")
        if not is_metric(value):
            value = self._logged_value(name, value)
        reduce = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
        reduce = "mean" if reduce.lower() == "avg" else reduce.lower()
        if reduce not in ("mean", "sum", "min", "max"):
            raise InputError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): log a torchmetrics.Metric for "
                "anything but mean, sum, min and max"
            )
        by_batch = hook in _STEP_HOOKS or "_batch_" in hook or hook == "validation_step"
        weight = (self._rows if by_batch else 1) if batch_size is None else int(batch_size)
        logs = self._val_logs if self._required_trainer.validating else self._train_logs
        logs.add(
            hook, name, value, weight, reduce=reduce, on_step=on_step, on_epoch=on_epoch
        )  # fmt: skip

    def _logged_value(self, name: str, value: Any) -> Any:
        default = torch.get_default_dtype()
        if isinstance(value, torch.Tensor):
            tensor = value.detach().clone()
        elif isinstance(value, (bool, int, float, np.generic)):
            tensor = torch.tensor(value, device=self.net.device, dtype=default)
        else:
            raise InputError(
                f"self.log({name!r}, ...) needs a number, a tensor or a metric, not a "
                f"{type(value).__name__}"
            )
        if tensor.numel() != 1:
            raise InputError(
                f"self.log({name!r}, ...) needs one number, not a tensor of shape "
                f"{tuple(tensor.shape)}"
            )
        tensor = tensor.squeeze()
        return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(default)

    @contextlib.contextmanager
    def _let_hooks_read(self, logs: Logs) -> Iterator[None]:
        """Let a hook at the end of an epoch read the epoch's values, as a Trainer does."""
        trainer = self._required_trainer
        trainer.read_logs = logs.list_epoch_values
        try:
            yield
        finally:
            trainer.read_logs = None

    def _close_logs(self, logs: Logs, stage: str) -> dict[str, float]:
        """Return an epoch's values by Cerebro's names; store them by Lightning's names."""
        noted = self._required_trainer.callback_metrics
        values: dict[str, float] = {}
        full: dict[str, str] = {}
        for item, value in logs.results():
            noted.update(item.name_value(value))
            prefix = next((p for p in _PREFIXES[stage] if item.name.startswith(p)), "")
            name = item.name.removeprefix(prefix) or item.name
            if full.setdefault(name, item.name) != item.name:
                raise InputError(
                    f"the module logs {full[name]!r} and {item.name!r}, which are both {name!r} in "
                    f"a search, where metrics are called {stage}_{name}: rename one of them"
                )
            values.update(extract_numbers(name, value, item.metric))
        return values

    # --- batches ----------------------------------------------------------------------

    def _call_hook(self, name: str, *args: Any, **kwargs: Any) -> Any:
        before, self._hook_name = self._hook_name, name
        try:
            return getattr(self.net, name)(*args, **kwargs)
        finally:
            self._hook_name = before

    def _prepare_batch(self, batch: Batch) -> Any:
        self._rows = len(next(iter(batch.values())))
        if self._batch_columns is not None:
            check_batch(batch, self._batch_columns, None)
        prepared = self._get_batch(self._place_batch(batch))
        prepared = self._call_hook("on_before_batch_transfer", prepared, 0)
        return self._call_hook("on_after_batch_transfer", prepared, 0)

    def _place_batch(self, batch: Batch) -> Batch:
        device = self.net.device
        if device.type == "cpu":
            return batch
        away = (isinstance(v, torch.Tensor) and v.device != device for v in batch.values())
        return move_batch(batch, device) if any(away) else batch

    def _explain_batch(self, batch: Batch, error: Exception) -> None:
        """Raise InputError if a step failed because it expects a tuple, not a dict of columns."""
        if self._batch_columns is not None or not isinstance(batch, Mapping):
            return
        unpacked = isinstance(error, KeyError) and error.args and isinstance(error.args[0], int)
        if (
            unpacked
            or "'str'" in str(error)
            or "values to unpack" in str(error)
            or "not str" in str(error)
        ):
            names = ", ".join(map(repr, batch))
            raise InputError(
                f"the module's step does not take the batch as a dict of the columns {names}: name "
                f"the columns that it unpacks, from_lightning(module, inputs=[{names}])"
            ) from error

    # --- state --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state: live tensors, not copies.

        It has the parts of a state of :class:`cerebro.torch.Model`. In addition, ``lightning`` has
        the module's position, logged values and changed attributes, and ``gradients`` has the
        gradients that an unfinished window or the module's ``optimizer_zero_grad`` leaves.
        """
        trainer = self._required_trainer
        net = dict(self.net.state_dict())
        if self._partial:
            for name in frozen_names(self.net):
                net.pop(name, None)
        state: dict[str, Any] = {"net": net}
        if self._partial:
            state["partial"] = True
        state["optimizer"] = collect_states(self._optimizer_state, self._optimizers)
        if self._schedulers:
            state["scheduler"] = collect_states(scheduler_state, self._schedulers)
        if self._meters:
            state["metrics"] = self._meters.state_dict()
        is_open = (
            not self.net.automatic_optimization
            or self._keeps_gradients
            or (trainer.batch_index >= 0 and self._gathers)
        )
        self._parameters = list(self.net.parameters())  # some may have been added in training
        state["gradients"] = gradients_of(self._parameters, self._names) if is_open else {}
        state["lightning"] = {
            "epoch": trainer.current_epoch,
            "batch": trainer.batch_index,
            "step": trainer.global_step,
            "logged": self._train_logs.state_dict(),
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
        trainer = self._required_trainer
        for part, there in (
            ("lightning", True),
            ("scheduler", self._schedulers),
            ("metrics", self._meters),
        ):
            if bool(there) != (part in state):
                raise StateError(
                    f"the state has {'no' if there else 'a'} {part!r}, unlike the model that build "
                    "made: build must make the same model from the same configuration"
                )
        load_net(self.net, state["net"], partial=self._partial)
        state = in_own_order(state, self._optimizers, self._schedulers, self._names)
        for optimizer, part in split_state(self._optimizers, state["optimizer"]):
            load_optimizer(optimizer, part)
        for scheduler, part in split_state(self._schedulers, state.get("scheduler")):
            load_scheduler(scheduler, part)
        if self._meters:
            self._meters.load_state_dict(state["metrics"])
        self._parameters = list(self.net.parameters())
        load_gradients(self._parameters, state["gradients"], self._names)
        of_module = state["lightning"]
        trainer.current_epoch = of_module["epoch"]
        trainer.global_step = of_module["step"]
        trainer.batch_index = of_module["batch"]
        self._train_logs.load_state_dict(of_module["logged"], self.net.device)
        trainer.callback_metrics = {
            name: torch.as_tensor(value).to(self.net.device, copy=True)
            for name, value in of_module["callback_metrics"].items()
        }
        self._attributes.load_state_dict(of_module)

    def load_clone(self, state: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """See :meth:`cerebro.torch.Model.load_clone`."""
        state = in_own_order(state, self._optimizers, self._schedulers, self._names)
        load_clone(self.load_state_dict, self._optimizers, self._schedulers, state)

    def _optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return optimizer_state(optimizer, self._names)

    def in_fixed_order(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state of this model in an order that is the same in every process."""
        return in_fixed_order(state, self._optimizers, self._schedulers)

    # --- arrays -------------------------------------------------------------------------

    def _as_array(self, column: Any) -> Any:
        return torch.as_tensor(column)

    def _to_host(self, output: Any) -> Any:
        return copy_to_host(output)

    def _join(self, parts: list[Any]) -> Any:
        return join_outputs(parts)

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.net.parameters())
        return f"cerebro.torch.LightningModel({type(self.net).__name__}, {count:,} parameters)"


def _base_of(module: Any, *, strict: bool = True) -> Any:
    """Return the LightningModule class that the module's class inherits from."""
    for kind in type(module).__mro__:
        if kind.__module__ in LIGHTNING and kind.__name__ == "LightningModule":
            return kind
    if not strict:
        return None
    cure = (
        f": give {module.__name__}(...)"
        if isinstance(module, type)
        else "; for a torch.nn.Module use cerebro.torch.Model"
    )
    raise InputError(f"from_lightning needs a LightningModule, not {module!r}{cure}")


def _overrides(module: Any, base: Any, name: str) -> bool:
    method = getattr(type(module), name, None)
    return name in vars(module) or method is not getattr(base, name, None)


def _refuse(module: Any, base: Any) -> None:
    """Raise InputError if the module has methods that a search does not call as a Trainer does."""
    kind = type(module).__name__
    for name, cure in _REFUSED.items():
        if hasattr(base, name) and _overrides(module, base, name):
            raise InputError(f"{kind} overrides {name}, which a search does not call: {cure}")
    for name in ("training_step", "configure_optimizers"):
        if not _overrides(module, base, name):
            raise InputError(f"{kind} has no {name}: define it")
    for name in ("training_step", "validation_step"):
        names = inspect.signature(getattr(module, name)).parameters
        for argument in ("dataloader_iter", "optimizer_idx"):
            if argument in names:
                raise InputError(
                    f"{kind}.{name} takes {argument}, which a search does not have: take batch and "
                    "batch_idx"
                )
        index = names.get("dataloader_idx")
        if index is not None and index.default is index.empty:
            raise InputError(
                f"{kind}.{name} takes dataloader_idx, but a search has one validation dataset: "
                "give it the default 0"
            )


def _make_batch_getter(columns: Columns | None) -> Any:
    if columns is None:
        return dict
    if isinstance(columns, (str, Mapping)):
        return make_getter(columns)
    names = list(columns)
    return lambda batch: [batch[name] for name in names]  # a list, like torch's collation


def _forward_columns(inputs: Columns | None, forward: Columns | None) -> Columns | None:
    if forward is not None:
        column_names("forward", forward)
        return forward
    if inputs is None or isinstance(inputs, (str, Mapping)):
        return inputs
    return inputs[0]


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


# --- configure_optimizers ---------------------------------------------------------------


def _configure(module: Any, returned: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the optimizers, and the schedulers as Lightning's ``LRSchedulerConfig``."""
    optimizers, schedulers, monitor = _split_returned(returned)
    for optimizer in optimizers:
        if not _is_optimizer(optimizer):
            raise InputError(
                f"configure_optimizers returned {optimizer!r}, which is not a torch.optim.Optimizer"
            )
        optimizer._opt_called = True  # see cerebro.torch.arguments
    if module.automatic_optimization and len(optimizers) > 1:
        raise InputError(
            "configure_optimizers returned several optimizers: set self.automatic_optimization = "
            "False, and step them in training_step with self.optimizers()"
        )
    kind = import_part(module, "utilities.types").LRSchedulerConfig
    configs = []
    for scheduler in schedulers:
        settings = dict(scheduler) if isinstance(scheduler, dict) else {"scheduler": scheduler}
        settings.setdefault("monitor", monitor)
        _check_schedule(settings, optimizers, module.automatic_optimization)
        configs.append(kind(**settings))
    return tuple(optimizers), tuple(configs)


def _split_returned(returned: Any) -> tuple[list[Any], list[Any], str | None]:
    """Return optimizers, schedulers and the monitored metric, from any documented form."""
    if _is_optimizer(returned):
        return [returned], [], None
    if isinstance(returned, dict):
        returned = [returned]
    if isinstance(returned, (list, tuple)) and returned:
        if len(returned) == 2 and isinstance(returned[0], (list, tuple)):
            schedulers = returned[1]
            several = isinstance(schedulers, (list, tuple))
            return list(returned[0]), list(schedulers) if several else [schedulers], None
        if all(isinstance(item, dict) for item in returned):
            for item in returned:
                unknown = item.keys() - {"optimizer", "lr_scheduler", "monitor"}
                if unknown or "optimizer" not in item:
                    raise InputError(
                        "configure_optimizers returned a dict with the keys "
                        f"{', '.join(map(str, item))}: it takes optimizer, lr_scheduler and monitor"
                    )
            monitor = returned[0].get("monitor")
            schedulers = [item["lr_scheduler"] for item in returned if "lr_scheduler" in item]
            return [item["optimizer"] for item in returned], schedulers, monitor
        return list(returned), [], None
    raise InputError(
        f"configure_optimizers returned {returned!r}: return an optimizer, a list of optimizers, "
        "two lists (optimizers and schedulers), or a dict with optimizer and lr_scheduler"
    )


def _is_optimizer(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("step", "state_dict", "param_groups"))


def _check_schedule(settings: dict[str, Any], optimizers: Sequence[Any], automatic: bool) -> None:
    keys = {"scheduler", "name", "interval", "frequency", "reduce_on_plateau", "monitor", "strict"}
    if settings.keys() - keys or "scheduler" not in settings:
        raise InputError(
            f"configure_optimizers: a scheduler's dict has the keys {', '.join(settings)}, but may "
            f"have {', '.join(sorted(keys))}"
        )
    scheduler = settings["scheduler"]
    if not all(hasattr(scheduler, name) for name in ("step", "state_dict", "load_state_dict")):
        raise InputError(f"configure_optimizers: {scheduler!r} is not a learning-rate scheduler")
    name = type(scheduler).__name__
    if not any(getattr(scheduler, "optimizer", None) is item for item in optimizers):
        raise InputError(
            f"configure_optimizers: the {name} belongs to an optimizer that is not returned: "
            "return that optimizer, too"
        )
    if settings.get("interval", "epoch") not in ("epoch", "step"):
        raise InputError(
            f"configure_optimizers: interval={settings['interval']!r} of the {name} must be "
            "'epoch' or 'step'"
        )
    settings["frequency"] = check_whole_number("frequency", settings.get("frequency", 1), 1)
    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    settings.setdefault("reduce_on_plateau", plateau)
    if automatic and settings["reduce_on_plateau"] and settings.get("monitor") is None:
        raise InputError(
            f"configure_optimizers: the {name} needs a metric to follow: add 'monitor': 'val_loss' "
            "to its dict"
        )

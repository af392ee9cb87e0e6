"""A LightningModule's Trainer in a search: checks of the module, its optimizers, `self.trainer`.

`Trainer` has the attributes that modules read from Lightning's Trainer while they train. Reading
any other attribute raises an error that names the attribute.
"""

from __future__ import annotations

import importlib
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cerebro.arguments import check_whole_number
from cerebro.errors import InputError
from cerebro.model import Info

_PLACES = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")
"""The Python modules that define LightningModule."""

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

_KEYS = {"scheduler", "name", "interval", "frequency", "reduce_on_plateau", "monitor", "strict"}
"""The keys of a scheduler's dict."""


def find_base(module: Any) -> Any:
    """Return the LightningModule class that the module's class inherits from, or None."""
    for kind in type(module).__mro__:
        if kind.__module__ in _PLACES and kind.__name__ == "LightningModule":
            return kind
    return None


def import_part(module: Any, name: str) -> Any:
    """Import a part of the package that defines a module's LightningModule."""
    package = find_base(module).__module__.removesuffix(".core.module")
    return importlib.import_module(f"{package}.{name}")


def overrides(module: Any, name: str) -> bool:
    """Return whether a module defines a method itself, rather than Lightning."""
    method = getattr(type(module), name, None)
    return name in vars(module) or method is not getattr(find_base(module), name, None)


def check_module(module: Any) -> None:
    """Raise InputError if the module has methods that a search does not call as a Trainer does."""
    base = find_base(module)
    if base is None:
        cure = (
            f": give {module.__name__}(...)"
            if isinstance(module, type)
            else "; for a torch.nn.Module use cerebro.torch.Model"
        )
        raise InputError(f"from_lightning needs a LightningModule, not {module!r}{cure}")
    kind = type(module).__name__
    for name, cure in _REFUSED.items():
        if hasattr(base, name) and overrides(module, name):
            raise InputError(f"{kind} overrides {name}, which a search does not call: {cure}")
    for name in ("training_step", "configure_optimizers"):
        if not overrides(module, name):
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


# --- configure_optimizers -----------------------------------------------------


def read_optimizers(module: Any, returned: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
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
    if not isinstance(returned, (list, tuple)) or not returned:
        raise InputError(
            f"configure_optimizers returned {returned!r}: return an optimizer, a list of "
            "optimizers, two lists (optimizers and schedulers), or a dict with optimizer and "
            "lr_scheduler"
        )
    if len(returned) == 2 and isinstance(returned[0], (list, tuple)):
        schedulers = returned[1]
        several = isinstance(schedulers, (list, tuple))
        return list(returned[0]), list(schedulers) if several else [schedulers], None
    if not all(isinstance(item, dict) for item in returned):
        return list(returned), [], None
    for item in returned:
        if item.keys() - {"optimizer", "lr_scheduler", "monitor"} or "optimizer" not in item:
            raise InputError(
                "configure_optimizers returned a dict with the keys "
                f"{', '.join(map(str, item))}: it takes optimizer, lr_scheduler and monitor"
            )
    schedulers = [item["lr_scheduler"] for item in returned if "lr_scheduler" in item]
    return [item["optimizer"] for item in returned], schedulers, returned[0].get("monitor")


def _is_optimizer(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("step", "state_dict", "param_groups"))


def _check_schedule(settings: dict[str, Any], optimizers: Sequence[Any], automatic: bool) -> None:
    """Check a scheduler's dict, and complete it."""
    if settings.keys() - _KEYS or "scheduler" not in settings:
        raise InputError(
            f"configure_optimizers: a scheduler's dict has the keys {', '.join(settings)}, but may "
            f"have {', '.join(sorted(_KEYS))}"
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


# --- self.trainer -------------------------------------------------------------

# Missing attributes and what to use instead. The error for other attributes has no advice.
_CURES = {
    "save_checkpoint": "states are kept by the search: trial.load(), trial.export()",
    "fit": "the search trains",
    "validate": "give search(validation=...)",
    "test": "use trial.evaluate(data)",
    "datamodule": "data come from cerebro.shard: read info in build",
    "train_dataloader": "data come from cerebro.shard: use num_training_batches",
    "val_dataloaders": "data come from cerebro.shard",
    "checkpoint_callback": "states are kept by the search",
    "profiler": "profile with Lightning's own Trainer",
    "fit_loop": "use current_epoch, global_step or num_training_batches",
}


@dataclass(frozen=True)
class Options:
    """The arguments of ``lightning.Trainer`` that a search leaves to the user."""

    accumulate_grad_batches: int
    gradient_clip_val: float | None
    gradient_clip_algorithm: str | None
    precision: str


class Hooks:
    """Calls the hooks of a module; `running` is the name of the innermost one, or None."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.running: str | None = None

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        before, self.running = self.running, name
        try:
            return getattr(self._module, name)(*args, **kwargs)
        finally:
            self.running = before


class Clipping:
    """The object ``self.trainer.precision_plugin``."""

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm"
    ) -> None:
        if clip_val <= 0:
            return
        parameters = [item for group in optimizer.param_groups for item in group["params"]]
        if gradient_clip_algorithm == "value":
            torch.nn.utils.clip_grad_value_(parameters, clip_value=clip_val)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, clip_val)


CONSTANTS = {
    **dict.fromkeys(("predicting", "testing", "sanity_checking"), False),
    **dict.fromkeys(("barebones", "fast_dev_run"), False),
    **dict.fromkeys(("min_epochs", "progress_bar_callback", "log_dir"), None),
    **dict.fromkeys(("world_size", "num_devices", "num_nodes"), 1),
    **dict.fromkeys(("global_rank", "local_rank", "node_rank"), 0),
    "is_global_zero": True,
    "max_steps": -1,
    "log_every_n_steps": 50,
    "check_val_every_n_epoch": 1,
    "precision_plugin": Clipping(),
}
"""What a module may read, and what is always the same in a search."""


class Trainer:
    """A stand-in for Lightning's Trainer: the trial's position, and what a module reads.

    It also has the attributes of its `Options`, and those in `CONSTANTS`.
    """

    def __init__(
        self, module: Any, info: Info, device: Any, options: Options, hooks: Hooks
    ) -> None:
        vars(self).update(CONSTANTS, **vars(options), loggers=[], callbacks=[])
        self.lightning_module = self.model = module
        self.current_epoch = self.global_step = 0
        self.batch_index = -1  # index of the last batch in its epoch
        self.max_epochs = info.epochs
        self._steps = list(info.steps) or [info.steps_per_epoch] * info.epochs
        self.num_val_batches: list[float] = []
        self._noted: dict[str, Any] = {}
        self.read_logs: Callable[[], Iterable[tuple[str, Any]]] | None = None
        self.validating = False
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.strategy = Strategy(module, device, hooks)
        self.logger = import_part(module, "loggers.logger").DummyLogger()

    def set_optimizers(self, optimizers: Sequence[Any], schedules: Sequence[Any]) -> None:
        """Note what ``configure_optimizers`` has returned; see `read_optimizers`."""
        module = self.lightning_module
        self.optimizers, self.lr_scheduler_configs = list(optimizers), list(schedules)
        kind = import_part(module, "core.optimizer").LightningOptimizer
        for optimizer in optimizers:
            wrapped = kind(optimizer)
            wrapped._strategy = self.strategy
            if not module.automatic_optimization:
                wrapped._on_after_step = self.count_step
            self.strategy._lightning_optimizers.append(wrapped)

    def count_step(self) -> None:
        self.global_step += 1

    evaluating = property(operator.attrgetter("validating"))

    @property
    def training(self) -> bool:
        return not self.validating

    @property
    def num_training_batches(self) -> int:
        return self._steps[min(self.current_epoch, len(self._steps) - 1)]

    @property
    def estimated_stepping_batches(self) -> int:
        """The number of updates in all epochs."""
        return sum(math.ceil(steps / self.accumulate_grad_batches) for steps in self._steps)

    @property
    def is_last_batch(self) -> bool:
        return self.batch_index + 1 == self.num_training_batches

    @property
    def is_accumulating(self) -> bool:
        """Whether the window of ``accumulate_grad_batches`` needs more batches."""
        is_full = (self.batch_index + 1) % self.accumulate_grad_batches == 0
        return not is_full and not self.is_last_batch

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """The logged values by name, with those that `read_logs` adds."""
        if self.read_logs is not None:
            self._noted.update(self.read_logs())
        return self._noted

    @callback_metrics.setter
    def callback_metrics(self, values: dict[str, Any]) -> None:
        self._noted = values

    logged_metrics = callback_metrics

    @property
    def should_stop(self) -> bool:
        return False

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            raise InputError(
                "the module sets self.trainer.should_stop: a trial ends by search(stop=...) instead"
            )

    def __getattr__(self, name: str) -> Any:
        cure = f": {_CURES[name]}" if name in _CURES else ""
        raise AttributeError(f"self.trainer.{name} does not exist in a Cerebro search{cure}")


class Strategy:
    """The object ``self.trainer.strategy``."""

    def __init__(self, module: Any, device: Any, hooks: Hooks) -> None:
        self.lightning_module = self.model = self._module = module
        self._hooks = hooks
        self.root_device = device
        self.is_global_zero = True
        self._lightning_optimizers: list[Any] = []

    def backward(self, loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._hooks.call("on_before_backward", loss)
        self._module.backward(loss, *args, **kwargs)
        self._hooks.call("on_after_backward")
        return loss.detach()

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Step an optimizer; run the hook and clip gradients between closure and update."""
        module, trainer = self._module, self._module.trainer

        def wrapped() -> Any:
            result = closure()
            self._hooks.call("on_before_optimizer_step", optimizer)
            if module.automatic_optimization:
                self._hooks.call(
                    "configure_gradient_clipping",
                    optimizer,
                    gradient_clip_val=trainer.gradient_clip_val,
                    gradient_clip_algorithm=trainer.gradient_clip_algorithm,
                )
            return result

        return optimizer.step(closure=wrapped, **kwargs)

    def all_gather(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    reduce = all_gather

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because there are no other processes to wait for."""

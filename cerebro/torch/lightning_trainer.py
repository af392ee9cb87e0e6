"""The object that a LightningModule uses as ``self.trainer``: facts, optimizers, backward.

It has the attributes that modules read from Lightning's Trainer while they train. Reading any other
attribute raises an error that names the attribute.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from cerebro.errors import InputError
from cerebro.model import Info

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


class Trainer:
    """A stand-in for Lightning's Trainer; ``hook(name, ...)`` calls a hook of the module."""

    def __init__(
        self,
        module: Any,
        info: Info,
        device: Any,
        *,
        accumulate: int,
        clip_val: float | None,
        clip_algorithm: str | None,
        precision: str,
        hook: Callable[..., Any],
    ) -> None:
        self.lightning_module = self.model = module
        self.current_epoch = self.global_step = 0
        self.batch_index = -1  # index of the last batch in its epoch
        self.max_epochs, self.min_epochs, self.max_steps = info.epochs, None, -1
        self._steps = list(info.steps) or [info.steps_per_epoch] * info.epochs
        self.num_val_batches: list[float] = []
        self.accumulate_grad_batches = accumulate
        self.gradient_clip_val, self.gradient_clip_algorithm = clip_val, clip_algorithm
        self.precision = precision
        self._noted: dict[str, Any] = {}
        self.read_logs: Callable[[], Iterable[tuple[str, Any]]] | None = None
        self.training, self.validating, self.predicting = True, False, False
        self.testing = self.sanity_checking = self.barebones = self.fast_dev_run = False
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.strategy = Strategy(module, device, hook)
        self.precision_plugin = Clipping()
        self.logger = import_part(module, "loggers.logger").DummyLogger()
        self.loggers: list[Any] = []
        self.callbacks: list[Any] = []
        self.progress_bar_callback = self.log_dir = None
        self.is_global_zero = True
        self.world_size = self.num_devices = self.num_nodes = 1
        self.global_rank = self.local_rank = self.node_rank = 0
        self.log_every_n_steps, self.check_val_every_n_epoch = 50, 1

    @property
    def num_training_batches(self) -> int:
        """The number of batches in the current epoch."""
        return self._steps[min(self.current_epoch, len(self._steps) - 1)]

    @property
    def estimated_stepping_batches(self) -> int:
        """The number of updates in all epochs."""
        return sum(math.ceil(steps / self.accumulate_grad_batches) for steps in self._steps)

    @property
    def is_last_batch(self) -> bool:
        return self.batch_index + 1 == self.num_training_batches

    @property
    def evaluating(self) -> bool:
        return self.validating

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """The logged values by name, with those that `read_logs` adds."""
        if self.read_logs is not None:
            self._noted.update(self.read_logs())
        return self._noted

    @callback_metrics.setter
    def callback_metrics(self, values: dict[str, Any]) -> None:
        self._noted = values

    @property
    def logged_metrics(self) -> dict[str, Any]:
        return self.callback_metrics

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

    def __init__(self, module: Any, device: Any, hook: Callable[..., Any]) -> None:
        self.lightning_module = self.model = self._module = module
        self._hook = hook
        self.root_device = device
        self.is_global_zero = True
        self._lightning_optimizers: list[Any] = []

    def backward(self, loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._hook("on_before_backward", loss)
        self._module.backward(loss, *args, **kwargs)
        self._hook("on_after_backward")
        return loss.detach()

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Step an optimizer; run the hook and clip gradients between closure and update."""
        module, trainer = self._module, self._module.trainer

        def wrapped() -> Any:
            result = closure()
            self._hook("on_before_optimizer_step", optimizer)
            if module.automatic_optimization:
                self._hook(
                    "configure_gradient_clipping",
                    optimizer,
                    gradient_clip_val=trainer.gradient_clip_val,
                    gradient_clip_algorithm=trainer.gradient_clip_algorithm,
                )
            return result

        return optimizer.step(closure=wrapped, **kwargs)

    def all_gather(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because there are no other processes to wait for."""


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


def import_part(module: Any, name: str) -> Any:
    """Import a part of the package that defines a module's LightningModule."""
    kinds = (kind.__module__ for kind in type(module).__mro__)
    base = next(kind for kind in kinds if kind in LIGHTNING)
    return importlib.import_module(f"{base.removesuffix('.core.module')}.{name}")


LIGHTNING = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")
"""The Python modules that define LightningModule."""

"""What a LightningModule defines, and whether a search can use it as a Trainer does."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from cerebro.arguments import check_whole_number
from cerebro.errors import InputError

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
    return next(
        (
            kind
            for kind in type(module).__mro__
            if kind.__module__ in _PLACES and kind.__name__ == "LightningModule"
        ),
        None,
    )


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

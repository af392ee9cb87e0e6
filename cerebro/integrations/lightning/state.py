"""The state of a LightningModule besides its parameters: changed attributes, and logged values.

The arithmetic of logged values is Lightning's: in the default floating-point type, on the value's
device, in the order of the calls. A logged ``torchmetrics.Metric`` is computed and reset at the end
of the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cerebro.errors import InputError
from cerebro.integrations.lightning.trainer import Hooks, Trainer
from cerebro.torch.state import copy_deeply
from cerebro.torch.torchmetrics import Metrics, accumulates, extract_numbers, is_metric, last_value

_HPARAMS = {"_hparams", "_hparams_initial", "_hparams_name"}
"""Lightning's own attributes of a module that has called ``save_hyperparameters``."""


class Attributes:
    """A module's modes, frozen flags and plain attributes as built, except those of `base`."""

    def __init__(self, root: Any, base: Any) -> None:
        self._root = root
        self._theirs = {*vars(base()), *_HPARAMS, "log"}
        copies: dict[int, Any] = {}  # modules may share a large tensor
        self._built: dict[str, dict[str, Any]] = {}
        for name, module in self._modules():
            plain = self._built[name] = self._plain_attributes(module)
            for key, value in plain.items():
                if id(value) not in copies:
                    copies[id(value)] = _copy_value(value)
                plain[key] = copies[id(value)]
        self._modes, self._trained = self._read_flags()

    def _modules(self) -> Iterator[tuple[str, Any]]:
        """Yield the modules by path, except metrics."""
        metrics: list[str] = []
        for name, module in self._root.named_modules():
            if name.startswith(tuple(metrics)):
                continue
            if accumulates(module):
                metrics.append(f"{name}.")
            else:
                yield name, module

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes, modes and flags that differ from those that `build` made."""
        changed: dict[str, Any] = {}
        for name, module in self._modules():
            built = self._built.get(name, {})
            now = {
                key: _make_packable(value)
                for key, value in self._plain_attributes(module).items()
                if key not in built or not _are_equal(value, built[key])
            }
            if now:
                changed[name] = now
        modes, trained = self._read_flags()
        return {
            "attributes": changed,
            "modes": {k: mode for k, mode in modes.items() if mode != self._modes.get(k, True)},
            "requires_grad": {k: v for k, v in trained.items() if v != self._trained.get(k, True)},
        }

    def _read_flags(self) -> tuple[dict[str, bool], dict[str, bool]]:
        """Return whether modules are in training mode, and whether parameters are trained."""
        return (
            {name: part.training for name, part in self._root.named_modules()},
            {name: item.requires_grad for name, item in self._root.named_parameters()},
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the attributes, modes and flags in `state`; reset all others."""
        for name, module in self._modules():
            built, current = self._built.get(name, {}), self._plain_attributes(module)
            now = {**built, **state["attributes"].get(name, {})}
            for key in current.keys() - now.keys():
                _remove_attribute(module, key)
            for key, value in now.items():
                loaded = _restore_tuples(value, built.get(key))
                if key not in current or not _are_equal(current[key], loaded):
                    _set_attribute(module, key, _copy_value(loaded))
        for name, part in self._root.named_modules():
            part.training = state["modes"].get(name, self._modes.get(name, True))
        for name, item in self._root.named_parameters():
            trained = state["requires_grad"].get(name, self._trained.get(name, True))
            if item.requires_grad != trained:
                item.requires_grad = trained

    def _plain_attributes(self, module: Any) -> dict[str, Any]:
        """Return a module's own attributes that are numbers, strings, tensors or lists of them."""
        # In PyTorch's layers, names with an underscore are derived from the parameters.
        hidden = "_" if type(module).__module__.split(".")[0] == "torch" else "__"
        derived = _find_derived_names(module)
        values = {
            key: value
            for key, value in vars(module).items()
            if key not in self._theirs
            and key not in derived
            and not key.startswith(hidden)
            and _is_plain(value)
        }
        for key, value in (vars(module).get("_hparams") or {}).items():
            if isinstance(key, str) and _is_plain(value):
                values[f"hparams.{key}"] = value
        return values


def _find_derived_names(module: Any) -> set[Any]:
    """Return the names of tensors that weight norm or pruning computes before each forward."""
    hooks = module._forward_pre_hooks.values()
    names = {getattr(hook, "name", getattr(hook, "_tensor_name", None)) for hook in hooks}
    return {name for name in names if isinstance(name, str)}


def _set_attribute(module: Any, key: str, value: Any) -> None:
    if key.startswith("hparams."):
        vars(module)["_hparams"][key.removeprefix("hparams.")] = value
    elif key in vars(module) or not isinstance(value, torch.Tensor):
        vars(module)[key] = value
    else:
        setattr(module, key, value)


def _remove_attribute(module: Any, key: str) -> None:
    if key.startswith("hparams."):
        del vars(module)["_hparams"][key.removeprefix("hparams.")]
    else:
        delattr(module, key)


def _is_plain(value: Any, depth: int = 6) -> bool:
    if value is None or isinstance(value, (bool, int, float, str)):
        return True
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    if isinstance(value, torch.Tensor):
        is_dense = value.layout is torch.strided and not value.is_meta and not value.is_quantized
        return is_dense and not isinstance(value, torch.nn.Parameter)
    if depth == 0:
        return False
    if isinstance(value, Mapping):
        return type(value) is dict and all(
            isinstance(key, str) and _is_plain(item, depth - 1) for key, item in value.items()
        )
    return type(value) in (list, tuple) and all(_is_plain(item, depth - 1) for item in value)


def _copy_value(value: Any) -> Any:
    """Return a copy of a plain value; unlike `copy_deeply`, keep NumPy's arrays."""
    if isinstance(value, dict):
        return {key: _copy_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_copy_value(item) for item in value])
    return value.copy() if isinstance(value, np.ndarray) else copy_deeply(value)


def _restore_tuples(value: Any, built: Any) -> Any:
    """Return a state's value with tuples where `build` made tuples, because states have lists."""
    if isinstance(built, (list, tuple)) and isinstance(value, list):
        pairs = zip(value, [*built, *[None] * len(value)], strict=False)
        return type(built)([_restore_tuples(item, like) for item, like in pairs])
    if isinstance(built, dict) and isinstance(value, dict):
        return {key: _restore_tuples(item, built.get(key)) for key, item in value.items()}
    return value


def _make_packable(value: Any) -> Any:
    """Return a value with tensors detached, and with lists in place of tuples."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _make_packable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_make_packable(item) for item in value]
    return value


def _are_equal(one: Any, two: Any) -> bool:
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        alike = (one.shape, one.dtype, one.device) == (two.shape, two.dtype, two.device)
        return alike and torch.equal(one, two)
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two)
    if isinstance(one, dict):
        return list(one) == list(two) and all(_are_equal(one[key], two[key]) for key in one)
    if isinstance(one, Sequence) and not isinstance(one, str):
        return len(one) == len(two) and all(map(_are_equal, one, two))
    return bool(one == two) or (one != one and two != two)


# --- logged values --------------------------------------------------------------

_START = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}

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


@dataclass
class Logged:
    """The values that a hook logs under a name: over the epoch so far, and in the last call."""

    name: str
    hook: str
    reduce: str
    on_step: bool
    on_epoch: bool
    metric: Any = None
    value: Any = None
    weight: Any = None
    last: Any = None

    def add(self, value: Any, weight: int) -> None:
        """Add a 0-d tensor, weighted by the number of rows that it covers."""
        if self.value is None:
            start = torch.tensor(_START[self.reduce], dtype=torch.get_default_dtype())
            self.value, self.weight = start.to(value.device), torch.tensor(0).to(value.device)
        self.last = value
        if self.reduce == "mean":
            if weight != 0:  # a mean over no rows is often NaN
                self.value = self.value + value * weight
                self.weight = self.weight + weight
        elif self.reduce == "sum":
            self.value = self.value + value
        else:
            self.value = (torch.min if self.reduce == "min" else torch.max)(self.value, value)

    def result(self) -> Any:
        if self.metric is not None:
            return self.metric.compute()
        return self.value / self.weight if self.reduce == "mean" else self.value

    def name_value(self, value: Any) -> dict[str, Any]:
        """Return the epoch's value by the names that Lightning gives it."""
        names = [self.name, *([f"{self.name}_epoch"] if self.on_step else [])]
        return dict.fromkeys(names, value) if self.on_epoch else {}


_SETTINGS = ("name", "hook", "reduce", "on_step", "on_epoch")
"""The fields of `Logged` that are in a state as they are."""


class Logs:
    """The values logged in an epoch of training, or in a validation pass."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics  # of the module
        self.items: dict[tuple[str, str], Logged] = {}

    def add(self, entry: Logged, value: Any, weight: int) -> None:
        """Add a value, a 0-d tensor or a metric of the module, to the entry of this kind."""
        item = self.items.setdefault((entry.hook, entry.name), entry)
        if not is_metric(value):
            item.add(value, weight)
            return
        if self._metrics.name_of(value) is None:
            raise InputError(
                f"self.log({item.name!r}, ...) has a {type(value).__name__} that is not a part of "
                "the module: make it an attribute"
            )
        item.metric, item.last = value, last_value(value)

    def list_step_values(self) -> Iterator[tuple[str, Any]]:
        """Yield the values of the last step by the names that Lightning gives them."""
        for item in self.items.values():
            if item.on_step and item.last is not None:
                yield item.name, item.last
                if item.on_epoch:
                    yield f"{item.name}_step", item.last

    def list_epoch_values(self) -> Iterator[tuple[str, Any]]:
        """Yield the values over the epoch so far by the names that Lightning gives them."""
        for item in self.items.values():
            yield from item.name_value(item.result()).items()

    def reset(self) -> None:
        """Drop all values and reset the metrics that were logged."""
        for item in self.items.values():
            if item.metric is not None:
                item.metric.reset()
        self.items = {}

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the entries in order, without the values of the last step."""
        entries = []
        for item in self.items.values():
            entry = {key: getattr(item, key) for key in _SETTINGS}
            if item.metric is not None:
                entry["metric"] = self._metrics.name_of(item.metric)
            else:
                entry.update(value=item.value, weight=item.weight)
            item.last = None
            entries.append(entry)
        return entries

    def load_state_dict(self, entries: list[Mapping[str, Any]], device: Any) -> None:
        """Load copies of entries."""
        self.items = {}
        for entry in entries:
            item = Logged(**{key: entry[key] for key in _SETTINGS})
            if "metric" in entry:
                item.metric = self._metrics.metric(entry["metric"])
            else:
                item.value = torch.as_tensor(entry["value"]).to(device, copy=True)
                item.weight = torch.as_tensor(entry["weight"]).to(device, copy=True)
            self.items[item.hook, item.name] = item


class ModuleLog:
    """What ``self.log`` of a module does, and the values that it has logged."""

    def __init__(self, trainer: Trainer, hooks: Hooks) -> None:
        self._trainer, self._hooks = trainer, hooks
        self.rows = 0  # of the present batch

    def find_metrics(self, module: Any) -> None:
        """Find the torchmetrics metrics of a module that has all its layers."""
        self.metrics = Metrics({"net": module})
        self.train, self.val = Logs(self.metrics), Logs(self.metrics)

    def log(
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
        hook = self._hooks.running
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
            value = self._make_scalar(name, value)
        reduce = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
        reduce = "mean" if reduce.lower() == "avg" else reduce.lower()
        if reduce not in _START:
            raise InputError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): log a torchmetrics.Metric for "
                "anything but mean, sum, min and max"
            )
        by_batch = steps or "_batch_" in hook or hook == "validation_step"
        weight = (self.rows if by_batch else 1) if batch_size is None else int(batch_size)
        logs = self.val if self._trainer.validating else self.train
        logs.add(Logged(name, hook, reduce, on_step, on_epoch), value, weight)

    def _make_scalar(self, name: str, value: Any) -> Any:
        """Return a logged number as a 0-d floating-point tensor."""
        default = torch.get_default_dtype()
        if isinstance(value, torch.Tensor):
            tensor = value.detach().clone()
        elif isinstance(value, (bool, int, float, np.generic)):
            device = self._trainer.lightning_module.device
            tensor = torch.tensor(value, device=device, dtype=default)
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

    def finish(self, stage: str, hook: str) -> dict[str, float]:
        """Call the hook at the end of an epoch; return the epoch's values by Cerebro's names.

        Afterwards, the trainer has them by Lightning's names.
        """
        logs = self.train if stage == "train" else self.val
        self._trainer.read_logs = logs.list_epoch_values  # the hook may read them
        try:
            self._hooks.call(hook)
        finally:
            self._trainer.read_logs = None
        noted = self._trainer.callback_metrics
        values: dict[str, float] = {}
        full: dict[str, str] = {}
        for item in logs.items.values():
            value = item.result()
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

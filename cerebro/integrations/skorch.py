"""skorch nets as models: module, criterion and optimizer, trained without skorch's loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import default_collate

from cerebro.arguments import explain_keywords, list_words
from cerebro.errors import InputError
from cerebro.machine.devices import build_device
from cerebro.model import Columns
from cerebro.torch.model import Model

# What to use instead of a skorch callback.
_CALLBACKS = {
    "LRScheduler": "scheduler=, made from net.optimizer_ with make_scheduler",
    "GradientNormClipping": "clip_norm=",
    "EarlyStopping": "search(stop=...)",
    "Checkpoint": "search(keep=...)",
    "EpochScoring": "metrics= or epoch_metrics=",
    "BatchScoring": "metrics=",
    "Freezer": "parameters frozen in the module",
    "Initializer": "weights set in the module",
}

_OF_SKORCH = ("skorch.net", "skorch.classifier", "skorch.regressor")
"""The modules of skorch's nets; others, such as `skorch.hf`, change how nets train."""

_OWN_STEPS = (
    "train_step", "train_step_single", "validation_step", "evaluation_step", "infer",
    "run_single_epoch", "fit_loop", "on_train_begin", "on_epoch_begin", "on_epoch_end",
    "on_batch_begin", "on_batch_end", "on_grad_computed", "on_train_end", "get_dataset",
    "get_iterator", "_default_callbacks",
)  # fmt: skip

WORDS = list_words(
    {
        "net": "model module estimator",
        "make_scheduler": "scheduler lr_scheduler",
        "clip_norm": "gradient_clip_value max_grad_norm",
        "the net has it: set it there": "optimizer criterion loss lr",
        "search() takes it": "epochs max_epochs callbacks batch_size seed",
    }
)


@explain_keywords(WORDS)
def from_skorch(
    net: Any,
    *,
    inputs: Columns = "x",
    target: Columns | None = "y",
    metrics: Mapping[str, Callable[..., Any]] | None = None,
    epoch_metrics: Mapping[str, Callable[..., Any]] | None = None,
    make_scheduler: Callable[[Any], Any] | None = None,
    scheduler_step: str = "epoch",
    clip_norm: float | None = None,
    state: str = "all",
) -> Model:
    """Make a model from a skorch ``NeuralNet``, which need not be initialized and is not changed.

    skorch makes the module, criterion and optimizer from the net's parameters (``module__hidden``,
    ``optimizer__momentum``, ``lr``), and training steps equal skorch's bit for bit. The search
    replaces ``max_epochs``, ``batch_size``, ``train_split``, the iterators, ``device`` and the
    default callbacks.

    Parameters
    ----------
    net
        A ``NeuralNetClassifier``, ``NeuralNetBinaryClassifier``, ``NeuralNetRegressor`` or
        ``NeuralNet``.
    metrics
        As in :class:`cerebro.torch.Model`. None: the accuracy for classifiers, otherwise none.
    make_scheduler
        ``make_scheduler(optimizer)`` returns a learning-rate scheduler.
    inputs, target, epoch_metrics, scheduler_step, clip_norm, state
        As in :class:`cerebro.torch.Model`.

    Returns
    -------
    Model
        A model for `build` to return; its ``net`` is skorch's ``module_``.

    Raises
    ------
    InputError
        The net has its own callbacks, dataset, overridden methods or additional modules, which a
        search does not use.
    """
    _check_net(net)
    copy = _initialize_copy(net)
    scheduler = None if make_scheduler is None else make_scheduler(copy.optimizer_)
    model = Model(
        copy.module_,
        optimizer=copy.optimizer_,
        loss=_Loss(copy),
        metrics=_make_accuracy(copy) if metrics is None else metrics,
        epoch_metrics=epoch_metrics,
        inputs=inputs,
        target=target,
        scheduler=scheduler,
        scheduler_step=scheduler_step,
        clip_norm=clip_norm,
        state=state,
    )
    model._made_by = "from_skorch"
    return model


class _Loss(torch.nn.Module):  # type: ignore[misc]
    """The net's own ``get_loss`` as a module, because the criterion may have weights."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.__name__ = type(net.criterion_).__name__  # for messages
        self.criterion = net.criterion_
        self._net = net
        self._is_binary = _is_a(net, "NeuralNetBinaryClassifier")

    def forward(self, output: Any, target: Any) -> Any:
        if self._is_binary:
            output = _squeeze_logits(output)
        training = torch.is_grad_enabled()
        self.criterion.train(training)
        return self._net.get_loss(output, target, X=_NO_ROWS, training=training)


class _NoRows:
    """What a net's own ``get_loss`` gets as `X`: it may be passed on, but not read."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise InputError(
            "get_loss reads X, which a search does not pass: use cerebro.torch.Model(net.module_, "
            "step=...), whose step gets the batch"
        )

    __getattr__ = __getitem__ = __array__ = __len__ = __iter__ = __torch_function__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __rmatmul__ = __neg__ = __abs__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __contains__ = _refuse
    __hash__ = None  # type: ignore[assignment]


_NO_ROWS = _NoRows()


def _squeeze_logits(output: Any) -> Any:
    """Return logits of shape (rows, 1) in shape (rows,), as the net's ``infer`` does."""
    return output.squeeze(1) if output.dim() == 2 and output.shape[1] == 1 else output


def _accuracy(output: Any, target: Any) -> Any:
    output = output[0] if isinstance(output, tuple) else output  # as the net's predict does
    return (output.argmax(1) == target).float().mean()


def _make_accuracy(net: Any) -> dict[str, Callable[..., Any]]:
    if _is_a(net, "NeuralNetClassifier"):
        return {"accuracy": _accuracy}
    is_binary = _is_a(net, "NeuralNetBinaryClassifier")
    if is_binary and isinstance(net.criterion_, torch.nn.BCEWithLogitsLoss):
        threshold = net.threshold

        def accuracy(output: Any, target: Any) -> Any:
            return ((torch.sigmoid(_squeeze_logits(output)) > threshold) == target).float().mean()

        return {"accuracy": accuracy}
    return {}


def _initialize_copy(net: Any) -> Any:
    """Return a copy of a net, initialized for the model's device."""
    from sklearn.base import clone

    copy = clone(net)
    copy.set_params(device=build_device() or "cpu")
    copy.initialize()
    parts = {"_modules": "module", "_criteria": "criterion", "_optimizers": "optimizer"}
    extra = {name for kind in parts for name in getattr(copy, kind, [])} - set(parts.values())
    if extra:
        raise InputError(
            f"the skorch net has {', '.join(sorted(extra))} in addition to one module, criterion "
            "and optimizer: use cerebro.torch.Model(train_step=...)"
        )
    return copy


def _is_a(net: Any, name: str) -> bool:
    return any(
        kind.__name__ == name and kind.__module__.startswith("skorch.")
        for kind in type(net).__mro__
    )


def _check_net(net: Any) -> None:
    if isinstance(net, type) or not _is_a(net, "NeuralNet"):
        raise InputError(
            f"from_skorch needs a net such as NeuralNetClassifier(module, ...), not {net!r}"
        )
    kind = type(net).__name__
    if net.warm_start:
        raise InputError(f"{kind} has warm_start=True: set the first weights in its module instead")
    for item in net.callbacks or [] if net.callbacks != "disable" else []:
        callback = item[1] if isinstance(item, tuple) else item
        name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
        cure = _CALLBACKS.get(name, "a callback of search()")
        raise InputError(
            f"{kind} has the callback {name}, which a search does not call: use {cure}"
        )
    dataset = net.dataset if isinstance(net.dataset, type) else type(net.dataset)
    is_default = (dataset.__module__, dataset.__name__) == ("skorch.dataset", "Dataset")
    if dataset is not net.dataset or not is_default:
        raise InputError(
            f"{kind} has dataset={dataset.__name__}, which a search does not use: do its work in "
            "cerebro.shard, Dataset.with_transforms, or the module"
        )
    for name, value in net.get_params(deep=False).items():
        changes = name.startswith("iterator_") and name.endswith(("collate_fn", "sampler"))
        if changes and value is not None and value is not default_collate:
            raise InputError(
                f"{kind} has {name}, which a search does not use: do in the module what needs a "
                "batch; rows by weight are cerebro.shard(...).with_sampling(weights=)"
            )
        if name == "iterator_train__drop_last" and value:
            raise InputError(f"{kind} has {name}: give search(drop_last=True) instead")
    for name in _OWN_STEPS:
        owner = next(base for base in type(net).__mro__ if name in vars(base))
        if owner.__module__ not in _OF_SKORCH:
            raise InputError(
                f"{owner.__name__} overrides {name}, which a search does not call: use "
                "cerebro.torch.Model(net.module_, step=...) or train_step="
            )

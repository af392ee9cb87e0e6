"""Hugging Face models, with the arguments of their Trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from cerebro.arguments import explain_keywords, list_words
from cerebro.data import Dataset
from cerebro.errors import InputError
from cerebro.integrations.transformers.arguments import TrainerParts, make_loss
from cerebro.model import Batch, Words, check_batch, make_getter
from cerebro.torch.arguments import check_functions
from cerebro.torch.model import Model
from cerebro.torch.network import join_outputs, to_float32
from cerebro.torch.torchmetrics import extract_numbers

_LABELS = ("label", "label_ids")
"""Columns that the Trainer's collators rename to ``labels``."""

_PADDING = -100
"""The label that losses of transformers ignore; used to pad arrays to equal lengths."""

WORDS = list_words(
    {
        "model": "net module",
        "data_collator": "collator collate_fn",
        "processing_class": "tokenizer",
        "args": "training_args",
        "clip_norm": "max_grad_norm gradient_clip_val",
        "accumulate": "gradient_accumulation_steps accumulate_grad_batches",
        "amp": "bf16 fp16 precision",
        "scheduler": "lr_scheduler",
        "compute_loss_func": "loss loss_func",
        "args=TrainingArguments(...) has it": (
            "lr learning_rate weight_decay warmup_steps warmup_ratio lr_scheduler_type optim"
        ),
        "search() takes epochs=": "num_train_epochs epochs",
        "search() takes the data, as cerebro.search(build, space, data, validation=...)": (
            "train_dataset eval_dataset"
        ),
        "build makes the model: give model=": "model_init",
        "search() takes callbacks= (cerebro.callbacks), and stop=cerebro.EarlyStopping(...)": (
            "callbacks"
        ),
        "search() takes it": "batch_size seed",
        "the model computes its loss from labels": "target",
    }
)


@explain_keywords(WORDS)
def from_transformers(
    model: Any,
    args: Any = None,
    data_collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]] | None = None,
    *,
    processing_class: Any = None,
    compute_loss_func: Callable[..., Any] | None = None,
    optimizers: tuple[Any, Any] = (None, None),
    optimizer_cls_and_kwargs: tuple[Any, Mapping[str, Any]] | None = None,
    compute_metrics: Callable[[Any], Mapping[str, Any]] | None = None,
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    inputs: Mapping[str, str] | None = None,
    augment: Callable[[Batch], Batch] | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scheduler_step: str = "batch",
    clip_norm: float | None = 1.0,
    accumulate: int = 1,
    amp: str | None = None,
    state: str = "all",
) -> Model:
    """Make a model from a ``PreTrainedModel`` or a PEFT model, with the arguments of a Trainer.

    Parameters
    ----------
    model
        The model. It receives the columns that its ``forward`` takes. Without a collator,
        ``attention_mask`` is the mask of a ragged column ``input_ids``, and the loss ignores the
        padding of a ragged column ``labels``.
    args
        ``TrainingArguments``. Optimizer and schedule are those that the Trainer would make; the
        schedule is as long as the trial. It also gives norm of clipping, accumulation, bf16 or
        fp16, label smoothing, activation checkpointing, ``label_names`` and
        ``remove_unused_columns`` (columns that the model does not take do not reach the collator;
        without `args` they do). A warning names those of its fields that are not used, such as
        ``num_train_epochs``; those that would change the trained weights are refused by name.
    data_collator
        A data collator, such as ``DataCollatorWithPadding`` or
        ``DataCollatorForLanguageModeling``: called in training and in validation with the batch's
        rows, each a dict of lists and numbers. Its random numbers come from the trial's
        generators. Tensors that it returns, also in lists, tuples and dicts, are moved to the
        model's device; other values reach the model as they are.
    processing_class
        A tokenizer or feature extractor: without `data_collator`, rows are padded by a
        ``DataCollatorWithPadding`` of it.
    compute_loss_func
        ``compute_loss_func(outputs, labels, num_items_in_batch=) -> 0-d tensor``, in place of the
        model's loss, in training and in validation. `num_items_in_batch` is the number of the
        batch's labels, also with accumulation.
    optimizers
        ``(optimizer, scheduler)``; what is None is made from `args`, or left out without it.
    optimizer_cls_and_kwargs
        The class of the optimizer and its keywords, in place of ``optim`` in `args`.
    compute_metrics
        ``compute_metrics(EvalPrediction) -> dict``: called once per validation pass with the
        logits and labels of all rows, as NumPy arrays; shorter batches are padded with -100. An
        output that is one number per batch, such as a loss, becomes an array with one entry per
        batch. If a metric's name has the prefix ``eval_``, the prefix is dropped.
    preprocess_logits_for_metrics
        ``preprocess_logits_for_metrics(logits, labels)``: called for each validation batch, with
        tensors; `compute_metrics` gets what it returns instead of the logits. Without it, all
        logits of the validation rows are kept in memory: for a language model, rows x tokens x
        words of the vocabulary.
    inputs
        A mapping of the model's keywords to columns, if their names differ.
    optimizer, scheduler
        The two of `optimizers`.
    clip_norm, accumulate, amp
        ``max_grad_norm`` (with the Trainer's default), ``gradient_accumulation_steps``, and "bf16"
        or "fp16", where there are no `args`; as in :class:`cerebro.torch.Model`.
    scheduler_step
        As in :class:`cerebro.torch.Model`, but "batch" is the default, and means after every
        update, as in the Trainer: with `accumulate`, once for each window of batches. The length of
        the schedule is then the number of updates. ``info.total_steps`` is the number of batches,
        which is the same only without `accumulate`: with ``accumulate=k`` there are ``info.epochs *
        max(1, round(info.steps_per_epoch / k))`` updates (with ``shuffle="shards"``, about so many:
        each group of shards has its own).
    augment, state
        As in :class:`cerebro.torch.Model`. With PEFT, ``state="trainable"`` leaves the frozen
        weights out of states.

    Returns
    -------
    Model
        A model for `build` to return.

    Raises
    ------
    InputError
        An argument is invalid; the message says which and why.
    """
    _check_arguments(model, data_collator, compute_metrics, preprocess_logits_for_metrics)
    check_functions(compute_loss_func=compute_loss_func)
    options = {"clip_norm": clip_norm, "accumulate": accumulate, "amp": amp}
    optimizer, scheduler = _choose_pair(optimizers, optimizer, scheduler)
    parts = None
    if args is not None:
        if options != {"clip_norm": 1.0, "accumulate": 1, "amp": None}:
            raise InputError(
                "args has max_grad_norm, gradient_accumulation_steps, bf16 and fp16: set them "
                "there, and leave out clip_norm, accumulate and amp"
            )
        if scheduler is None and scheduler_step != "batch":
            raise InputError(
                "the schedule of args steps after every update: leave out scheduler_step"
            )
        parts = TrainerParts(model, args, optimizer_cls_and_kwargs)
        parts.set_checkpointing()
        options = parts.options
    if optimizer_cls_and_kwargs is not None and (args is None or optimizer is not None):
        raise InputError("optimizer_cls_and_kwargs needs args=, and no optimizer beside it")
    if optimizer is None:
        if parts is None:
            raise InputError(
                "give args=TrainingArguments(...) or optimizers=(optimizer, scheduler)"
            )
        optimizer = parts.make_optimizer()
    collator = data_collator
    if processing_class is not None:
        collator = collator or _make_padding(processing_class)
        _align_tokens(model, processing_class)
    return TransformersModel(
        model,
        collator,
        compute_metrics,
        preprocess_logits_for_metrics,
        inputs,
        loss=make_loss(_get_base(model), args, compute_loss_func),
        args=args,
        schedule=None if parts is None or scheduler is not None else parts.make_schedule,
        optimizer=optimizer,
        augment=augment,
        scheduler=scheduler,
        scheduler_step=scheduler_step,
        state=state,
        **options,
    )


class TransformersModel(Model):
    """A Hugging Face model in a search; see :func:`from_transformers`."""

    _steps_by_update = True

    def __init__(
        self,
        model: Any,
        collator: Any,
        compute_metrics: Any,
        preprocess: Any,
        inputs: Mapping[str, str] | None,
        *,
        loss: Callable[[Any, Any], Any] | None,
        args: Any,
        schedule: Callable[[Any, int], Any] | None,
        **options: Any,
    ) -> None:
        self._collator, self._renamed = collator, inputs
        self._compute_metrics, self._preprocess = compute_metrics, preprocess
        self._compute_loss, self._make_schedule = loss, schedule
        self._accepted = list(inspect.signature(_get_base(model).forward).parameters)
        self._labels = getattr(args, "label_names", None) or (
            [name for name in self._accepted if "label" in name]
            or [name for name in self._accepted if name in ("start_positions", "end_positions")]
        )
        removes = collator is None or (args is not None and args.remove_unused_columns)
        self._kept = {*self._accepted, *self._labels, *_LABELS} if removes else None
        self._columns: list[str] | None = None
        # Do not record steps: nobody has promised that they do the same for every batch.
        super().__init__(model, inputs=inputs or "input_ids", target=None, graph=False, **options)

    @property
    def words(self) -> Words:  # type: ignore[override]
        give = "" if self._compute_metrics is not None else "give compute_metrics= and "
        validation = f"{give}return it from compute_metrics"
        training = f"give validation=, because training reports only the loss, and {validation}"
        return Words("training step", "validation", training, validation, by_step=True)

    @property
    def declares_metrics(self) -> bool:  # type: ignore[override]
        return self._compute_metrics is None

    @property
    def columns_read(self) -> list[str] | None:  # type: ignore[override]
        """The columns of the trial's data that the model takes; None if a collator gets all."""
        return self._columns

    def bind_info(self, info: Any) -> None:
        """Make the schedule of `args`, as long as the trial; note which columns are read."""
        super().bind_info(info)
        if info is None:
            return
        if self._make_schedule is not None:
            self._schedulers = self._updates.make_schedule(self._make_schedule)
            self._make_schedule = None
            self._train = self._compile(self._take_step)  # as one that steps a schedule
        if self._kept is not None and self._augment is None and isinstance(info.data, Dataset):
            kept = self._kept if self._renamed is None else self._renamed.values()
            self._columns = [name for name in info.data.columns if name in kept] or None

    def train_batch(self, batch: Batch) -> dict[str, Any]:
        if self._make_schedule is not None:
            raise InputError(
                "the schedule of args has no length yet: a search calls bind_info(info) first"
            )
        return super().train_batch(self._collate(batch))

    def eval_batch(self, batch: Batch) -> dict[str, Any]:
        """Return the loss and the result of `compute_metrics` for one batch."""
        return dict(self.evaluate([batch]))

    def predict_batch(self, batch: Batch) -> Any:
        return super().predict_batch(self._collate(batch))

    @property
    def evaluates_whole(self) -> bool:
        """Whether `compute_metrics` needs all outputs."""
        return self._compute_metrics is not None or super().evaluates_whole

    @property
    def _keeps_outputs(self) -> bool:
        return self._compute_metrics is not None

    def _make_forward(self) -> Any:
        if self._compute_loss is None:
            return lambda batch: self.net(**batch)
        compute_loss = self._compute_loss

        def forward(batch: Batch) -> Any:
            inputs = dict(batch)
            labels = inputs.pop("labels", None)
            output = self.net(**inputs)
            if labels is not None:
                output["loss"] = compute_loss(output, labels)
            return output

        return forward

    def _measure(self, batch: Batch) -> tuple[dict[str, Any], tuple[Any, Any]]:
        collated = self._collate(batch)
        values, (output, _) = super()._measure(collated)
        if self._compute_metrics is None:
            return values, (None, None)
        labels: Any = tuple(collated[name] for name in self._labels if name in collated)
        labels = labels[0] if len(labels) == 1 else labels
        logits = _select_logits(output, self.net)
        if self._preprocess is not None:
            with torch.no_grad():
                logits = self._preprocess(logits, None if labels == () else labels)
        return values, (logits, labels)

    def _measure_whole(self, parts: Sequence[Any]) -> dict[str, float]:
        from transformers import EvalPrediction

        logits, labels = (_to_arrays(part) for part in parts)
        returned = self._compute_metrics(EvalPrediction(predictions=logits, label_ids=labels))
        if not isinstance(returned, Mapping):
            raise InputError(f"compute_metrics must return a dict, not {returned!r}")
        values: dict[str, float] = {}
        for name, value in returned.items():
            values.update(extract_numbers(name.removeprefix("eval_"), value))
        return values

    def _join(self, parts: list[Any]) -> Any:
        if self._compute_metrics is None or isinstance(parts[0], Mapping):
            return join_outputs(parts)
        if isinstance(parts[0], tuple):
            return tuple(self._join(list(part)) for part in zip(*parts, strict=True))
        return torch.cat(_pad_parts([torch.atleast_1d(part) for part in parts]))

    def _explain_missing_column(self, batch: Batch, with_target: bool = True) -> None:
        """Do nothing: the columns are checked before they are collated."""

    # --- the batch of a model -----------------------------------------------------

    def _collate(self, batch: Batch) -> Batch:
        """Return the batch as keyword arguments of the model's ``forward``."""
        if self._renamed is not None:
            check_batch(batch, self._renamed, None)
            masks = {
                f"{key}_mask": batch[f"{column}_mask"]
                for key, column in self._renamed.items()
                if f"{column}_mask" in batch
            }
            batch = {**make_getter(self._renamed)(batch), **masks}
        if self._collator is None:
            batch = _widen_integers(_remove_masks(batch))
        else:
            rows = _split_rows(batch, self._kept if self._renamed is None else None)
            batch = _move_to_device(dict(self._collator(rows)), self._network.device)
        for name in _LABELS:
            if name in batch and "labels" in self._accepted and name not in self._accepted:
                batch = {"labels" if key == name else key: v for key, v in batch.items()}
        arguments = {name: value for name, value in batch.items() if name in self._accepted}
        if not arguments:
            raise InputError(
                f"none of the columns {', '.join(batch)} is an argument of the model's forward: "
                'name them, inputs={"input_ids": "text"}'
            )
        return arguments


def _widen_integers(batch: Batch) -> Batch:
    """Return a batch whose small integers are int64, as the Trainer's default collator makes them.

    The datasets library stores token types as int8, which no embedding takes.
    """
    small = (torch.int8, torch.int16, torch.int32)
    return {n: v.long() if getattr(v, "dtype", None) in small else v for n, v in batch.items()}


def _get_base(model: Any) -> Any:
    """Return the model inside of a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _choose_pair(optimizers: Any, optimizer: Any, scheduler: Any) -> tuple[Any, Any]:
    """Return optimizer and scheduler, given as the Trainer's pair or by name."""
    if not isinstance(optimizers, (tuple, list)) or len(optimizers) != 2:
        raise InputError(f"optimizers must be (optimizer, scheduler), not {optimizers!r}")
    pair = []
    for name, one, other in zip(
        ("optimizer", "scheduler"), optimizers, (optimizer, scheduler), strict=True
    ):
        if one is not None and other is not None:
            raise InputError(f"optimizers has the {name}: leave out {name}=")
        pair.append(other if one is None else one)
    return pair[0], pair[1]


def _make_padding(processing_class: Any) -> Any:
    """Return the Trainer's default collator; None if rows need no padding."""
    from transformers import (
        DataCollatorWithPadding,
        PreTrainedTokenizerBase,
        SequenceFeatureExtractor,
    )

    pads = isinstance(processing_class, (PreTrainedTokenizerBase, SequenceFeatureExtractor))
    return DataCollatorWithPadding(processing_class) if pads else None


def _align_tokens(model: Any, processing_class: Any) -> None:
    """Give the model's configuration the tokenizer's special tokens, as the Trainer does."""
    from transformers import PreTrainedTokenizerBase, trainer_utils

    align = getattr(trainer_utils, "align_special_tokens", None)
    if align and isinstance(processing_class, PreTrainedTokenizerBase) and hasattr(model, "config"):
        align(model, processing_class)


def _move_to_device(value: Any, device: Any) -> Any:
    """Return a collator's value with its tensors on `device`, as with the Trainer."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return type(value)({key: _move_to_device(item, device) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_move_to_device(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_move_to_device(item, device) for item in value)
    return value


def _check_arguments(model: Any, collator: Any, compute_metrics: Any, preprocess: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"model must be a model of transformers, not {model!r}")
    functions = {"data_collator": collator, "compute_metrics": compute_metrics}
    check_functions(**functions, preprocess_logits_for_metrics=preprocess)
    if preprocess is not None and compute_metrics is None:
        raise InputError(
            "preprocess_logits_for_metrics changes what compute_metrics gets: give compute_metrics="
        )
    if getattr(collator, "seed", None) is not None:
        raise InputError(
            f"the {type(collator).__name__} has a seed, so that its generator does not move with "
            "the trial: leave seed out, and it draws from the trial's generators"
        )


def _remove_masks(batch: Batch) -> Batch:
    """Drop masks: padded labels become -100; ``input_ids_mask`` becomes ``attention_mask``."""
    columns = {}
    for name, value in batch.items():
        if name.endswith("_mask") and name.removesuffix("_mask") in batch:
            continue
        mask = batch.get(f"{name}_mask")
        if mask is not None and name in ("labels", *_LABELS):
            value = value.masked_fill(~mask.bool(), _PADDING)
        columns[name] = value
        if mask is not None and name == "input_ids" and "attention_mask" not in batch:
            columns["attention_mask"] = mask.to(value.dtype)
    return columns


def _split_rows(batch: Batch, kept: Set[str] | None) -> list[dict[str, Any]]:
    """Return a dict of lists and numbers for each row, without padding.

    `kept` has the names of the columns; None: all.
    """
    columns = {}
    for name, value in batch.items():
        if name.endswith("_mask") and name.removesuffix("_mask") in batch:
            continue
        if kept is not None and name not in kept:
            continue
        rows = value.tolist()
        mask = batch.get(f"{name}_mask")
        if mask is not None:
            lengths = mask.sum(1).tolist()
            rows = [row[: int(length)] for row, length in zip(rows, lengths, strict=True)]
        columns[name] = rows
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _select_logits(output: Any, net: Any) -> Any:
    """Return a model's outputs without loss and caches: one tensor, or a tuple of them."""
    ignored = getattr(getattr(net, "config", None), "keys_to_ignore_at_inference", None) or []
    # Some configurations do not name the caches of keys and values, so check types, too.
    outputs = tuple(
        value
        for key, value in output.items()
        if key not in ("loss", *ignored) and isinstance(value, (torch.Tensor, tuple))
    )
    return outputs[0] if len(outputs) == 1 else outputs


def _pad_parts(parts: list[Any]) -> list[Any]:
    """Return tensors, padded with -100 to the same size in their second dimension."""
    if parts[0].dim() < 2 or len({part.shape[1] for part in parts}) == 1:
        return parts
    longest = max(part.shape[1] for part in parts)
    padded = []
    for part in parts:
        shape = (part.shape[0], longest, *part.shape[2:])
        filled = part.new_full(shape, _PADDING)
        filled[:, : part.shape[1]] = part
        padded.append(filled)
    return padded


def _to_arrays(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_to_arrays(item) for item in value)
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    return to_float32(value).cpu().numpy()

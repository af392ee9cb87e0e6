"""Hugging Face models, with their Trainer's collator and functions for metrics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cerebro.arguments import explain_keywords, list_words
from cerebro.errors import InputError
from cerebro.model import Batch, Words, check_batch, make_getter
from cerebro.torch.arguments import check_functions
from cerebro.torch.model import Model
from cerebro.torch.network import join_outputs, to_float32
from cerebro.torch.torchmetrics import extract_numbers

_PADDING = -100
"""The label that losses of transformers ignore; used to pad arrays to equal lengths."""

WORDS = list_words(
    {
        "model": "net module",
        "collator": "data_collator collate_fn",
        "clip_norm": "max_grad_norm gradient_clip_val",
        "accumulate": "gradient_accumulation_steps accumulate_grad_batches",
        "amp": "bf16 fp16 precision",
        "scheduler": "lr_scheduler lr_scheduler_type",
        "give it to the optimizer: torch.optim.AdamW(model.parameters(), lr=...)": (
            "lr learning_rate weight_decay"
        ),
        "search() takes epochs=": "num_train_epochs epochs",
        "search() takes the data": "train_dataset eval_dataset",
        "give optimizer=, scheduler=, clip_norm=, accumulate= and amp=": "args training_args",
        "give it to the collator": "tokenizer processing_class",
        "build makes the model: give model=": "model_init",
        "give optimizer= and scheduler=": "optimizers optimizer_cls_and_kwargs",
        "search() takes it": "callbacks batch_size seed",
        "the model computes its loss from labels": "loss target compute_loss_func",
    }
)


@explain_keywords(WORDS)
def from_transformers(
    model: Any,
    *,
    optimizer: Any,
    collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]] | None = None,
    compute_metrics: Callable[[Any], Mapping[str, Any]] | None = None,
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    inputs: Mapping[str, str] | None = None,
    augment: Callable[[Batch], Batch] | None = None,
    scheduler: Any = None,
    scheduler_step: str = "batch",
    clip_norm: float | None = 1.0,
    accumulate: int = 1,
    amp: str | None = None,
    state: str = "all",
) -> Model:
    """Make a model from a ``PreTrainedModel`` or a PEFT model, which computes its own loss.

    Parameters
    ----------
    model
        The model. It receives the columns that its ``forward`` takes. Without a collator,
        ``attention_mask`` is the mask of a ragged column ``input_ids``, and the loss ignores the
        padding of a ragged column ``labels``.
    optimizer
        A `torch.optim.Optimizer` over the model's parameters.
    collator
        A data collator, such as ``DataCollatorWithPadding`` or
        ``DataCollatorForLanguageModeling``: called in training and in validation with the batch's
        rows, each a dict of lists and numbers. Its random numbers come from the trial's
        generators. Tensors that it returns, also in lists, tuples and dicts, are moved to the
        model's device; other values reach the model as they are.
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
    clip_norm
        Like ``max_grad_norm`` of the Trainer, with the same default.
    scheduler_step
        As in :class:`cerebro.torch.Model`, but "batch" is the default, and means after every
        update, as in the Trainer: with `accumulate`, once for each window of batches. The length of
        the schedule is then the number of updates. ``info.total_steps`` is the number of batches,
        which is the same only without `accumulate`: with ``accumulate=k`` there are ``info.epochs *
        max(1, round(info.steps_per_epoch / k))`` updates (with ``shuffle="shards"``, about so many:
        each group of shards has its own).
    augment, scheduler, accumulate, amp, state
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
    return TransformersModel(
        model,
        collator,
        compute_metrics,
        preprocess_logits_for_metrics,
        inputs,
        optimizer=optimizer,
        augment=augment,
        scheduler=scheduler,
        scheduler_step=scheduler_step,
        clip_norm=clip_norm,
        accumulate=accumulate,
        amp=amp,
        state=state,
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
        **options: Any,
    ) -> None:
        _check_arguments(model, collator, compute_metrics, preprocess)
        self._collator, self._renamed = collator, inputs
        self._compute_metrics, self._preprocess = compute_metrics, preprocess
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._accepted = list(inspect.signature(base.forward).parameters)
        self._labels = [name for name in self._accepted if "label" in name] or [
            name for name in self._accepted if name in ("start_positions", "end_positions")
        ]
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

    def train_batch(self, batch: Batch) -> dict[str, Any]:
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
        return lambda batch: self.net(**batch)

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
            batch = _remove_masks(batch)
        else:
            batch = _move_to_device(dict(self._collator(_split_rows(batch))), self._network.device)
        for name in ("label", "label_ids"):
            if name in batch and "labels" in self._accepted and name not in self._accepted:
                batch = {"labels" if key == name else key: v for key, v in batch.items()}
        arguments = {name: value for name, value in batch.items() if name in self._accepted}
        if not arguments:
            raise InputError(
                f"none of the columns {', '.join(batch)} is an argument of the model's forward: "
                'name them, inputs={"input_ids": "text"}'
            )
        return arguments


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
    functions = {"collator": collator, "compute_metrics": compute_metrics}
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
        if mask is not None and name in ("labels", "label", "label_ids"):
            value = value.masked_fill(~mask.bool(), _PADDING)
        columns[name] = value
        if mask is not None and name == "input_ids" and "attention_mask" not in batch:
            columns["attention_mask"] = mask.to(value.dtype)
    return columns


def _split_rows(batch: Batch) -> list[dict[str, Any]]:
    """Return a dict of lists and numbers for each row, without padding."""
    columns = {}
    for name, value in batch.items():
        if name.endswith("_mask") and name.removesuffix("_mask") in batch:
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

"""What a Trainer of Hugging Face makes of its ``TrainingArguments``: optimizer, schedule, loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from cerebro.arguments import list_words, warn_user
from cerebro.errors import InputError

_TAKEN = (
    "learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon optim optim_args "
    "optim_target_modules adafactor lr_scheduler_type lr_scheduler_kwargs warmup_steps "
    "warmup_ratio max_grad_norm gradient_accumulation_steps label_smoothing_factor bf16 fp16 tf32 "
    "activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing "
    "gradient_checkpointing_kwargs label_names remove_unused_columns"
)
_QUIET = (
    "output_dir overwrite_output_dir do_train do_eval do_predict disable_tqdm eval_steps report_to "
    "logging_dir run_name local_rank accelerator_config fsdp_config debug dataloader_pin_memory "
    "dataloader_num_workers"
)
"""Fields that change no model, or that others change when the arguments are made."""

_OF_SEARCH = list_words(
    {
        "epochs": "num_train_epochs",
        "batch_size": "per_device_train_batch_size auto_find_batch_size",
        "eval_batch_size": "per_device_eval_batch_size",
        "validation": "eval_strategy evaluation_strategy",
        "keep": "save_strategy load_best_model_at_end save_total_limit",
        "metric": "metric_for_best_model",
        "mode": "greater_is_better",
        "seed": "seed data_seed",
        "devices": "use_cpu no_cuda",
    }
)
_REFUSED = list_words(
    {
        "a worker trains each trial on one device": "deepspeed fsdp parallelism_config",
        "search() takes epochs=, by which the schedule has its length": "max_steps",
        "search() draws the batches, by its shuffle=": "train_sampling_strategy group_by_length",
        "search() takes drop_last=": "dataloader_drop_last",
        "change the model in build instead": (
            "neftune_noise_alpha use_liger_kernel torch_compile"
        ),
        "compute_metrics gets the logits and labels of all rows, once": (
            "batch_eval_metrics include_for_metrics include_inputs_for_metrics "
            "eval_do_concat_batches predict_with_generate"
        ),
    }
)  # fmt: skip
"""Fields that would change the trained weights, or what `compute_metrics` gets."""

_FOLLOWING = ("reduce_lr_on_plateau", "greedy")
_SPECIAL = ("lomo", "layerwise", "schedule_free")
"""Parts of the names of optimizers for which the Trainer's loop does more than call `step`."""


class TrainerParts:
    """Makes for a model what a Trainer makes of its arguments.

    The arguments are checked: InputError names those that would change the trained weights and
    cannot be honoured; one warning names those that belong to the search.
    """

    def __init__(self, model: Any, args: Any, optimizer_cls_and_kwargs: Any = None) -> None:
        import transformers

        if not isinstance(args, transformers.TrainingArguments):
            raise InputError(f"args must be transformers.TrainingArguments, not {args!r}")
        _check_fields(args)
        self._args = args
        # Its __init__ would seed the generators, move the model and start loggers.
        self._trainer: Any = transformers.Trainer.__new__(transformers.Trainer)
        vars(self._trainer).update(
            model=model,
            args=args,
            optimizer=None,
            lr_scheduler=None,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )

    def make_optimizer(self) -> Any:
        return self._trainer.create_optimizer()

    def make_schedule(self, optimizer: Any, updates: int) -> Any:
        """Return the learning-rate scheduler for training of so many updates."""
        return self._trainer.create_scheduler(updates, optimizer)

    def set_checkpointing(self) -> None:
        """Let the model compute activations again in the backward pass, if the arguments say so."""
        args: Any = self._args
        model = self._trainer.model
        if getattr(args, "activation_checkpointing", None):
            given: dict[str, Any] = dict(args.activation_checkpointing_kwargs or {})
            options = {key: given.pop(key) for key in ("every_n_layers", "offload") if key in given}
            model.activation_checkpointing_enable(
                activation_checkpointing_kwargs=given or None, **options
            )
        elif args.gradient_checkpointing:
            model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `cerebro.torch.Model`."""
        args = self._args
        return {
            "clip_norm": args.max_grad_norm or None,
            "accumulate": args.gradient_accumulation_steps,
            "amp": "fp16" if args.fp16 else "bf16" if args.bf16 else None,
        }


def make_loss(model: Any, args: Any, function: Any) -> Callable[[Any, Any], Any] | None:
    """Return ``loss(output, labels)`` as the Trainer computes it; None if the model does.

    `function` is its ``compute_loss_func``, which also gets the number of labels.
    """
    smoothing = 0.0 if args is None else args.label_smoothing_factor
    if function is None and not smoothing:
        return None
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_pt_utils import LabelSmoother

    shifts = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if function is not None:

        def compute_loss(output: Any, labels: Any) -> Any:
            counted = labels[..., 1:] if shifts else labels
            return function(output, labels, num_items_in_batch=counted.ne(-100).sum())

        return compute_loss
    if getattr(model.config, "problem_type", None) == "multi_label_classification":
        raise InputError(
            "args: label_smoothing_factor does not fit several labels per row: leave it out"
        )
    smoother = LabelSmoother(epsilon=smoothing)
    return lambda output, labels: smoother(output, labels, shift_labels=shifts)


def _check_fields(args: Any) -> None:
    """Raise InputError for fields that cannot be honoured; name those that are not used."""
    changed = [field.name for field in dataclasses.fields(args) if _is_changed(field, args)]
    for name in changed:
        if name in _REFUSED:
            raise InputError(f"args: {name}={getattr(args, name)!r}: {_REFUSED[name]}")
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if kind in _FOLLOWING:
        raise InputError(
            f"args: the schedule {kind!r} follows a metric: give optimizers=(optimizer, scheduler) "
            "and scheduler_step='metric'"
        )
    optim = str(getattr(args.optim, "value", args.optim))
    if any(word in optim for word in _SPECIAL):
        raise InputError(
            f"args: optim={optim!r} needs a special training loop: choose another, or give "
            "optimizers=(optimizer, scheduler)"
        )
    known = {*_TAKEN.split(), *_QUIET.split()}
    unused = [name for name in changed if name not in known]
    if unused:
        ours = dict.fromkeys(f"{_OF_SEARCH[name]}=" for name in unused if name in _OF_SEARCH)
        instead = f": search() takes {', '.join(ours)}" if ours else ""
        warn_user(f"TrainingArguments: not used are {', '.join(unused)}{instead}")


def _is_changed(field: Any, args: Any) -> bool:
    """Return whether a field differs from its default; all that is empty counts as equal."""
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    value = getattr(args, field.name, default)
    return bool(value != default and (value or default))

"""Check arguments, and explain keywords that do not exist.

Users know the words of Optuna, Ray Tune, Keras, Lightning and scikit-learn. A function decorated
with `answers` responds to one of these with its own word, and to a misspelled one with the nearest.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, overload

from cerebro.errors import InputError
from cerebro.machine.imports import PACKAGE

MAX_INT32 = 2**31 - 1

_COMPARED = {
    "above": operator.gt, "at least": operator.ge, "below": operator.lt, "at most": operator.le,
}  # fmt: skip


@overload
def whole_number(
    name: str, value: Any, least: int, most: float | None = ..., *, optional: Literal[False] = ...
) -> int: ...


@overload
def whole_number(
    name: str, value: Any, least: int, most: float | None = ..., *, optional: bool
) -> int | None: ...


def whole_number(
    name: str, value: Any, least: int, most: float | None = None, *, optional: bool = False
) -> int | None:
    """Return an argument as an int.

    NumPy's numbers and floats such as 5.0 are whole numbers, too; bools and text are not.

    Parameters
    ----------
    name
        The argument's name in messages.
    value
        The argument's value.
    least, most
        The bounds, inclusive; `most` None: that of an int32, as in the C core.
    optional
        Return None for None.

    Raises
    ------
    InputError
        If the value is not a whole number within the bounds.
    """
    if value is None and optional:
        return None
    limit = MAX_INT32 if most is None else most
    try:
        number = int(value)
        whole = number == value and not isinstance(value, bool)
    except (TypeError, ValueError, OverflowError):
        number, whole = least, False
    if whole and least <= number <= limit:
        return number
    bounded = limit < math.inf and (most is not None or number > limit)
    bounds = f"from {least} to {limit}" if bounded else f"of at least {least}"
    raise InputError(f"{name} must be a whole number {bounds}, not {value!r}")


@overload
def real_number(
    name: str,
    value: Any,
    *,
    above: float | None = ...,
    least: float | None = ...,
    below: float | None = ...,
    most: float | None = ...,
    finite: bool = ...,
    optional: Literal[False] = ...,
) -> float: ...


@overload
def real_number(
    name: str, value: Any, *, above: float | None = ..., optional: Literal[True]
) -> float | None: ...


def real_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    finite: bool = False,
    optional: bool = False,
) -> float | None:
    """Return an argument as a float: anything that `float` takes, except bools.

    Parameters
    ----------
    name, value, optional
        As in :func:`whole_number`.
    above, below
        Exclusive bounds.
    least, most
        Inclusive bounds.
    finite
        Refuse infinity and NaN.

    Raises
    ------
    InputError
        If the value is not a number, or out of bounds.
    """
    if value is None and optional:
        return None
    try:
        found = float(value)
        wrong = isinstance(value, bool) or (finite and math.isnan(found))
    except (TypeError, ValueError, OverflowError):
        wrong = True
    if wrong:
        raise InputError(f"{name} must be a number, not {value!r}")
    if finite and math.isinf(found):
        raise InputError(f"{name} must be finite, not {value!r}")
    given = {"above": above, "at least": least, "below": below, "at most": most}
    bounds = {word: bound for word, bound in given.items() if bound is not None}
    if all(_COMPARED[word](found, bound) for word, bound in bounds.items()):
        return found
    allowed = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items())
    if least is not None and most is not None:
        allowed = f"from {least:g} to {most:g}"
    raise InputError(f"{name} must be {allowed}, not {value!r}")


def one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Check an argument with a few legal values."""
    if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
        raise InputError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


P = ParamSpec("P")

R = TypeVar("R")

_HERE = str(PACKAGE) + os.sep

Words = Mapping[str, str]
"""Other libraries' words to ours, or to a sentence (which has a space) if we have no equivalent."""


class KeywordError(InputError, TypeError):
    """A function was called with a keyword that it does not have."""


_TRIALS = ("trials", "num_trials", "max_trials", "n_iter", "max_evals", "n_samples")

_RUN = ("name", "directory", "dir", "project_name", "experiment_name", "storage_path", "local_dir",
        "output_dir", "logdir")  # fmt: skip

_WORKERS = ("n_jobs", "num_workers", "n_workers", "max_workers", "num_processes")

_PROGRESS = ("verbose", "show_progress_bar", "show_progress", "progress_bar", "verbosity")

_SEED = ("random_state", "random_seed")

_DEVICES = ("device", "gpus", "accelerator")

_VALIDATION = ("valid", "val", "validation_data", "val_data", "valid_data", "eval_data",
               "eval_dataset", "validation_split", "val_dataset")  # fmt: skip

_DATA = ("train", "train_data", "dataset", "train_dataset", "training_data")

_LR = "the space has it, and build reads it: {'lr': cerebro.loguniform(1e-4, 1e-1)}"

_FOLDS = "give validation=cerebro.KFold(5), or a scikit-learn splitter"


def _to(word: str, *others: str) -> dict[str, str]:
    return dict.fromkeys(others, word)


_SHARED: Words = {
    **_to("workers", *_WORKERS),
    **_to("progress", *_PROGRESS),
    **_to("seed", *_SEED),
    **_to("devices", *_DEVICES),
    **_to("validation", *_VALIDATION),
    **_to("data", *_DATA),
    **_to("run", *_RUN),
    **_to("epochs", "max_epochs", "num_epochs", "n_epochs", "num_train_epochs"),
    **_to(_LR, "lr", "learning_rate"),
    **_to(_FOLDS, "cv", "folds", "n_splits"),
    **_to("batch_size", "batch", "train_batch_size"),
    **_to("eval_batch_size", "val_batch_size", "validation_batch_size"),
    **_to("callbacks", "logger", "loggers"),
    **_to("build", "model", "objective", "model_fn", "build_fn", "hypermodel", "func"),
    **_to("metric", "monitor", "scoring", "optimize"),
    **_to("stop", "patience", "early_stopping"),
}

SEARCH: Words = {
    **_SHARED,
    **_to("n_trials", *_TRIALS, "num_samples"),
    **_to("mode", "direction", "goal"),
    "directions": "Cerebro optimizes one metric: give metric= and mode='min' or 'max'",
    **_to("searcher", "sampler", "pruner", "scheduler", "search_alg", "algorithm", "algo", "tuner",
          "method", "strategy"),
    **_to("space", "config", "param_space", "params", "search_space", "param_distributions",
          "param_grid", "hyperparameters", "parameters"),
    **_to("time_limit", "timeout", "max_time", "time_budget_s", "time_budget"),
    **_to("if_exists", "resume", "overwrite", "exist_ok"),
    **_to("width", "max_concurrent_trials", "max_concurrent"),
}  # fmt: skip

RESUME: Words = {
    **_to("workers", *_WORKERS),
    **_to("progress", *_PROGRESS),
    **_to("epochs", "max_epochs", "num_epochs", "n_epochs", "num_train_epochs"),
    **_to("callbacks", "logger", "loggers"),
    **_to("build", "model", "objective", "model_fn", "build_fn"),
    **_to("run", "path", "folder", *_RUN),
    **_to("trials", "trial"),
    "n_trials": "call search() as before, with more n_trials and if_exists='resume'",
    "num_trials": "call search() as before, with more n_trials and if_exists='resume'",
}

OPTIMIZE: Words = {
    **_SHARED,
    **_to("n_trials", *_TRIALS, "num_samples"),
    **_to("timeout", "time_limit", "max_time", "time_budget_s"),
    **_to("define", "space", "config", "param_space", "search_space", "param_distributions"),
    **_to("the study has one: optuna.create_study(direction='maximize')", "direction", "mode"),
    "directions": "Cerebro optimizes one metric: create the study with direction=",
    **_to("the study has one: optuna.create_study(sampler=..., pruner=...)", "sampler", "pruner",
          "searcher", "scheduler"),
    "gc_after_trial": "leave it out: models are built in worker processes",
    "select": "leave it out: the value of a study's trial is that of its last epoch",
    "if_exists": "leave it out: a run= that exists is resumed",
    "points": "enqueue them: study.enqueue_trial(...)",
    "asynchronous": "leave it out: a study suggests and receives trials in rounds",
    **_to("catch", "except", "errors"),
}  # fmt: skip

_OWN_OF_FIT = ("param_space", "scheduler", "num_samples")  # elsewhere other libraries' words

FIT: Words = {
    **{key: word for key, word in SEARCH.items() if key not in _OWN_OF_FIT},
    **_to("param_space", "space", "config", "params", "search_space"),
    **_to("searcher", "search_alg", "search_algorithm", "sampler", "algorithm"),
    **_to("num_samples", *_TRIALS),
    **_to("scheduler", "pruner"),
    **_to("build", "trainable", "model", "train_fn", "run_or_experiment"),
    **_to("give its fields as keywords, such as metric=, num_samples= and run=", "tune_config",
          "run_config"),
    **_to("leave it out: workers= and threads= set the resources", "resources_per_trial",
          "max_failures"),
}  # fmt: skip

SHARD: Words = {
    **_to("shards", "num_shards", "n_shards", "partitions", "npartitions"),
    **_to("source", "data", "dataset", "df", "arrays", "table"),
    **_to("path", "folder", "directory", "dir", "out", "output", "output_dir", "dest", "root"),
    **_to("dtypes", "dtype", "types"),
    **_to("columns", "cols", "usecols", "features"),
    **_to("seed", *_SEED),
    **_to("progress", *_PROGRESS),
    **_to("a dataset is never overwritten: remove its folder, or give exist_ok=True to reuse one "
          "with the same rows", "overwrite", "replace", "force", "if_exists", "mode"),
    **_to("search() takes it, or the space", "batch_size"),
    **_to("use Dataset.split() on the result", "split", "test_size", "validation"),
}  # fmt: skip

TORCH_MODEL: Words = {
    **_to("net", "model", "module", "network"),
    **_to("optimizer", "optim", "optimizers", "opt"),
    **_to("loss", "criterion", "loss_fn", "loss_function", "loss_func"),
    **_to("scheduler", "lr_scheduler"),
    **_to("give it to the optimizer: torch.optim.AdamW(net.parameters(), lr=...)", "lr",
          "learning_rate", "weight_decay"),
    **_to("clip_norm", "gradient_clip_val", "max_grad_norm", "grad_clip", "clip_grad_norm",
          "clipnorm"),
    **_to("accumulate", "accumulate_grad_batches", "gradient_accumulation_steps", "grad_accum"),
    **_to("amp", "precision", "mixed_precision", "fp16", "bf16", "autocast"),
    **_to("target", "targets", "label", "labels", "y"),
    **_to("inputs", "input", "x", "features"),
    **_to("metrics", "metric"),
    **_to("augment", "augmentation", "transform", "transforms"),
    **_to("step", "train_step", "training_step"),
    **_to("search() takes it", "epochs", "max_epochs", "callbacks", "batch_size", "seed"),
    **_to("leave it out: workers move the model to info.device; search() takes devices=",
          "device"),
}  # fmt: skip


def answers(
    words: Words,
    passes_to: Callable[..., object] | None = None,
    also: tuple[str, ...] = (),
    name: str | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function: the error for an unknown keyword names the intended one.

    Parameters
    ----------
    words
        Other libraries' words for its arguments.
    passes_to
        The function that receives its ``**options``.
    also
        More names that it accepts as ``**options``.
    name
        The function's name in messages; default: its own.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = _names(function)
        passed = (() if passes_to is None else _names(passes_to)) + also
        known = {*own, *passed} - (words.keys() - set(own) if passes_to else set())
        called = name or function.__name__

        @functools.wraps(function)
        def answering(*args: P.args, **kwargs: P.kwargs) -> R:
            if not known.issuperset(kwargs):
                wrong = next(key for key in kwargs if key not in known)
                raise KeywordError(_answer(called, wrong, words, sorted(known)))
            return function(*args, **kwargs)

        return answering

    return decorate


def users_level() -> int:
    """Return the ``stacklevel`` with which a warning names the user's line, not Cerebro's."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame, level = frame.f_back, level + 1
    return level


def _names(function: Callable[..., object]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind in kinds and p.name != "self")


def _answer(called: str, wrong: str, words: Words, known: list[str]) -> str:
    ours = words.get(wrong)
    if ours is not None and " " not in ours:
        return f"{called}() takes {ours}=, not {wrong}="
    if ours is not None:
        return f"{called}() does not take {wrong}=: {ours}"
    near = difflib.get_close_matches(wrong, known, 1)
    hint = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(known)}"
    return f"{called}() does not take {wrong}=: {hint}"

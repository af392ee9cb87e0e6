"""Check arguments, and explain keywords that do not exist.

If a function with `explain_keywords` is called with a keyword of Optuna, Ray Tune, Keras, Lightning
or scikit-learn, the error names Cerebro's; for a misspelled one, the most similar.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import operator
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, overload

from cerebro.errors import InputError, shorten_tracebacks
from cerebro.machine.devices import CPU, MAX_WORKERS, are_gpus
from cerebro.machine.imports import OWN_PREFIX
from cerebro.machine.resources import usable_cores

MAX_INT32 = 2**31 - 1

_COMPARED = {
    "above": operator.gt, "at least": operator.ge, "below": operator.lt, "at most": operator.le,
}  # fmt: skip


@overload
def check_whole_number(
    name: str, value: Any, least: int, most: float | None = ..., *, optional: Literal[False] = ...
) -> int: ...


@overload
def check_whole_number(
    name: str, value: Any, least: int, most: float | None = ..., *, optional: bool
) -> int | None: ...


def check_whole_number(
    name: str, value: Any, least: int, most: float | None = None, *, optional: bool = False
) -> int | None:
    """Return an argument as an int; raise InputError if it is not an integer within the bounds.

    NumPy integers and floats such as 5.0 are accepted, bools and text are not. The bounds `least`
    and `most` are inclusive; ``most=None`` means the largest int32, as in the C core. With
    `optional`, None gives None.
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
    raise InputError(f"{name} must be a whole number {bounds}, not {_show_value(value)}")


def check_real_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    finite: bool = False,
) -> float:
    """Return an argument as a float; raise InputError if it is not a number or is out of bounds.

    Everything that `float` accepts is a number, except bools. `above` and `below` are exclusive
    bounds, `least` and `most` inclusive ones. `finite` rejects infinity and NaN.
    """
    try:
        number = float(value)
        wrong = isinstance(value, bool) or (finite and math.isnan(number))
    except (TypeError, ValueError, OverflowError):
        wrong = True
    if wrong:
        raise InputError(f"{name} must be a number, not {_show_value(value)}")
    if finite and math.isinf(number):
        raise InputError(f"{name} must be finite, not {_show_value(value)}")
    limits = {"above": above, "at least": least, "below": below, "at most": most}
    bounds = {word: bound for word, bound in limits.items() if bound is not None}
    if all(_COMPARED[word](number, bound) for word, bound in bounds.items()):
        return number
    allowed = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items())
    if least is not None and most is not None:
        allowed = f"from {least:g} to {most:g}"
    raise InputError(f"{name} must be {allowed}, not {_show_value(value)}")


def check_optional_real(name: str, value: Any, *, above: float) -> float | None:
    """Return an argument as `check_real_number` does, but None for None."""
    return None if value is None else check_real_number(name, value, above=above)


def check_one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise InputError unless an argument has one of the allowed values."""
    if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
        raise InputError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def worker_count(
    workers: Any, threads: int, devices: Sequence[str] = (CPU,), workers_per_device: Any = None
) -> int:
    """Return the number of workers to start: `workers`, or by default one per core or GPU."""
    count = check_whole_number("workers", workers, 0, MAX_WORKERS, optional=True)
    per_device = check_whole_number(
        "workers_per_device", workers_per_device, 1, MAX_WORKERS, optional=True
    )
    if not are_gpus(devices):
        return max(1, usable_cores() // threads) if count is None else count
    by_device = len(devices) * (per_device or 1)
    if count is None:
        return by_device
    if per_device is not None and count != by_device:
        raise InputError(
            f"workers={count} and workers_per_device={per_device} on {len(devices)} "
            f"device(s), which makes {by_device}: give one of them"
        )
    return count


def _show_value(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:
        return "one of more digits than Python converts to text"


P = ParamSpec("P")
R = TypeVar("R")

MAX_NAMES = 8
"""The most keywords that a message lists."""

NEAREST = 4
"""How many keywords a message names if there are more than that."""

Words = Mapping[str, str]
"""Keywords of other libraries, mapped to ours. A keyword without a counterpart is mapped to a
sentence of advice, recognizable by its spaces.
"""


class KeywordError(InputError, TypeError):
    """Raised if a function is called with a keyword that it does not have."""


_EPOCHS = "max_epochs num_epochs n_epochs num_train_epochs"
_RUN = (
    "name directory dir project_name experiment_name storage_path local_dir output_dir logdir "
    "storage"
)
_WORKERS = "n_jobs num_workers n_workers max_workers num_processes"
_PROGRESS = "verbose show_progress_bar show_progress progress_bar verbosity"
_SEED = "random_state random_seed"


def list_words(table: Mapping[str, str]) -> dict[str, str]:
    """Return `Words` of a table of our keywords and advice, each with the others' in one text."""
    return {other: word for word, others in table.items() for other in others.split()}


SHARED = list_words(
    {
        "workers": _WORKERS,
        "progress": _PROGRESS,
        "seed": _SEED,
        "devices": "device gpus accelerator",
        "validation": "valid val validation_data val_data valid_data eval_data eval_dataset "
        "validation_split val_dataset",
        "data": "train train_data dataset train_dataset training_data",
        "run": _RUN,
        "epochs": _EPOCHS,
        "the space has it, and build reads it: {'lr': cerebro.loguniform(1e-4, 1e-1)}": "lr "
        "learning_rate",
        "give validation=cerebro.KFold(5), or a scikit-learn splitter": "cv folds n_splits",
        "batch_size": "batch train_batch_size",
        "eval_batch_size": "val_batch_size validation_batch_size",
        "callbacks": "logger loggers",
        "build": "model model_fn build_fn hypermodel func",
        "give build=, the function that makes a model, and metric=, the name of what ranks "
        "models": "objective",
        "metric": "monitor scoring optimize eval_metric",
        "stop": "patience early_stopping",
    }
)

SEARCH = SHARED | list_words(
    {
        "n_trials": "trials num_trials max_trials n_iter max_evals n_samples num_samples",
        "mode": "direction goal",
        "Cerebro optimizes one metric: give metric= and mode='min' or 'max'": "directions",
        "searcher": "sampler pruner scheduler search_alg algorithm algo tuner method strategy",
        "space": "config param_space params search_space param_distributions param_grid "
        "hyperparameters parameters",
        "time_limit": "timeout max_time time_budget_s time_budget",
        "if_exists": "resume overwrite exist_ok",
        "width": "max_concurrent_trials max_concurrent",
        "cerebro.shard() takes it, and search() the dataset that it returns; arrays keep their "
        "types, except float64": "dtypes dtype shards columns",
        "the dataset has them: give data=dataset.with_transforms(...)": "transform transforms",
    }
)

RESUME = list_words(
    {
        "workers": _WORKERS,
        "progress": _PROGRESS,
        "epochs": _EPOCHS,
        "callbacks": "logger loggers",
        "build": "model objective model_fn build_fn",
        "run": f"path folder {_RUN}",
        "trials": "trial",
        "call search() as before, with more n_trials and if_exists='resume'": "n_trials num_trials",
    }
)

SHARD = list_words(
    {
        "shards": "num_shards n_shards partitions npartitions",
        "source": "data dataset df arrays table",
        "path": "folder directory dir out output output_dir dest root",
        "dtypes": "dtype types",
        "columns": "cols usecols features",
        "seed": _SEED,
        "progress": _PROGRESS,
        "a dataset is never overwritten: remove its folder, or give exist_ok=True to reuse one "
        "with the same rows": "overwrite replace force if_exists mode",
        "search() takes it, or the space": "batch_size",
        "use Dataset.split() on the result": "split test_size validation",
    }
)

TORCH_MODEL = list_words(
    {
        "net": "model module network",
        "optimizer": "optim optimizers opt",
        "loss": "criterion loss_fn loss_function loss_func",
        "scheduler": "lr_scheduler",
        "give it to the optimizer: torch.optim.AdamW(net.parameters(), lr=...)": "lr "
        "learning_rate weight_decay",
        "clip_norm": "gradient_clip_val max_grad_norm grad_clip clip_grad_norm clipnorm",
        "accumulate": "accumulate_grad_batches gradient_accumulation_steps grad_accum",
        "amp": "precision mixed_precision fp16 bf16 autocast",
        "target": "targets label labels y",
        "weight": "sample_weight weights sample_weights",
        "give it to the loss: torch.nn.CrossEntropyLoss(weight=...)": "class_weight "
        "class_weights pos_weight",
        "inputs": "input x features",
        "metrics": "metric",
        "augment": "augmentation transform transforms",
        "step": "training_step",
        "search() takes it": "epochs max_epochs callbacks batch_size seed",
        "leave it out: workers move the model to info.device; search() takes devices=": "device",
    }
)

KERAS_CALLBACKS = (
    "callbacks of Keras cannot follow a model from worker to worker: stop with "
    "search(stop=cerebro.EarlyStopping(...)), keep states with search(keep=...), and change the "
    "learning rate with a schedule of keras.optimizers.schedules"
)


def explain_keywords(
    words: Words,
    passes_to: Callable[..., object] | None = None,
    also: tuple[str, ...] = (),
    name: str | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that explains wrong keywords and shortens tracebacks.

    A call with an unknown keyword raises KeywordError, which names the intended keyword. `words`
    has the keywords of other libraries. The function passes its ``**options`` to `passes_to`, and
    accepts those in `also`, too. `name` is the function's name in messages, if not its own.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        keywords = _list_keywords(function)
        passed = (() if passes_to is None else _list_keywords(passes_to)) + also
        accepted = {*keywords, *passed} - (words.keys() - set(keywords) if passes_to else set())
        called = name or function.__name__

        @functools.wraps(function)
        def answering(*args: P.args, **kwargs: P.kwargs) -> R:
            if not accepted.issuperset(kwargs):
                wrong = next(key for key in kwargs if key not in accepted)
                raise KeywordError(_explain_keyword(called, wrong, words, sorted(accepted)))
            return function(*args, **kwargs)

        return shorten_tracebacks(answering)

    return decorate


def warn_user(text: str) -> None:
    """Warn at the user's line that has called Cerebro."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OWN_PREFIX):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def _list_keywords(function: Callable[..., object]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind in kinds and p.name != "self")


def _explain_keyword(called: str, wrong: str, words: Words, known: list[str]) -> str:
    ours = words.get(wrong)
    if ours is not None and " " not in ours:
        return f"{called}() takes {ours}=, not {wrong}="
    if ours is not None:
        return f"{called}() does not take {wrong}=: {ours}"
    near = difflib.get_close_matches(wrong, known, 1)
    if near:
        hint = f"did you mean {near[0]}=?"
    elif len(known) <= MAX_NAMES:
        hint = f"it takes {', '.join(known)}"
    else:
        nearest = difflib.get_close_matches(wrong, known, NEAREST, cutoff=0)
        hint = f"of the {len(known)} that it takes, the nearest are {', '.join(nearest)}"
    return f"{called}() does not take {wrong}=: {hint}"


def read_switch(variable: str, *, default: bool) -> bool:
    """Return whether an environment variable is 1, and not 0 (unset: `default`)."""
    value = os.environ.get(variable, str(int(default)))
    if value not in ("0", "1"):
        raise InputError(f"the variable {variable} is {value!r}: set it to 0 or 1")
    return value == "1"

"""Describe a failure of the user's code: the line, the cause and a hint."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cerebro.data import Dataset
from cerebro.errors import InputError, one_line, text_of
from cerebro.machine.devices import is_gpu
from cerebro.machine.imports import raised_at
from cerebro.run.records import class_name
from cerebro.worker.messages import Task

_TORCH_TYPES = {
    "double": "float64",
    "float64": "float64",
    "float": "float32",
    "float32": "float32",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "char": "int8",
    "byte": "uint8",
}
"""Type names in PyTorch's messages."""


def divergence(task: Task, mean: float, first: tuple[int, float] | None) -> str:
    """Describe where a loss stopped being finite: epoch, shard and batch, counted from 0."""
    where = f"in epoch {task.epoch}, shard {task.shard}"
    if first is None:  # finite in each batch, but not their sum
        return f"the training loss became {mean} {where}"
    batch, value = first
    return f"the training loss became {value} {where}, batch {batch}"


def describe(error: BaseException) -> str:
    """Describe an exception in one line: type, text, and the user's line that raised it."""
    text = text_of(error)
    if isinstance(error, InputError):
        return text
    cause = f"{type(error).__name__}: {text}" if text else type(error).__name__
    place = place_of(error)
    return f"{cause} ({place})" if place else cause


def place_of(error: BaseException) -> str:
    """Return the user's line that raised an exception, as ``file:line in function``, or ""."""
    at = raised_at(error, libraries=True)
    return "" if at is None else f"{Path(at.filename).name}:{at.lineno} in {at.name}"


def bases_of(error: BaseException) -> tuple[str, ...]:
    """Return the full names of an exception's class and its base classes.

    The class itself may not be picklable.
    """
    return tuple(class_name(kind) for kind in type(error).__mro__[:-1])


def missing_name(
    error: BaseException, config: Mapping[str, Any], columns: Mapping[str, Any]
) -> str:
    """List the names that exist, if the user's code used one that does not."""
    if not isinstance(error, KeyError) or not error.args or not isinstance(error.args[0], str):
        return ""
    functions = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    if "build_model" in functions:
        what, names = "the configuration has", list(config)
    elif functions & {"_train", "_evaluate"}:
        what, names = "a batch has", list(columns)
    else:
        return ""
    return "" if error.args[0] in names else one_line(f"; {what} {', '.join(names) or 'nothing'}")


def misplaced(error: BaseException, device: str) -> str:
    """Name the device of batches, if the user's code mixed tensors of two devices."""
    if not is_gpu(device) or "on the same device" not in str(error):
        return ""
    return f"; batches arrive on info.device, {device}: put the model there, or give devices='cpu'"


def unlike_types(error: BaseException, columns: Mapping[str, Any]) -> str:
    """Suggest types for columns, if PyTorch refused those of the data."""
    if not isinstance(error, (RuntimeError, ValueError)):
        return ""
    text = text_of(error).lower().replace("unsigned char", "byte").replace("tensor", "")
    words = re.findall(r"[a-z0-9]+", text)
    named = [_TORCH_TYPES[word] for word in words if word in _TORCH_TYPES]
    labels = "expected target dtype to be long" in text
    if labels and named:
        found, wanted = named[-1], "int64"
    elif ("type" in text and "float64" in named) or "share same datatype" in text:
        found, wanted = "float64", "float32"
    elif "type" in text and len(others := {*named} - {"float32"}) == 1 and "float32" in named:
        found, wanted = others.pop(), "float32"
    else:
        return ""
    wrong = [name for name, column in columns.items() if column.dtype == found]
    if labels:
        wrong = [name for name in wrong if not columns[name].shape]
    if not wrong or (found != "float64" and len(wrong) > 1):  # it is unknown which of them
        return ""
    whose = f"column {wrong[0]!r} is" if len(wrong) == 1 else f"columns {', '.join(wrong)} are"
    dtypes = ", ".join(f'"{name}": "{wanted}"' for name in wrong)
    return f"; {whose} {found}: give shard dtypes={{{dtypes}}}"


def traceback_of(error: BaseException) -> str:
    """Return an exception's traceback as clipped text, even if the exception has no text."""
    try:
        return clipped("".join(traceback.format_exception(error)))
    except Exception:
        return clipped("".join(traceback.format_tb(error.__traceback__)) + describe(error))


def clipped(text: str, limit: int = 20_000) -> str:
    """Cut the middle out of a text that is too long to keep."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n... {len(text) - limit} characters ...\n{text[-limit // 2 :]}"


def names_data(error: BaseException, *views: Dataset | None) -> bool:
    """Whether an error is about a missing file of the run's data."""
    if not isinstance(error, FileNotFoundError):
        return False
    return any(str(view.path) in str(error) for view in views if view is not None)

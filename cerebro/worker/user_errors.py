"""Describe a failure in the user's code: the line, the cause and a hint."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cerebro.data import Dataset
from cerebro.data.given_rows import was_given
from cerebro.errors import CorruptDataError, InputError, one_line, text_of
from cerebro.machine.devices import is_gpu
from cerebro.machine.imports import find_raising_line
from cerebro.run.records import class_name

MOST_CHANNELS = 4  # the most channels of a picture: a larger dimension is its height or width
MOST_TRACEBACK = 20_000  # characters
LEAST_PIXELS = 8  # the least height and width of rows of bytes that are taken for gray pictures

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
    "bool": "bool",
}
"""The data types, by their names in PyTorch's messages."""


def describe_divergence(
    epoch: int, start: int, mean: float, first: tuple[int, float] | None
) -> str:
    """Describe where a loss became NaN or infinite: epoch and batch, counted from 0.

    `start` is the number of the epoch's batches before those of the unit.
    """
    if first is None:  # each batch was finite, but their sum was not
        return f"the training loss became {mean} in epoch {epoch}"
    batch, value = first
    return f"the training loss became {value} in epoch {epoch}, batch {start + batch}"


def describe_cause(
    error: BaseException, config: Mapping[str, Any], train: Dataset, device: str
) -> str:
    """Describe an error in the user's code, with a hint if there is one."""
    columns, given = train.columns, was_given(train)
    hints = (
        explain_missing_name(error, config, columns),
        explain_misplaced(error, device),
        explain_unlike_types(error, columns, given=given),
        explain_channels_last(error, columns, given=given),
        explain_memory_shortage(error, device),
    )
    return describe(error) + ("".join(hints) or explain_known_mistake(error, given=given))


def describe(error: BaseException) -> str:
    """Describe an exception in one line: its type, its text, and the user's line that raised it."""
    text = text_of(error)
    if isinstance(error, InputError):
        return text
    cause = f"{type(error).__name__}: {text}" if text else type(error).__name__
    place = place_of(error)
    return f"{cause} ({place})" if place else cause


def place_of(error: BaseException) -> str:
    """Return the user's line that raised an exception, as ``file:line in function``, or ""."""
    at = find_raising_line(error, libraries=True)
    if at is None:
        return ""
    file = Path(at.filename)
    # Jupyter names a cell's source by a hash.
    name = "cell" if file.parent.name.startswith("ipykernel_") else file.name
    return f"{name}:{at.lineno} in {at.name}"


def bases_of(error: BaseException) -> tuple[str, ...]:
    """Return the full names of an exception's class, which may not be picklable, and its bases."""
    return tuple(class_name(kind) for kind in type(error).__mro__[:-1])


def explain_missing_name(
    error: BaseException, config: Mapping[str, Any], columns: Mapping[str, Any]
) -> str:
    """If the user's code used a missing name, list the names that exist; else return ""."""
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


def explain_misplaced(error: BaseException, device: str) -> str:
    """If the user's code mixed devices, name the device of batches; else return ""."""
    if not is_gpu(device) or "on the same device" not in str(error):
        return ""
    return f"; batches arrive on info.device, {device}: put the model there, or give devices='cpu'"


def explain_unlike_types(
    error: BaseException, columns: Mapping[str, Any], *, given: bool = False
) -> str:
    """If PyTorch rejected the data types of columns, suggest other types; else return "".

    `given` says whether the user gave rows in memory, and not a dataset that `shard` wrote.
    """
    if not isinstance(error, (RuntimeError, ValueError)):
        return ""
    text = text_of(error).lower().replace("unsigned char", "byte").replace("tensor", "")
    words = re.findall(r"[a-z0-9]+", text)
    named = [_TORCH_TYPES[word] for word in words if word in _TORCH_TYPES]
    labels = "expected target dtype to be long" in text
    if labels and named:
        dtype, required = named[-1], "int64"
    elif ("type" in text and "float64" in named) or "share same datatype" in text:
        dtype, required = "float64", "float32"
    elif "type" in text and len(others := {*named} - {"float32"}) == 1 and "float32" in named:
        dtype, required = others.pop(), "float32"
    else:
        return ""
    wrong = [name for name, column in columns.items() if column.dtype == dtype]
    if labels:
        wrong = [name for name in wrong if not columns[name].shape]
    if not wrong or (dtype != "float64" and len(wrong) > 1):  # unclear which one
        return ""
    whose = f"column {wrong[0]!r} is" if len(wrong) == 1 else f"columns {', '.join(wrong)} are"
    images = [name for name in wrong if dtype == "uint8" and _is_image(columns[name].shape)]
    if images:
        return f"; {whose} {dtype}: {_format_transforms(columns[images[0]], given, scaled=True)}"
    if any(columns[name].classes is not None for name in wrong):
        return f"; {whose} codes of classes: give floats for the names, such as 0.0 and 1.0"
    if given:
        arrays = " and ".join(_format_cast(name, required) for name in wrong)
        return f"; {whose} {dtype}: give {arrays}"
    casts = ", ".join(f'"{name}": "{required}"' for name in wrong)
    return f"; {whose} {dtype}: give shard dtypes={{{casts}}}"


def _format_cast(name: str, dtype: str) -> str:
    return f'{name if name.isidentifier() else f"data[{name!r}]"}.astype("{dtype}")'


def _format_transforms(column: Any, given: bool, *, scaled: bool) -> str:
    steps = ["Scale(1/255)"] if scaled else []
    if len(column.shape) == 2 or _has_channels_last(column.shape):
        steps.append("ToCHW()")
    data = "cerebro.shard(rows, folder)" if given else "data"
    dataset = f'{data}.with_transforms({{"{column.name}": [{", ".join(steps)}]}})'
    return f"train on {dataset}, from cerebro.transforms"


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 or (len(shape) == 2 and min(shape) >= LEAST_PIXELS)


def _has_channels_last(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[2] <= MOST_CHANNELS < shape[0]


def explain_channels_last(
    error: BaseException, columns: Mapping[str, Any], *, given: bool = False
) -> str:
    """If a convolution got images with channels last, suggest `ToCHW`; else return ""."""
    if not re.search(r"expected input\[.*\] to have \d+ channels, but got", text_of(error)):
        return ""
    wrong = [column for column in columns.values() if _has_channels_last(column.shape)]
    if len(wrong) != 1:
        return ""
    cure = _format_transforms(wrong[0], given, scaled=wrong[0].dtype == "uint8")
    return f"; column {wrong[0].name!r} has the channels last: {cure}"


_MISTAKES = {
    r"Target -?\d+ is out of bounds": (
        "number the classes from 0, and give the network info.num_classes(...) outputs"
    ),
    "multi-target not supported": (
        "cross_entropy takes one label for each row: give it target.squeeze(1)"
    ),
    "expected target dtype to be Long or Byte, but got (Float|Double)": (
        "labels must be whole numbers: {int64}"
    ),
    "can't be cast to the desired output type (Long|Int)": (
        "targets must be floating-point: {float32}"
    ),
    "element 0 of tensors does not require grad": (
        "the loss does not depend on a trainable parameter: leave out detach(), .item(), argmax() "
        "and no_grad(), and see requires_grad"
    ),
    "all elements of input should be between 0 and 1": (
        "use binary_cross_entropy_with_logits, or end the network in a sigmoid"
    ),
    "Expected more than 1 value per channel when training": (
        "batch norm cannot train on one row: choose a larger batch_size"
    ),
    r"Target size .* must be the same as input size": (
        "give outputs and targets the same shape: output.squeeze(1), or target.unsqueeze(1)"
    ),
    "^index out of range in self$": (
        "an index exceeds its embedding: give num_embeddings of at least the largest plus 1"
    ),
    r"Expected tensor for argument #1 'indices'": "an embedding takes whole numbers: {int64}",
}
"""Patterns of PyTorch messages that do not name a fix, with a fix for each. A type in braces stands
for how to convert the column to it.
"""


def explain_known_mistake(error: BaseException, *, given: bool = False) -> str:
    """Return the fix for a known mistake whose PyTorch message names none."""
    if not isinstance(error, (RuntimeError, ValueError, IndexError)):
        return ""
    text = text_of(error)
    cure = next((cure for pattern, cure in _MISTAKES.items() if re.search(pattern, text)), "")
    for dtype in ("int64", "float32"):
        convert = f'convert the column with .astype("{dtype}")'
        if not given:
            convert = f"give shard dtypes= with {dtype!r} for the column"
        cure = cure.replace(f"{{{dtype}}}", convert)
    return f"; {cure}" if cure else ""


_OUT_OF_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "out of memory",
    "resource_exhausted",
    "status_alloc_failed",
)
"""What PyTorch, JAX, CUDA's libraries and the operating system say, in lower case."""


def explain_memory_shortage(error: BaseException, device: str) -> str:
    """Return what to do if memory is short, on the GPU or on this machine; else return ""."""
    text = f"{type(error).__name__}: {text_of(error)}".lower()
    usual = isinstance(error, (MemoryError, RuntimeError, OSError))
    if not (isinstance(error, MemoryError) or (usual and any(t in text for t in _OUT_OF_MEMORY))):
        return ""
    # PyTorch's allocator for host memory and Python's MemoryError are never of a GPU.
    host = "cpuallocator" in text or (isinstance(error, MemoryError) and "cuda" not in text)
    where, more = "this machine", "fewer workers"
    if is_gpu(device) and not host:
        where, more = "the GPU", "live_models=1"
    return (
        f"; {where} is out of memory: give a smaller batch_size (for validation, eval_batch_size), "
        f"a smaller model, or {more}"
    )


def traceback_of(error: BaseException) -> str:
    """Return an exception's traceback, even if the exception has no text; a long one is cut."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:
        text = "".join(traceback.format_tb(error.__traceback__)) + describe(error)
    more = len(text) - MOST_TRACEBACK
    if more <= 0:
        return text
    half = MOST_TRACEBACK // 2
    return f"{text[:half]}\n... {more} characters ...\n{text[-half:]}"


def is_about_data(error: BaseException, *views: Dataset | None) -> bool:
    """Return whether an error is about a damaged or missing file of the run's data."""
    if not isinstance(error, FileNotFoundError):
        return isinstance(error, CorruptDataError)
    return any(str(view.path) in str(error) for view in views if view is not None)

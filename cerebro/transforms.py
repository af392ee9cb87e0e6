"""Transforms of columns, run in C while batches are gathered.

A chain is a sequence of transforms in order of application; `Dataset.with_transforms` takes one
per column::

    data.with_transforms({"x": [RandomCrop(32, padding=4), RandomHorizontalFlip(), ToCHW(),
                                Scale(1 / 255), Normalize(mean, std)],
                          "tokens": [Pad(value=-1, multiple_of=8), Cast("int64")]})

Arithmetic is done one operation at a time, in the element type of the values at that point of the
chain, so the results equal PyTorch's bit for bit. Integers and bool become float32, float64 stays
float64, and float16 and bfloat16 are computed in float32 and rounded after each operation. Complex
columns do not support arithmetic.

Random transforms are keyed by (seed, epoch, row number in the whole dataset). Shuffling, threads,
workers and batch sizes therefore do not affect them, and columns with equal chains (an image and
its mask) get equal crops and flips. In evaluation (validation, prediction), crops are taken from
the middle and nothing is flipped.

Images are rows of shape (height, width) or (height, width, channels). A ragged column ``c`` arrives
padded, shape (rows, length, ...), with ``c_mask`` (bool, (rows, length), true for values) and
``c_length`` (int64, (rows,)). If its chain has no `Pad`, it is padded with 0 at the end of the
chain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from cerebro.arguments import check_real_number, check_whole_number
from cerebro.errors import InputError

_SIGNED = {f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)}
_UNSIGNED = {f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)}
_INTEGERS = {"bool": (0, 1), **_SIGNED, **_UNSIGNED}
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_MAX_STEPS = 32  # transforms in a chain

_Size: TypeAlias = int | tuple[int, int]
_Step: TypeAlias = tuple[Any, ...]

_TO_CHW: _Step = ("to_chw",)


class ColumnLike(Protocol):
    """The attributes of a column that transforms read; implemented by `manifest.Column`."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ragged(self) -> bool: ...


@dataclass
class _Chain:
    """A column's values at one point of its chain."""

    column: ColumnLike
    dtype: str
    size: tuple[int, int] | None  # height and width, if this is a chain of images
    channels: int
    augment: bool
    chw: bool = False
    padded: bool = False

    def refuse(self, why: str) -> InputError:
        return InputError(f"column {self.column.name!r}: {why}")

    def become_float(self, transform: str) -> None:
        if self.dtype == "complex64":
            raise self.refuse(f"{transform} does not take complex64 values")
        if self.dtype in _INTEGERS:
            self.dtype = "float32"

    def image_size(self, transform: str) -> tuple[int, int]:
        if self.size is None:
            raise self.refuse(
                f"{transform} needs rows of shape (height, width) or (height, width, channels), "
                + ("not a ragged column" if self.column.ragged else f"not {self.column.shape}")
            )
        return self.size


class Transform:
    """Base class of the steps of a column's chain. Instances are immutable and compare by value."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object from which `transform_from_json` makes an equal transform."""
        return {"name": type(self).__name__} | {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
        }

    def _apply(self, chain: _Chain) -> _Step | None:
        """Check the step against the chain, advance the chain, and return the C step, if any."""
        raise NotImplementedError


@dataclass(frozen=True)
class Scale(Transform):
    """Multiply by a factor.

    If ``1 / factor`` is a whole number ``n`` with ``1 / n == factor``, values are divided by ``n``:
    ``Scale(1 / 255)`` gives the same bits as ``x / 255``. Integers become float32.

    Parameters
    ----------
    factor
        The factor: finite and not zero.
    """

    factor: float = 1 / 255

    def __post_init__(self) -> None:
        factor = check_real_number("Scale: factor", self.factor, finite=True)
        if factor == 0:
            raise InputError("Scale: factor must not be 0")
        object.__setattr__(self, "factor", factor)

    def _apply(self, chain: _Chain) -> _Step:
        chain.become_float("Scale")
        return ("scale", self.factor)


@dataclass(frozen=True)
class Normalize(Transform):
    """Compute ``(x - mean) / std``. Integers become float32.

    Parameters
    ----------
    mean, std
        A number, or one per channel. Channels are the last axis of a stored row (of a ragged
        column: of one element): flat rows have one per feature, and images of shape (height, width)
        have one channel. `ToCHW` moves channels but does not change their order. `std` must not be
        0.
    """

    mean: float | tuple[float, ...]
    std: float | tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            value = _check_numbers(f"Normalize: {name}", getattr(self, name))
            object.__setattr__(self, name, value)
        if 0 in (self.std if isinstance(self.std, tuple) else (self.std,)):
            raise InputError("Normalize: std must not be 0")

    def _apply(self, chain: _Chain) -> _Step:
        chain.become_float("Normalize")
        values = {"means": self.mean, "standard deviations": self.std}
        per_channel = {name: value for name, value in values.items() if isinstance(value, tuple)}
        for name, value in per_channel.items():
            if len(value) != chain.channels:
                raise chain.refuse(
                    f"Normalize has {len(value)} {name} for {chain.channels} channels (the last "
                    "axis of a stored row)"
                )
        count = chain.channels if per_channel else 1
        means, stds = (v if isinstance(v, tuple) else (v,) * count for v in values.values())
        return ("normalize", means, stds)


@dataclass(frozen=True)
class Cast(Transform):
    """Convert to a different element type.

    Integers wrap. Floats become integers by truncation; values out of range become the nearest
    representable value, and NaN becomes 0.

    Parameters
    ----------
    dtype
        A name such as ``"float32"``, ``"int64"`` or ``"bfloat16"``, or a NumPy or torch dtype.
    """

    dtype: str

    def __post_init__(self) -> None:
        name = _dtype_name(self.dtype)
        if name not in _INTEGERS and name not in _FLOATS:
            raise InputError(
                f"Cast: unknown dtype {self.dtype!r}; supported are "
                f"{', '.join([*_INTEGERS, *_FLOATS])}"
            )
        object.__setattr__(self, "dtype", name)

    def _apply(self, chain: _Chain) -> _Step:
        if chain.dtype == "complex64":
            raise chain.refuse("Cast does not take complex64 values")
        chain.dtype = self.dtype
        return ("cast", self.dtype)


@dataclass(frozen=True)
class ToCHW(Transform):
    """Turn images of shape (height, width, channels) into (channels, height, width).

    Images of shape (height, width) become (1, height, width).
    """

    def _apply(self, chain: _Chain) -> _Step:
        chain.image_size("ToCHW")
        if chain.chw:
            raise chain.refuse("ToCHW may occur in a chain only once")
        chain.chw = True
        return _TO_CHW


@dataclass(frozen=True)
class RandomCrop(Transform):
    """Cut a part out of an image, at a random position.

    Parameters
    ----------
    size
        Height and width of the part, or one number for both.
    padding
        Zeros added above and below, left and right before cutting, or one number for both. The
        zeros are values at that point of the chain: a later `Normalize` changes them, an earlier
        one does not.
    """

    size: _Size
    padding: _Size = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _check_pair("RandomCrop: size", self.size, 1))
        object.__setattr__(self, "padding", _check_pair("RandomCrop: padding", self.padding, 0))

    def _apply(self, chain: _Chain) -> _Step:
        size, padding = _as_pair(self.size), _as_pair(self.padding)
        before = chain.image_size("RandomCrop")
        for axis in range(2):
            if size[axis] > before[axis] + 2 * padding[axis]:
                raise chain.refuse(
                    f"RandomCrop of {size[0]} x {size[1]} is larger than the image, "
                    f"{before[0]} x {before[1]} with a padding of {padding[0]} and {padding[1]}"
                )
        chain.size = size
        return ("crop", size, padding, chain.augment)


@dataclass(frozen=True)
class RandomHorizontalFlip(Transform):
    """Mirror an image left to right, with probability `p`.

    Parameters
    ----------
    p
        The probability, from 0 to 1.
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        p = check_real_number("RandomHorizontalFlip: p", self.p, least=0, most=1)
        object.__setattr__(self, "p", p)

    def _apply(self, chain: _Chain) -> _Step | None:
        chain.image_size("RandomHorizontalFlip")
        return ("flip", self.p) if chain.augment else None


@dataclass(frozen=True)
class Pad(Transform):
    """Pad the rows of a ragged column to the length of the longest row in the batch.

    Parameters
    ----------
    value
        The padding value, of the element type at that point of the chain.
    max_length
        Longer rows are truncated at the end.
    multiple_of
        The length is rounded up to a multiple of this number, even beyond `max_length`.
    """

    value: float = 0
    max_length: int | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        value: Any = self.value
        if isinstance(value, bool):  # of a column of bools
            value = float(value)
        elif not isinstance(value, int | float):
            value = check_real_number("Pad: value", value)
        object.__setattr__(self, "value", value)
        length = check_whole_number("Pad: max_length", self.max_length, 1, optional=True)
        object.__setattr__(self, "max_length", length)
        multiple = check_whole_number("Pad: multiple_of", self.multiple_of, 1)
        object.__setattr__(self, "multiple_of", multiple)

    def _apply(self, chain: _Chain) -> _Step:
        if not chain.column.ragged:
            raise chain.refuse("Pad is for ragged columns")
        if chain.padded:
            raise chain.refuse("Pad may occur in a chain only once")
        if not _fits(self.value, chain.dtype):
            raise chain.refuse(f"Pad: {self.value} is not a value of type {chain.dtype}")
        chain.padded = True
        return ("pad", float(self.value), self.max_length or 0, self.multiple_of)


_KINDS: dict[str, type[Transform]] = {
    kind.__name__: kind
    for kind in (Scale, Normalize, Cast, ToCHW, RandomCrop, RandomHorizontalFlip, Pad)
}
_IMAGE_KINDS = (ToCHW, RandomCrop, RandomHorizontalFlip)


def transform_from_json(value: Mapping[str, Any]) -> Transform:
    """Return the transform that `to_json` encoded; raise InputError if it is unknown."""
    arguments = dict(value)
    kind = _KINDS.get(arguments.pop("name", ""))
    if kind is None:
        raise InputError(f"unknown transform in {dict(value)!r}")
    try:
        return kind(**arguments)
    except TypeError as error:
        raise InputError(f"{kind.__name__}: {error}") from None


def compile(
    columns: Mapping[str, ColumnLike],
    transforms: Mapping[str, Sequence[Transform]],
    *,
    augment: bool = True,
    channels_last: bool = False,
) -> list[dict[str, Any]]:
    """Check every chain against its column and return the plan for `_core.Loader`.

    The columns are in the order of the batches. Without `augment`, crops are taken from the middle
    and nothing is flipped. With `channels_last`, images with `ToCHW` become tensors of shape
    (channels, height, width) with the strides of PyTorch's ``channels_last``.
    """
    for name in transforms:
        if name not in columns:
            names = ", ".join(columns)
            raise InputError(
                f"transforms for column {name!r}, which does not exist; there are {names}"
            )
    plan = []
    for name, column in columns.items():
        ops = _compile_chain(column, transforms.get(name, ()), augment)
        # With one channel, both layouts are the same bytes.
        stays = channels_last and _TO_CHW in ops and len(column.shape) == 3 and column.shape[2] > 1
        if stays:
            ops.remove(_TO_CHW)
        plan.append({"name": name, "ops": ops, "channels_last": stays})
    return plan


def _compile_chain(column: ColumnLike, steps: Sequence[Transform], augment: bool) -> list[_Step]:
    shape = column.shape
    of_images = any(isinstance(step, _IMAGE_KINDS) for step in steps)
    is_image = of_images and not column.ragged and len(shape) in (2, 3)
    chain = _Chain(
        column=column,
        dtype=column.dtype,
        size=(shape[0], shape[1]) if is_image else None,
        channels=1 if not shape or (is_image and len(shape) == 2) else shape[-1],
        augment=augment,
    )
    if len(steps) > _MAX_STEPS:
        raise chain.refuse(f"{len(steps)} transforms; a chain may have at most {_MAX_STEPS}")
    plan = []
    for step in steps:
        if not isinstance(step, Transform):
            raise chain.refuse(
                f"{step!r} is not a transform of cerebro.transforms; pass your own function as "
                "augment= of cerebro.torch.Model"
            )
        compiled = step._apply(chain)
        if compiled is not None:
            plan.append(compiled)
    return plan


# --- arguments ----------------------------------------------------------------


def _check_numbers(name: str, value: Any) -> float | tuple[float, ...]:
    if hasattr(value, "tolist"):  # NumPy arrays and scalars, torch tensors
        value = value.tolist()
    if isinstance(value, Iterable) and not isinstance(value, str):
        return tuple(check_real_number(name, item, finite=True) for item in value)
    return check_real_number(name, value, finite=True)


def _check_pair(name: str, value: Any, least: int) -> _Size:
    if not isinstance(value, Sequence):
        return check_whole_number(name, value, least)
    if len(value) != 2:
        raise InputError(f"{name} must be a number or a pair, not {value!r}")
    return check_whole_number(name, value[0], least), check_whole_number(name, value[1], least)


def _as_pair(size: _Size) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def _dtype_name(dtype: Any) -> str:
    if isinstance(dtype, str):
        return dtype.removeprefix("torch.")
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).removeprefix("torch.").removesuffix("_")


def _fits(value: float, dtype: str) -> bool:
    if dtype in _INTEGERS:
        low, high = _INTEGERS[dtype]
        whole = math.isfinite(value) and value == int(value)
        # Beyond 2**53 a double cannot represent every integer.
        return whole and low <= value <= high and float(value) == value
    return dtype != "complex64" or value == 0

"""The dimensions of a space, and the values of configurations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from statistics import NormalDist
from typing import Any

from cerebro.errors import InputError

Path = tuple[str, ...]


def path_name(path: Path) -> str:
    """Return a dimension's path as written in messages, such as ``augment.crop``."""
    return ".".join(path)


def put_at(config: dict[str, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        config = config[key]
    config[path[-1]] = value


def json_value(value: object, name: str, *, keep_tuples: bool = False) -> Any:
    """Return `value` as a JSON round trip would; raise InputError, with `name`, if it cannot."""
    if hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InputError(f"{name}: {value} is not a finite number")
        return value
    if isinstance(value, (list, tuple)):
        items = [json_value(item, name, keep_tuples=keep_tuples) for item in value]
        return tuple(items) if keep_tuples and isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InputError(f"{name}: the keys of a mapping must be strings")
        return {k: json_value(item, name, keep_tuples=keep_tuples) for k, item in value.items()}
    if isinstance(value, (Dimension, When)):
        raise InputError(
            f"{name}: {value!r} is nested inside another value; give it its own key, "
            "under when(...) if it depends on another choice"
        )
    if getattr(value, "ndim", 0) and hasattr(value, "tolist"):
        raise InputError(f"{name}: {value!r} is an array inside a value: give a list (.tolist())")
    raise InputError(
        f"{name}: {value!r} cannot be stored as JSON; use a name (a string) and look the "
        "object up in build"
    )


def _check_number(value: object, label: str, name: str) -> float:
    """Return a dimension's argument; raise InputError unless it is a finite real number."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{name}: {label} must be a number, not {value!r}")
    if not math.isfinite(value):
        raise InputError(f"{name}: {label} must be finite, not {value!r}")
    return value


def _check_whole_number(value: object, label: str, name: str) -> int:
    number = _check_number(value, label, name)
    if number != int(number):
        raise InputError(f"{name}: {label} must be a whole number, not {value!r}")
    return int(number)


class Dimension:
    """Base class of the entries of a space, which the functions of this module create."""

    def checked(self, name: str) -> Dimension:
        """Return this dimension with checked, plain arguments; called when its name is known."""
        raise NotImplementedError

    def draw(self, share: float) -> Any:
        """Return the distribution's value at the quantile `share`, 0 <= share < 1."""
        raise NotImplementedError

    def count(self) -> int | None:
        """Return the number of values, or None if they cannot be enumerated."""
        return None

    def values(self) -> Iterator[Any]:
        """Yield every value in order; callable only if :meth:`count` is not None."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the dimension as JSON; see :meth:`Space.from_json`."""
        return {"type": type(self).__name__.lower(), **vars(self)}

    def __repr__(self) -> str:
        """Return the call that makes it, without the arguments that have their defaults."""
        defaults = vars(type(self))
        shown = [
            f"{name}={value!r}" if name in defaults else repr(value)
            for name, value in vars(self).items()
            if name not in defaults or value != defaults[name]
        ]
        return f"{type(self).__name__.lower()}({', '.join(shown)})"


def _index(share: float, count: int) -> int:
    """Return which of `count` equal parts of [0, 1) contains `share`."""
    return min(int(share * count), count - 1)


def _check_bounds(dimension: Uniform | LogUniform, name: str) -> tuple[float, float]:
    low = _check_number(dimension.low, "low", name)
    high = _check_number(dimension.high, "high", name)
    if low > high:
        raise InputError(f"{name}: {dimension!r}: low is above high; swap them")
    return float(low), float(high)


@dataclass(frozen=True, repr=False)
class Uniform(Dimension):
    """See :func:`uniform`."""

    low: float
    high: float
    step: float | None = None

    def checked(self, name: str) -> Uniform:
        low, high = _check_bounds(self, name)
        if self.step is None:
            return Uniform(low, high)
        step = _check_number(self.step, "step", name)
        if step <= 0:
            raise InputError(f"{name}: {self!r}: step must be above 0")
        return Uniform(low, high, float(step))

    def draw(self, share: float) -> float:
        count = self.count()
        if count is not None:
            return self._value_at_step(_index(share, count))
        return min(self.low + (self.high - self.low) * share, self.high)

    def count(self) -> int | None:
        if self.step is None:
            return None
        # In decimal, so that uniform(0, 0.3, step=0.1) has the expected four values.
        span = Decimal(repr(self.high)) - Decimal(repr(self.low))
        return int(span / Decimal(repr(self.step))) + 1

    def _value_at_step(self, index: int) -> float:
        return float(Decimal(repr(self.low)) + index * Decimal(repr(self.step)))

    def nearest(self, value: float) -> float:
        """Return the nearest of the values that a step allows."""
        assert self.step is not None
        index = round((value - self.low) / self.step)
        return self._value_at_step(min(max(index, 0), (self.count() or 1) - 1))

    def values(self) -> Iterator[float]:
        return (self._value_at_step(index) for index in range(self.count() or 0))


@dataclass(frozen=True, repr=False)
class LogUniform(Dimension):
    """See :func:`loguniform`."""

    low: float
    high: float

    def checked(self, name: str) -> LogUniform:
        low, high = _check_bounds(self, name)
        if low <= 0:
            raise InputError(
                f"{name}: {self!r}: low must be above 0; the bounds are values, "
                "not their logarithms"
            )
        return LogUniform(low, high)

    def draw(self, share: float) -> float:
        low, high = math.log(self.low), math.log(self.high)
        return min(max(math.exp(low + (high - low) * share), self.low), self.high)


@dataclass(frozen=True, repr=False)
class Integer(Dimension):
    """See :func:`integer`."""

    low: int
    high: int
    step: int = 1
    log: bool = False

    def checked(self, name: str) -> Integer:
        low = _check_whole_number(self.low, "low", name)
        high = _check_whole_number(self.high, "high", name)
        step = _check_whole_number(self.step, "step", name)
        if low > high:
            raise InputError(f"{name}: {self!r}: low is above high; swap them")
        if step <= 0:
            raise InputError(f"{name}: {self!r}: step must be above 0")
        if self.log and low <= 0:
            raise InputError(f"{name}: {self!r}: low must be above 0 if log=True")
        if self.log and step != 1:
            raise InputError(f"{name}: {self!r}: step and log=True cannot be combined")
        return Integer(low, high, step, bool(self.log))

    def draw(self, share: float) -> int:
        if not self.log:
            return self.low + self.step * _index(share, self.count())
        # Half a unit beyond both ends, which makes the ends as likely as their neighbors.
        low, high = math.log(self.low - 0.5), math.log(self.high + 0.5)
        return min(max(round(math.exp(low + (high - low) * share)), self.low), self.high)

    def count(self) -> int:
        return (self.high - self.low) // self.step + 1

    def nearest(self, value: float) -> int:
        """Return the dimension's value nearest to a number."""
        index = round((value - self.low) / self.step)
        return self.low + self.step * min(max(index, 0), self.count() - 1)

    def values(self) -> Iterator[int]:
        return iter(range(self.low, self.high + 1, self.step))


@dataclass(frozen=True, repr=False)
class Normal(Dimension):
    """See :func:`normal`."""

    mean: float
    std: float

    def checked(self, name: str) -> Normal:
        mean, std = _check_number(self.mean, "mean", name), _check_number(self.std, "std", name)
        if std <= 0:
            raise InputError(f"{name}: {self!r}: std must be above 0")
        return Normal(float(mean), float(std))

    def draw(self, share: float) -> float:
        # The middle of the interval of width 2**-53 that starts at `share`: never 0 or 1.
        return NormalDist(self.mean, self.std).inv_cdf(min(share + 2.0**-54, 1 - 2.0**-53))


@dataclass(frozen=True, repr=False)
class Choice(Dimension):
    """See :func:`choice`."""

    options: Sequence[Any]

    def checked(self, name: str) -> Choice:
        if isinstance(self.options, (str, bytes, Mapping)):
            raise InputError(f"{name}: {self!r}: the options must be a list")
        try:
            options = list(self.options)
        except TypeError:
            raise InputError(f"{name}: {self!r}: the options must be a list") from None
        if not options:
            raise InputError(f"{name}: a choice needs at least one option")
        return Choice([json_value(option, name) for option in options])

    def draw(self, share: float) -> Any:
        return self.options[_index(share, len(self.options))]

    def count(self) -> int:
        return len(self.options)

    def values(self) -> Iterator[Any]:
        return iter(self.options)


@dataclass(frozen=True)
class Constant(Dimension):
    """A value that is the same in every configuration."""

    value: Any

    def checked(self, name: str) -> Constant:
        return Constant(json_value(self.value, name))

    def draw(self, share: float) -> Any:
        return self.value

    def count(self) -> int:
        return 1

    def values(self) -> Iterator[Any]:
        yield self.value

    def __repr__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class When:
    """See :func:`when`."""

    name: str
    value: Any
    space: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"when({self.name!r}, {self.value!r}, {self.space!r})"


def uniform(low: float, high: float, step: float | None = None) -> Uniform:
    """Return a dimension of floats, uniformly distributed from `low` to `high`.

    Parameters
    ----------
    low, high
        The bounds, both included.
    step
        If given, only ``low, low + step, ...`` up to `high` are drawn, and the dimension can be
        part of a grid.

    Notes
    -----
    Invalid arguments raise :class:`~cerebro.errors.InputError`, naming the dimension, when the
    space is made.
    """
    return Uniform(low, high, step)


def loguniform(low: float, high: float) -> LogUniform:
    """Return a dimension of floats whose logarithm is uniform; 0 < low <= high.

    The bounds are values, not logarithms: ``loguniform(1e-4, 1e-1)``.
    """
    return LogUniform(low, high)


def integer(low: int, high: int, step: int = 1, log: bool = False) -> Integer:
    """Return a dimension of integers from `low` to `high`, both included.

    With `log`, values are distributed as in :func:`loguniform`; `low` must then be above 0 and
    `step` 1.
    """
    return Integer(low, high, step, log)


def choice(options: Sequence[Any]) -> Choice:
    """Return a dimension of equally likely options; a plain list means the same.

    Options are values that JSON can store (see :mod:`cerebro.space`); ``build`` receives a tuple as
    a list.
    """
    return Choice(options)


def normal(mean: float, std: float) -> Normal:
    """Return a dimension of normally distributed floats."""
    return Normal(mean, std)


def when(name: str, value: Any, space: Mapping[str, Any]) -> When:
    """Return a conditional space: its entries exist only if ``config[name] == value``.

    Parameters
    ----------
    name
        A key of the mapping that contains the ``when``, or of an enclosing one.
    value
        The value, or a list of values, for which the condition holds.
    space
        A mapping like any space; it may contain nested mappings and further conditions.

    Examples
    --------
    The key is a label that does not appear in configurations; several conditions
    may share one as a list:

    >>> {
    ...     "optimizer": ["sgd", "adamw"],
    ...     "optimizer options": [
    ...         when("optimizer", "sgd", {"momentum": uniform(0, 0.99)}),
    ...         when("optimizer", "adamw", {"weight_decay": loguniform(1e-5, 1e-1)}),
    ...     ],
    ... }  # doctest: +SKIP

    Two conditions may set the same key if they depend on the same name and have
    no value in common.
    """
    return When(name, value, space)

"""Dimensions of other libraries' spaces: Ray Tune's, Optuna's and SciPy's.

They are recognized by the module and name of their class, so no library is imported. The possible
values are exactly those of the library: Tune's integers exclude their upper end, Optuna's include
it. Probabilities are the library's too, with two exceptions: integers on a logarithmic scale are
rounded to the nearest (Tune rounds down), and all multiples of a step are equally likely (in Tune's
``quniform``, the first and last are half as likely).

Only Tune has quantized dimensions, grids, whose options trials take in turn (`grid_search`), and
values computed from the rest of the configuration (`sample_from`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import cerebro._core as _core
from cerebro.errors import InputError, text_of
from cerebro.machine import generators
from cerebro.space.dimensions import (
    Choice,
    Dimension,
    Integer,
    LogUniform,
    Normal,
    Path,
    Uniform,
    json_value,
    path_name,
    put_at,
)


@dataclass(frozen=True, repr=False)
class Quantized(Dimension):
    """The multiple of `q` nearest to a number from `inner`, or `q` times an `Integer`'s value."""

    inner: Integer | LogUniform | Normal
    q: float

    def checked(self, name: str) -> Quantized:
        if isinstance(self.q, bool) or not isinstance(self.q, (int, float)) or not self.q > 0:
            raise InputError(f"{name}: {self!r}: the quantum must be above 0")
        inner: Any = self.inner.checked(name)
        return Quantized(inner, self.q)

    def draw(self, share: float) -> Any:
        value = self.inner.draw(share)
        is_factor = isinstance(self.inner, Integer)
        return compute_multiple(int(value) if is_factor else round(value / self.q), self.q)

    def _find_ends(self) -> tuple[int, int] | None:
        """Return the smallest and the largest value as multiples of `q`; None if unbounded."""
        if isinstance(self.inner, Normal):
            return None
        scale = 1 if isinstance(self.inner, Integer) else self.q
        return round(self.inner.low / scale), round(self.inner.high / scale)

    def count(self) -> int | None:
        ends = self._find_ends()
        return None if ends is None else ends[1] - ends[0] + 1

    def values(self) -> Iterator[Any]:
        low, high = self._find_ends() or (0, -1)
        return (compute_multiple(index, self.q) for index in range(low, high + 1))

    def nearest(self, value: float) -> Any:
        """Return the dimension's value nearest to a number."""
        index = round(value / self.q)
        ends = self._find_ends()
        if ends is not None:
            index = min(max(index, ends[0]), ends[1])
        return compute_multiple(index, self.q)

    def to_json(self) -> dict[str, Any]:
        return {"type": "quantized", "inner": self.inner.to_json(), "q": self.q}


@dataclass(frozen=True)
class Grid(Choice):
    """A choice whose options trials take in turn, not at random; see `Space.complete`."""

    def checked(self, name: str) -> Grid:
        return Grid(super().checked(name).options)

    def __repr__(self) -> str:
        return f"grid_search({self.options!r})"


# --- values computed from others ------------------------------------------------

_functions: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""Functions by `Derived.identity`. A store keeps no code; the script that resumes has them."""


@dataclass(frozen=True)
class Derived(Dimension):
    """A value that a function computes from the rest of the configuration."""

    function: Callable[..., Any] = field(repr=False)
    takes_config: bool = True

    def checked(self, name: str) -> Derived:
        if not callable(self.function):
            raise InputError(f"{name}: sample_from needs a function, not {self.function!r}")
        _functions[self.identity] = self.function
        return self

    @property
    def identity(self) -> str:
        """The function's position in the source and a hash of its code."""
        function: Any = self.function
        code = getattr(function, "__code__", None)
        if code is None:
            return f"{type(function).__module__}.{type(function).__qualname__}"
        plain = (int, float, str, bytes, type(None))
        constants = [constant for constant in code.co_consts if isinstance(constant, plain)]
        digest = _core.xxh3_64(repr((code.co_code, code.co_names, constants)).encode())
        return f"{function.__qualname__}:{code.co_firstlineno}:{digest}"

    def draw(self, share: float) -> Unsettled:
        return Unsettled(self, share)

    def count(self) -> int:
        return 1

    def values(self) -> Iterator[Unsettled]:
        yield self.draw(0.5)

    def to_json(self) -> dict[str, Any]:
        return {"type": "derived", "function": self.identity, "takes_config": self.takes_config}

    @classmethod
    def from_json(cls, function: str, takes_config: bool) -> Derived:
        """Return the dimension of a function of this process, by its identity."""
        original = _functions.get(function)
        if original is None:
            raise InputError(
                f"the space has a function (sample_from, {function.partition(':')[0]}), which is "
                "not stored: rerun the script that began the run, with if_exists='resume'"
            )
        return cls(original, takes_config)

    def __repr__(self) -> str:
        return f"sample_from({getattr(self.function, '__qualname__', self.function)!s})"


@dataclass(frozen=True)
class Unsettled:
    """A placeholder for a value that is computed after the values that do not depend on it."""

    dimension: Derived
    share: float

    def settle(self, config: Mapping[str, Any], name: str) -> Any:
        """Return the value; raise Missing if it needs a value that `config` does not have yet."""
        arguments = (View(config),) if self.dimension.takes_config else ()
        try:
            # `random` and NumPy's global generator are seeded from the dimension's stream.
            with generators.reserve_generators(False, int(self.share * 2**32)):
                value = self.dimension.function(*arguments)
        except Missing:
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {text_of(error)}"
            raise InputError(f"{name}: {self.dimension!r} failed: {cause}") from error
        return json_value(value, name)


class Missing(AttributeError, KeyError):
    """Raised if a function needs a value that does not exist."""


class View(dict[str, Any]):
    """A configuration as Tune's functions use it: ``spec.config.lr``, ``config["lr"]``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__({k: View(v) if isinstance(v, Mapping) else v for k, v in config.items()})

    def __missing__(self, name: str) -> Any:
        if name == "config":
            return self
        raise Missing(name)

    def __getattr__(self, name: str) -> Any:
        return self[name]


def settle_values(unsettled: list[tuple[Path, Unsettled]], config: dict[str, Any]) -> None:
    """Compute values, which may need one another, and put them at their paths."""
    while unsettled:
        remaining = []
        for path, value in unsettled:
            try:
                put_at(config, path, value.settle(config, path_name(path)))
            except Missing as missing:
                remaining.append((path, value))
                cause = missing
        if len(remaining) == len(unsettled):
            path, value = remaining[0]
            raise InputError(
                f"{path_name(path)}: {value.dimension!r} needs {cause.args[0]!r}, which the "
                "configuration lacks at that point"
            )
        unsettled = remaining


def compute_multiple(index: int, q: float) -> Any:
    """Return a multiple of the quantum, computed in decimal: 3 times 0.1 is 0.3."""
    return index * q if isinstance(q, int) else float(index * Decimal(repr(q)))


def round_to_grid(bound: float, q: float, inwards: Callable[[float], int]) -> int:
    """Return a bound divided by the step `q`, rounded by `inwards` to a whole number."""
    scaled = bound / q
    nearest = round(scaled)
    return nearest if math.isclose(scaled, nearest) else int(inwards(scaled))


def translate(value: object, name: str) -> Dimension | None:
    """Return another library's dimension as Cerebro's; None if the object is not one."""
    kind = type(value)
    if kind.__module__.startswith("ray.tune."):
        return _from_tune(value, name)
    if kind.__module__.startswith("optuna.distributions"):
        return _from_optuna(value, name)
    if kind.__name__ == "rv_frozen" or (kind.__name__.startswith("rv_") and hasattr(value, "dist")):
        return _from_scipy(value, name)
    if isinstance(value, Mapping) and set(value) == {"grid_search"}:
        return Grid(value["grid_search"])
    return None


def _refusal(name: str, what: str, hint: str) -> InputError:
    return InputError(f"{name}: {what} has no equivalent in Cerebro: {hint}")


def _from_tune(value: Any, name: str) -> Dimension:
    kind = type(value).__name__
    if kind == "Categorical":
        return Choice(list(value.categories))
    if kind == "Function":
        return Derived(value.func, value.pass_config)
    sampler, q = value.sampler, None
    if type(sampler).__name__ == "Quantized":
        sampler, q = sampler.sampler, sampler.q
    drawn = type(sampler).__name__
    if kind == "Integer" and drawn in ("_Uniform", "_LogUniform"):
        return _tune_integer(value, name, q, log=drawn == "_LogUniform")
    if kind == "Float" and drawn == "_Normal":
        normal = Normal(sampler.mean, sampler.sd)
        return normal if q is None else Quantized(normal, q)
    if kind == "Float" and drawn in ("_Uniform", "_LogUniform"):
        log = drawn == "_LogUniform"
        if q is None:
            return (LogUniform if log else Uniform)(value.lower, value.upper)
        low, high = (compute_multiple(index, q) for index in _find_multiples(value, name, q))
        return Quantized(LogUniform(low, high), q) if log else Uniform(low, high, q)
    raise _refusal(name, f"tune's {kind}", "use tune.uniform, randint, choice or a variant of them")


def _tune_integer(value: Any, name: str, q: Any, *, log: bool) -> Dimension:
    """Translate Tune's integers, which exclude their upper end unless `q` is above 1."""
    if q is None or q == 1:
        return Integer(value.lower, value.upper - 1, log=log)
    low, high = _find_multiples(value, name, q)
    return Quantized(Integer(low, high, log=True), q) if log else Integer(low * q, high * q, q)


def _find_multiples(value: Any, name: str, q: float) -> tuple[int, int]:
    """Return the first and last factor of `q` within a domain's bounds."""
    low, high = round_to_grid(value.lower, q, math.ceil), round_to_grid(value.upper, q, math.floor)
    if low > high:
        raise InputError(f"{name}: there is no multiple of {q} from {value.lower} to {value.upper}")
    return low, high


def _from_optuna(value: Any, name: str) -> Dimension:
    kind = type(value).__name__
    if kind == "CategoricalDistribution":
        return Choice(list(value.choices))
    if kind == "FloatDistribution" and value.log:
        return LogUniform(value.low, value.high)
    if kind == "FloatDistribution":
        return Uniform(value.low, value.high, value.step)
    if kind == "IntDistribution":
        return Integer(value.low, value.high, value.step, value.log)
    raise _refusal(name, f"optuna's {kind}", "use FloatDistribution or IntDistribution")


def _from_scipy(value: Any, name: str) -> Dimension:
    kind = value.dist.name
    # The names of the positional arguments: shapes come first.
    shapes = (value.dist.shapes or "").replace(" ", "").split(",")
    names = [*filter(None, shapes), "loc", "scale"]
    arguments = {**dict(zip(names, value.args, strict=False)), **value.kwds}
    loc, scale = arguments.get("loc", 0), arguments.get("scale", 1)
    if kind == "uniform":
        return Uniform(loc, loc + scale)
    if kind in ("loguniform", "reciprocal") and loc == 0:
        return LogUniform(arguments["a"] * scale, arguments["b"] * scale)
    if kind == "norm":
        return Normal(loc, scale)
    if kind == "randint":
        return Integer(arguments["low"] + loc, arguments["high"] + loc - 1)
    what = f"scipy.stats.{kind}" + (f" with loc={loc}" if loc != 0 else "")
    raise _refusal(name, what, "use uniform, loguniform, norm or randint")

"""Dimensions of other libraries' spaces: Ray Tune's, Optuna's and SciPy's.

They are recognized by the module and name of their class, so no library is imported. The possible
values are exactly those of the library: Tune's integers exclude their upper end, Optuna's include
it. Probabilities are the library's too, with two exceptions: integers on a logarithmic scale are
rounded to the nearest (Tune rounds down), and all multiples of a step are equally likely (in Tune's
``quniform``, the first and last are half as likely).

Tune's ``grid_search`` becomes a `Grid`, whose options trials take in turn; ``sample_from`` becomes
a `Derived`, which is computed after the rest of the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cerebro.errors import InputError
from cerebro.space.dimensions import Choice, Dimension, Integer, LogUniform, Normal, Uniform
from cerebro.space.tune_dimensions import Derived, Grid, Quantized, compute_multiple, round_to_grid


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


# --- Ray Tune -----------------------------------------------------------------


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


# --- Optuna ---------------------------------------------------------------------


def _from_optuna(value: Any, name: str) -> Dimension:
    kind = type(value).__name__
    if kind == "CategoricalDistribution":
        return Choice(list(value.choices))
    if kind == "FloatDistribution":
        return (
            LogUniform(value.low, value.high)
            if value.log
            else Uniform(value.low, value.high, value.step)
        )
    if kind == "IntDistribution":
        return Integer(value.low, value.high, value.step, value.log)
    raise _refusal(name, f"optuna's {kind}", "use FloatDistribution or IntDistribution")


# --- SciPy ------------------------------------------------------------------------


def _from_scipy(value: Any, name: str) -> Dimension:
    kind = value.dist.name
    arguments = _scipy_arguments(value)
    loc, scale = arguments.get("loc", 0), arguments.get("scale", 1)
    if kind == "uniform":
        return Uniform(loc, loc + scale)
    if kind in ("loguniform", "reciprocal") and loc == 0:
        return LogUniform(arguments["a"] * scale, arguments["b"] * scale)
    if kind == "norm":
        return Normal(loc, scale)
    if kind == "randint":
        return Integer(arguments["low"] + loc, arguments["high"] + loc - 1)
    raise _refusal(
        name,
        f"scipy.stats.{kind}" + (f" with loc={loc}" if loc != 0 else ""),
        "use uniform, loguniform, norm or randint",
    )


def _scipy_arguments(value: Any) -> dict[str, Any]:
    """Return a frozen distribution's arguments by name; shapes come first, then loc, scale."""
    shapes = (value.dist.shapes or "").replace(" ", "").split(",")
    names = [shape for shape in shapes if shape] + ["loc", "scale"]
    return {**dict(zip(names, value.args, strict=False)), **value.kwds}

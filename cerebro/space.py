"""Search spaces: which configurations there are, and how one is drawn.

A space is a mapping of names to dimensions::

    {
        "lr": loguniform(1e-4, 1e-1),
        "batch_size": [32, 256],                      # a list means choice([32, 256])
        "layers": integer(1, 4),
        "optimizer": ["sgd", "adamw"],
        "if sgd": when("optimizer", "sgd", {"momentum": uniform(0.0, 0.99)}),
        "augment": {"crop": [0, 2, 4], "flip": [False, True]},   # nested
        "epochs_warm": 1,                             # a constant
    }

A key whose value is a :func:`when`, or a list of them, is only a label: it does
not appear in the configuration. The entries of the conditional space are merged
into the mapping in which the ``when`` stands, if its condition holds.

Every dimension draws from a stream of its own, keyed by the search's seed, the
trial's number and the dimension's path, so adding, removing or moving a
dimension leaves the values of the others as they were.

Configurations are stored as JSON, so a value is None, a bool, a finite number,
a string, or lists and mappings of those; tuples become lists. Choose among
functions or classes by name.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from statistics import NormalDist
from typing import Any

from cerebro import _core
from cerebro.errors import InputError

Path = tuple[str, ...]

# More configurations than this in a grid is a mistake rather than a plan.
GRID_LIMIT = 100_000


def path_name(path: Path) -> str:
    """Return how a dimension's path is written in messages, such as ``augment.crop``."""
    return ".".join(path)


def json_value(value: object, name: str) -> Any:
    """Return `value` as what JSON gives back: tuples as lists, NumPy scalars as numbers.

    Raises
    ------
    InputError
        If the value cannot be stored as JSON; the message begins with `name`.
    """
    if hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InputError(f"{name}: {value} is not a finite number")
        return value
    if isinstance(value, (list, tuple)):
        return [json_value(item, name) for item in value]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InputError(f"{name}: the keys of a mapping must be strings")
        return {key: json_value(item, name) for key, item in value.items()}
    if isinstance(value, (Dimension, When)):
        raise InputError(
            f"{name}: {value!r} stands inside a value; give it a key of its own, "
            "under when(...) if it depends on another choice"
        )
    raise InputError(
        f"{name}: {value!r} cannot be stored as JSON; use a name (a string) and look the "
        "object up in build"
    )


def _number(value: object, label: str, name: str) -> float:
    """Check that an argument of a dimension is a finite real number."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{name}: {label} must be a number, not {value!r}")
    if not math.isfinite(value):
        raise InputError(f"{name}: {label} must be finite, not {value!r}")
    return value


def _whole(value: object, label: str, name: str) -> int:
    number = _number(value, label, name)
    if number != int(number):
        raise InputError(f"{name}: {label} must be a whole number, not {value!r}")
    return int(number)


class Dimension:
    """One entry of a space. Made by the functions of this module."""

    def checked(self, name: str) -> Dimension:
        """Return this dimension with its arguments checked and made plain.

        Called when the space is made, because only then is the name known.
        """
        raise NotImplementedError

    def draw(self, share: float) -> Any:
        """Return the value at `share`, 0 <= share < 1, of the dimension's distribution."""
        raise NotImplementedError

    def count(self) -> int | None:
        """Return how many values there are, None if they cannot be enumerated."""
        return None

    def values(self) -> Iterator[Any]:
        """Give every value in order; only where :meth:`count` is not None."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the dimension as JSON, see :meth:`Space.from_json`."""
        return {"type": type(self).__name__.lower(), **vars(self)}


def _index(share: float, count: int) -> int:
    """Return which of `count` equal parts of [0, 1) `share` is in."""
    return min(int(share * count), count - 1)


def _check_bounds(dimension: Dimension, low: float, high: float, name: str) -> None:
    if low > high:
        raise InputError(f"{name}: {dimension!r}: low is above high; swap them")


@dataclass(frozen=True)
class Uniform(Dimension):
    """See :func:`uniform`."""

    low: float
    high: float
    step: float | None = None

    def checked(self, name: str) -> Uniform:
        low, high = _number(self.low, "low", name), _number(self.high, "high", name)
        _check_bounds(self, low, high, name)
        if self.step is None:
            return Uniform(float(low), float(high))
        step = _number(self.step, "step", name)
        if step <= 0:
            raise InputError(f"{name}: {self!r}: step must be above 0")
        return Uniform(float(low), float(high), float(step))

    def draw(self, share: float) -> float:
        count = self.count()
        if count is not None:
            return self._at(_index(share, count))
        return min(self.low + (self.high - self.low) * share, self.high)

    def count(self) -> int | None:
        if self.step is None:
            return None
        # In decimal, so that uniform(0, 0.3, step=0.1) has the four values it shows.
        span = Decimal(repr(self.high)) - Decimal(repr(self.low))
        return int(span / Decimal(repr(self.step))) + 1

    def _at(self, index: int) -> float:
        return float(Decimal(repr(self.low)) + index * Decimal(repr(self.step)))

    def values(self) -> Iterator[float]:
        return (self._at(index) for index in range(self.count() or 0))

    def __repr__(self) -> str:
        step = "" if self.step is None else f", step={self.step!r}"
        return f"uniform({self.low!r}, {self.high!r}{step})"


@dataclass(frozen=True)
class LogUniform(Dimension):
    """See :func:`loguniform`."""

    low: float
    high: float

    def checked(self, name: str) -> LogUniform:
        low, high = _number(self.low, "low", name), _number(self.high, "high", name)
        _check_bounds(self, low, high, name)
        if low <= 0:
            raise InputError(
                f"{name}: {self!r}: low must be above 0; the bounds are the values themselves, "
                "not their logarithms"
            )
        return LogUniform(float(low), float(high))

    def draw(self, share: float) -> float:
        low, high = math.log(self.low), math.log(self.high)
        return min(max(math.exp(low + (high - low) * share), self.low), self.high)

    def __repr__(self) -> str:
        return f"loguniform({self.low!r}, {self.high!r})"


@dataclass(frozen=True)
class Integer(Dimension):
    """See :func:`integer`."""

    low: int
    high: int
    step: int = 1
    log: bool = False

    def checked(self, name: str) -> Integer:
        low, high = _whole(self.low, "low", name), _whole(self.high, "high", name)
        step = _whole(self.step, "step", name)
        _check_bounds(self, low, high, name)
        if step <= 0:
            raise InputError(f"{name}: {self!r}: step must be above 0")
        if self.log and low <= 0:
            raise InputError(f"{name}: {self!r}: low must be above 0 where log=True")
        if self.log and step != 1:
            raise InputError(f"{name}: {self!r}: step and log=True exclude each other")
        return Integer(low, high, step, bool(self.log))

    def draw(self, share: float) -> int:
        if not self.log:
            return self.low + self.step * _index(share, self.count())
        # Half a unit beyond both ends, so that the ends are as likely as their neighbours.
        low, high = math.log(self.low - 0.5), math.log(self.high + 0.5)
        return min(max(round(math.exp(low + (high - low) * share)), self.low), self.high)

    def count(self) -> int:
        return (self.high - self.low) // self.step + 1

    def values(self) -> Iterator[int]:
        return iter(range(self.low, self.high + 1, self.step))

    def __repr__(self) -> str:
        step = "" if self.step == 1 else f", step={self.step!r}"
        log = ", log=True" if self.log else ""
        return f"integer({self.low!r}, {self.high!r}{step}{log})"


@dataclass(frozen=True)
class Normal(Dimension):
    """See :func:`normal`."""

    mean: float
    std: float

    def checked(self, name: str) -> Normal:
        mean, std = _number(self.mean, "mean", name), _number(self.std, "std", name)
        if std <= 0:
            raise InputError(f"{name}: {self!r}: std must be above 0")
        return Normal(float(mean), float(std))

    def draw(self, share: float) -> float:
        # The middle of the 2**-53 wide interval that `share` begins: never 0 or 1.
        return NormalDist(self.mean, self.std).inv_cdf(min(share + 2.0**-54, 1 - 2.0**-53))

    def __repr__(self) -> str:
        return f"normal({self.mean!r}, {self.std!r})"


@dataclass(frozen=True)
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

    def __repr__(self) -> str:
        return f"choice({self.options!r})"


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
        return f"when({self.name!r}, {self.value!r}, {dict(self.space)!r})"


def uniform(low: float, high: float, step: float | None = None) -> Uniform:
    """Return a dimension of floats, equally likely from `low` to `high`.

    Parameters
    ----------
    low, high
        The ends, which are values of the dimension.
    step
        If given, only ``low, low + step, ...`` up to `high` are drawn, and the
        dimension can be part of a grid.

    Notes
    -----
    Wrong arguments raise :class:`~cerebro.errors.InputError`, naming the
    dimension, when the space is made of it.
    """
    return Uniform(low, high, step)


def loguniform(low: float, high: float) -> LogUniform:
    """Return a dimension of floats whose logarithm is uniform; 0 < low <= high.

    The bounds are the values themselves: ``loguniform(1e-4, 1e-1)``.
    """
    return LogUniform(low, high)


def integer(low: int, high: int, step: int = 1, log: bool = False) -> Integer:
    """Return a dimension of integers from `low` to `high`, both ends in.

    With `log`, small values are more likely in the way of :func:`loguniform`;
    `low` must then be above 0 and `step` 1.
    """
    return Integer(low, high, step, log)


def choice(options: Sequence[Any]) -> Choice:
    """Return a dimension of the given options, each as likely; a plain list means the same.

    Options are values that JSON can store (see :mod:`cerebro.space`).
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
        A key of the mapping in which the ``when`` stands, or of one around it.
    value
        The value, or a list of values, for which the condition holds.
    space
        A mapping like any space; it may hold nested mappings and further conditions.

    Examples
    --------
    The key is a label and does not appear in configurations; several conditions
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


@dataclass(frozen=True)
class _Condition:
    path: Path
    values: list[Any]


@dataclass(frozen=True)
class _Node:
    """A dimension at its path, there if all its conditions hold."""

    path: Path
    dimension: Dimension
    conditions: tuple[_Condition, ...]
    # A mapping rather than a value: made empty, filled by the nodes below it.
    nest: bool = False

    def applies(self, config: Mapping[str, Any]) -> bool:
        """Return whether `config`, settled up to here, is to get this node's value."""
        if self.nest and _get(config, self.path)[0]:
            return False
        return _holds(config, self.conditions)

    @property
    def stream(self) -> int:
        """The key of the dimension's stream: the hash of its path as a JSON pointer."""
        escaped = (key.replace("~", "~0").replace("/", "~1") for key in self.path)
        return int(_core.xxh3_64(("/" + "/".join(escaped)).encode()), 16)


def _get(config: Mapping[str, Any], path: Path) -> tuple[bool, Any]:
    value: Any = config
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return False, None
        value = value[key]
    return True, value


def _put(config: dict[str, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        config = config[key]
    config[path[-1]] = value


def _holds(config: Mapping[str, Any], conditions: Sequence[_Condition]) -> bool:
    for condition in conditions:
        there, value = _get(config, condition.path)
        if not there or value not in condition.values:
            return False
    return True


class _Compiler:
    """Turns a mapping into nodes, every one after those that it depends on."""

    def __init__(self) -> None:
        self.nodes: list[_Node] = []

    def mapping(
        self, mapping: Mapping[str, Any], prefix: Path, conditions: tuple[_Condition, ...]
    ) -> None:
        if not isinstance(mapping, Mapping):
            raise InputError(
                f"{path_name(prefix) or 'the space'} must be a mapping of names to dimensions, "
                f"not {mapping!r}"
            )
        later: list[When] = []
        for key, value in mapping.items():
            if not isinstance(key, str) or not key:
                raise InputError(f"the names in a space must be non-empty strings, not {key!r}")
            path = (*prefix, key)
            whens = self.whens(value, path)
            if whens is not None:
                later += whens
            elif isinstance(value, (Mapping, Space)):
                inner = value.mapping if isinstance(value, Space) else value
                self.add(_Node(path, Constant({}), conditions, nest=True))
                self.mapping(inner, path, conditions)
            else:
                dimension = _as_dimension(value).checked(path_name(path))
                self.add(_Node(path, dimension, conditions))
        for item in later:
            condition = self.condition(item, prefix)
            self.mapping(item.space, prefix, (*conditions, condition))

    @staticmethod
    def whens(value: object, path: Path) -> list[When] | None:
        if isinstance(value, When):
            return [value]
        if isinstance(value, (list, tuple)) and any(isinstance(item, When) for item in value):
            if not all(isinstance(item, When) for item in value):
                raise InputError(
                    f"{path_name(path)}: a list holds either conditions (when) or options"
                )
            return list(value)
        return None

    def add(self, node: _Node) -> None:
        for other in self.nodes:
            if other.path != node.path or (other.nest and node.nest):
                continue
            if not _exclusive(other.conditions, node.conditions):
                raise InputError(
                    f"{path_name(node.path)} is defined twice; conditions that set the same "
                    "name must depend on the same name and have no value in common"
                )
        self.nodes.append(node)

    def condition(self, item: When, prefix: Path) -> _Condition:
        label = f"when({item.name!r}, {item.value!r}, ...)"
        value = json_value(item.value, label)
        values = [value, *value] if isinstance(value, list) else [value]
        for depth in range(len(prefix), -1, -1):
            path = (*prefix[:depth], item.name)
            found = [node for node in self.nodes if node.path == path]
            if found:
                self.check_possible(found, values, label, item.name)
                return _Condition(path, values)
        known = ", ".join(path_name(node.path) for node in self.nodes) or "nothing"
        raise InputError(
            f"{label}: there is no {item.name!r} beside it or around it (there is {known})"
        )

    @staticmethod
    def check_possible(found: list[_Node], values: list[Any], label: str, name: str) -> None:
        """Refuse a condition that can never hold: most often a misspelt option."""
        options: list[Any] = []
        for node in found:
            if not isinstance(node.dimension, (Choice, Constant)) or node.nest:
                return
            options += node.dimension.values()
        if not any(option in values for option in options):
            raise InputError(f"{label} never holds: {name} is one of {options!r}")


def _exclusive(one: Sequence[_Condition], two: Sequence[_Condition]) -> bool:
    return any(
        a.path == b.path and not any(value in b.values for value in a.values)
        for a in one
        for b in two
    )


def _as_dimension(value: object) -> Dimension:
    if isinstance(value, Dimension):
        return value
    return Choice(value) if isinstance(value, list) else Constant(value)


class Space:
    """A checked search space.

    Parameters
    ----------
    mapping
        Names to dimensions, lists, constants, mappings and conditions, as
        described in :mod:`cerebro.space`.

    Raises
    ------
    InputError
        Naming the dimension: reversed bounds, a logarithmic dimension with
        ``low <= 0``, an empty choice, ``step <= 0``, numbers that are not
        finite, values that JSON cannot store, a condition on a name that is not
        there or that can never hold, a name defined twice.
    """

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        compiler = _Compiler()
        compiler.mapping(mapping, (), ())
        self.mapping: dict[str, Any] = dict(mapping)
        self._nodes = compiler.nodes
        self._streams = [node.stream for node in compiler.nodes]

    @property
    def dimensions(self) -> dict[str, Dimension]:
        """The dimensions that vary, by the dotted name of their path, in the order written."""
        return {
            path_name(node.path): node.dimension
            for node in self._nodes
            if not isinstance(node.dimension, Constant)
        }

    @property
    def paths(self) -> list[Path]:
        """The path of every value a configuration can have, conditional ones included."""
        return [node.path for node in self._nodes if not node.nest]

    def sample(self, seed: int, trial: int) -> dict[str, Any]:
        """Return the configuration of one trial: a pure function of its arguments.

        Parameters
        ----------
        seed
            The search's seed, 0 <= seed < 2**64.
        trial
            The trial's number, from 0.
        """
        return self.complete({}, seed, trial)

    def complete(self, point: Mapping[str, Any], seed: int, trial: int) -> dict[str, Any]:
        """Return `point` with what it leaves open drawn as :meth:`sample` would.

        The values of a point need not be inside the bounds.

        Raises
        ------
        InputError
            If the point has a name that is not in the space, or that the
            conditions exclude.
        """
        if not isinstance(point, Mapping):
            raise InputError(f"a point must be a mapping of names to values, not {point!r}")
        given = json_value(point, "points")
        config: dict[str, Any] = {}
        for node, stream in zip(self._nodes, self._streams, strict=True):
            if not node.applies(config):
                continue
            there, value = _get(given, node.path)
            if node.nest:
                value = {}
            elif not there:
                (share,) = _core.random_doubles(1, seed, "space", trial, stream)
                value = node.dimension.draw(share)
            _put(config, node.path, copy.deepcopy(value))
        unknown = [path for path in _leaves(given, self._nests()) if not _get(config, path)[0]]
        if unknown:
            known = ", ".join(path_name(path) for path in self.paths) or "nothing"
            raise InputError(
                f"points: {path_name(unknown[0])!r} is not in the space, or its condition does "
                f"not hold (the space has {known})"
            )
        return config

    def _nests(self) -> set[Path]:
        return {node.path for node in self._nodes if node.nest}

    def grid(self) -> list[dict[str, Any]]:
        """Return every configuration.

        The order is that of nested loops over the dimensions as they are
        written, the first one outermost, conditional ones innermost.

        Raises
        ------
        InputError
            If a dimension cannot be enumerated, naming it, or if there are more
            than 100,000 configurations.
        """
        for node in self._nodes:
            if node.dimension.count() is None:
                raise InputError(
                    f"{path_name(node.path)}: {node.dimension!r} cannot be part of a grid; give "
                    "a list, a step, or use searcher='random'"
                )
        configs: list[dict[str, Any]] = []
        for config in self._expand({}, 0):
            configs.append(config)
            if len(configs) > GRID_LIMIT:
                raise InputError(
                    f"the grid has more than {GRID_LIMIT} configurations; use searcher='random'"
                )
        return configs

    def _expand(self, config: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
        """Give all completions of `config`, whose first `index` nodes are settled."""
        while index < len(self._nodes) and not self._nodes[index].applies(config):
            index += 1
        if index == len(self._nodes):
            yield copy.deepcopy(config)
            return
        node = self._nodes[index]
        for value in node.dimension.values():
            _put(config, node.path, {} if node.nest else value)
            yield from self._expand(config, index + 1)
        self._remove(config, node.path)

    @staticmethod
    def _remove(config: dict[str, Any], path: Path) -> None:
        for key in path[:-1]:
            config = config[key]
        del config[path[-1]]

    def describe(self) -> str:
        """Return the space as text, one line per value: its name, dimension and conditions."""
        lines = []
        leaves = [node for node in self._nodes if not node.nest]
        width = max((len(path_name(node.path)) for node in leaves), default=0)
        for node in leaves:
            conditions = [
                f"{path_name(c.path)} = {' or '.join(repr(v) for v in _shown(c.values))}"
                for c in node.conditions
            ]
            suffix = f"   if {' and '.join(conditions)}" if conditions else ""
            lines.append(f"{path_name(node.path):{width}}  {node.dimension!r}{suffix}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Space({self.mapping!r})"

    def to_json(self) -> dict[str, Any]:
        """Return the space as JSON, from which :meth:`from_json` makes an equal one."""
        return _mapping_to_json(self.mapping)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Space:
        """Return the space that :meth:`to_json` was called on.

        Raises
        ------
        InputError
            If `data` is not what :meth:`to_json` returns.
        """
        mapping = _from_json(data)
        if not isinstance(mapping, dict):
            raise InputError("this is not a search space as Cerebro stores it")
        return cls(mapping)


def _shown(values: list[Any]) -> list[Any]:
    """Return a condition's values as they are shown: without the list that holds them all."""
    if len(values) > 1 and isinstance(values[0], list) and values[0] == values[1:]:
        return values[1:]
    return values


def _leaves(point: Mapping[str, Any], nests: set[Path], prefix: Path = ()) -> Iterator[Path]:
    """Give the path of every value of a point; mappings that are values are not entered."""
    for key, value in point.items():
        path = (*prefix, key)
        if isinstance(value, Mapping) and path in nests:
            yield from _leaves(value, nests, path)
        else:
            yield path


_Encoded = dict[str, Any]


def _to_json(value: object, name: str) -> _Encoded:
    whens = _Compiler.whens(value, (name,))
    if isinstance(value, When):
        space = _mapping_to_json(value.space)
        return {"type": "when", "name": value.name, "value": json_value(value.value, name), **space}
    if whens is not None:
        return {"type": "whens", "items": [_to_json(item, name) for item in whens]}
    if isinstance(value, Space):
        return {**value.to_json(), "type": "space"}
    if isinstance(value, Mapping):
        return {**_mapping_to_json(value), "type": "space"}
    return _as_dimension(value).checked(name).to_json()


def _mapping_to_json(mapping: Mapping[str, Any]) -> _Encoded:
    entries = [[key, _to_json(value, key)] for key, value in mapping.items()]
    return {"entries": entries}


_DIMENSIONS: dict[str, type[Dimension]] = {
    kind.__name__.lower(): kind for kind in (Uniform, LogUniform, Integer, Normal, Choice, Constant)
}


def _from_json(data: Any) -> Any:
    try:
        kind = data.get("type", "space")
        if kind == "whens":
            return [_from_json(item) for item in data["items"]]
        if kind in ("space", "when"):
            mapping = {key: _from_json(value) for key, value in data["entries"]}
            return mapping if kind == "space" else When(data["name"], data["value"], mapping)
        return _DIMENSIONS[kind](**{key: value for key, value in data.items() if key != "type"})
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError("this is not a search space as Cerebro stores it") from None


SpaceLike = Space | Mapping[str, Any]


def as_space(space: SpaceLike) -> Space:
    """Return `space` as a checked :class:`Space`.

    Raises
    ------
    InputError
        As :class:`Space` does.
    """
    return space if isinstance(space, Space) else Space(space)

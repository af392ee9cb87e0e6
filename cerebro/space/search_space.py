"""`Space`: a checked search space, from which configurations are drawn.

Its mapping of dimensions and conditions is compiled into a list of nodes. Every node comes after
those that it depends on, so one pass over the list determines a configuration.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import cerebro._core as _core
from cerebro.errors import InputError
from cerebro.space.dimensions import (
    Choice,
    Constant,
    Dimension,
    Integer,
    LogUniform,
    Normal,
    Path,
    Uniform,
    When,
    json_value,
    path_name,
    put_at,
)
from cerebro.space.foreign import Derived, Grid, Quantized, Unsettled, settle_values, translate

GRID_LIMIT = 100_000  # a grid with more configurations is probably a mistake


@dataclass(frozen=True)
class Condition:
    path: Path
    values: list[Any]


@dataclass(frozen=True)
class Node:
    """A dimension at its path, present if all its conditions hold."""

    path: Path
    dimension: Dimension
    conditions: tuple[Condition, ...]
    nest: bool = False  # a mapping, not a value: created empty, filled by the nodes below it

    def applies(self, config: Mapping[str, Any]) -> bool:
        """Return whether this node sets a value in `config`, in which all earlier nodes are set."""
        if self.nest and value_at(config, self.path)[0]:
            return False
        for condition in self.conditions:
            there, value = value_at(config, condition.path)
            if not there or value not in condition.values:
                return False
        return True

    @property
    def varies(self) -> bool:
        """Whether the dimension has more than one possible value."""
        return not isinstance(self.dimension, Constant)

    @cached_property
    def stream(self) -> int:
        """The key of the dimension's stream: the hash of its path as a JSON pointer."""
        escaped = (key.replace("~", "~0").replace("/", "~1") for key in self.path)
        return int(_core.xxh3_64(("/" + "/".join(escaped)).encode()), 16)


def value_at(config: Mapping[str, Any], path: Path) -> tuple[bool, Any]:
    value: Any = config
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return False, None
        value = value[key]
    return True, value


def iterate_leaves(
    config: Mapping[str, Any], is_nest: Callable[[Path], bool], above: Path = ()
) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of each entry; a mapping counts as one unless its path is a nest."""
    for name, value in config.items():
        path = (*above, name)
        if isinstance(value, Mapping) and is_nest(path):
            yield from iterate_leaves(value, is_nest, path)
        else:
            yield path, value


class Compiler:
    """Compile a mapping into nodes, each after the nodes that it depends on."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add_mapping(
        self, mapping: Mapping[str, Any], prefix: Path, conditions: tuple[Condition, ...]
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
            whens = self.find_whens(value, path)
            if whens is not None:
                later += whens
            elif (foreign := translate(value, path_name(path))) is not None:
                self.add(Node(path, foreign.checked(path_name(path)), conditions))
            elif isinstance(value, (Mapping, Space)):
                inner = value.mapping if isinstance(value, Space) else value
                self.add(Node(path, Constant({}), conditions, nest=True))
                self.add_mapping(inner, path, conditions)
            else:
                dimension = as_dimension(value, path_name(path)).checked(path_name(path))
                self.add(Node(path, dimension, conditions))
        for item in later:
            if not isinstance(item.space, Mapping):
                raise InputError(
                    f"{item!r}: its space must be a mapping of names to dimensions, not "
                    f"{item.space!r}"
                )
            condition = self.make_condition(item, prefix)
            self.add_mapping(item.space, prefix, (*conditions, condition))

    @staticmethod
    def find_whens(value: object, path: Path) -> list[When] | None:
        if isinstance(value, When):
            return [value]
        if isinstance(value, (list, tuple)) and any(isinstance(item, When) for item in value):
            if not all(isinstance(item, When) for item in value):
                raise InputError(
                    f"{path_name(path)}: a list holds either conditions (when) or options, not both"
                )
            return list(value)
        return None

    def add(self, node: Node) -> None:
        for other in self.nodes:
            if other.path != node.path or (other.nest and node.nest):
                continue
            if not _are_exclusive(other.conditions, node.conditions):
                raise InputError(
                    f"{path_name(node.path)} is defined twice; conditions that set the same "
                    "name must depend on the same name and have no value in common"
                )
        self.nodes.append(node)

    def make_condition(self, item: When, prefix: Path) -> Condition:
        label = f"when({item.name!r}, {item.value!r}, ...)"
        value = json_value(item.value, label)
        values = [value, *value] if isinstance(value, list) else [value]
        for depth in range(len(prefix), -1, -1):
            path = (*prefix[:depth], item.name)
            nodes = [node for node in self.nodes if node.path == path]
            if nodes:
                self.check_possible(nodes, values, label, item.name)
                return Condition(path, values)
        names = ", ".join(path_name(node.path) for node in self.nodes) or "nothing"
        raise InputError(
            f"{label}: no {item.name!r} in its own or an enclosing mapping (there is {names})"
        )

    @staticmethod
    def check_possible(found: list[Node], values: list[Any], label: str, name: str) -> None:
        """Raise InputError for a condition that can never hold, usually a misspelled option."""
        options: list[Any] = []
        for node in found:
            if isinstance(node.dimension, Derived):
                raise InputError(
                    f"{label}: {name} is computed from other values and cannot be a condition"
                )
            if not isinstance(node.dimension, (Choice, Constant)) or node.nest:
                return
            options += node.dimension.values()
        if not any(option in values for option in options):
            raise InputError(f"{label} never holds: {name} is one of {options!r}")


def _are_exclusive(one: Sequence[Condition], two: Sequence[Condition]) -> bool:
    return any(
        a.path == b.path and not any(value in b.values for value in a.values)
        for a in one
        for b in two
    )


def as_dimension(value: object, name: str = "") -> Dimension:
    """Return a value of a space as a dimension; lists, arrays and ranges become choices."""
    if isinstance(value, Dimension):
        return value
    if isinstance(value, tuple):
        ends = ", ".join(map(repr, value)) if len(value) == 2 else "low, high"
        raise InputError(
            f"{name}: {value!r} is a tuple: give a list to choose among its items, "
            f"cerebro.uniform({ends}) for a range, or [{value!r}] for a constant"
        )
    # An array is NumPy's, a pandas Series or a tensor.
    is_array = hasattr(value, "__array__") and getattr(value, "ndim", None) == 1
    if isinstance(value, (list, range)) or is_array:
        return Choice(list(value))  # type: ignore[call-overload]
    return Constant(value)


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
        Naming the dimension: reversed bounds, a logarithmic dimension with ``low <= 0``, an empty
        choice, ``step <= 0``, numbers that are not finite, values that JSON cannot store, a
        condition that can never hold or names a missing key, a name defined twice.
    """

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        compiler = Compiler()
        compiler.add_mapping(mapping, (), ())
        self.mapping: dict[str, Any] = dict(mapping)
        self.nodes: list[Node] = compiler.nodes

    @property
    def dimensions(self) -> dict[str, Dimension]:
        """The dimensions that vary, by dotted path, in order of definition."""
        return {path_name(node.path): node.dimension for node in self.nodes if node.varies}

    @property
    def paths(self) -> list[Path]:
        """The path of every value that a configuration can have, including conditional ones."""
        return [node.path for node in self.nodes if not node.nest]

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

    def complete(
        self, point: Mapping[str, Any], seed: int, trial: int, *, turn: int | None = None
    ) -> dict[str, Any]:
        """Return `point`, with missing values drawn as :meth:`sample` draws them.

        The values of a point may be out of bounds. Grids from Ray Tune's spaces are enumerated by
        trial number: if they have n combinations, any n consecutive trials cover all of them.

        Parameters
        ----------
        turn
            The trial's number for grids, if it differs from `trial`.

        Raises
        ------
        InputError
            The point has a name that is not in the space or that the conditions exclude.
        """
        options = self.grid_options(trial if turn is None else turn)

        def draw(node: Node) -> Any:
            if id(node) in options:
                return options[id(node)]
            (share,) = _core.random_doubles(1, seed, "space", trial, node.stream)
            return node.dimension.draw(share)

        return self.fill(point, draw)

    @property
    def has_grids(self) -> bool:
        """Whether there are grids of Ray Tune, whose options trials take in turn."""
        return bool(self._grids)

    @cached_property
    def _grids(self) -> list[tuple[Node, Grid]]:
        grids = [(node, node.dimension) for node in self.nodes if isinstance(node.dimension, Grid)]
        return sorted(grids, key=lambda grid: grid[0].path)

    def grid_options(self, trial: int) -> dict[int, Any]:
        """Return the option that a trial takes from each grid, by the ``id`` of the grid's node."""
        at: dict[Path, int] = {}
        for node, grid in self._grids:  # all combinations in turn, those of the first one fastest
            trial, at[node.path] = divmod(trial, len(grid.options))
        # Grids with different conditions may share a path.
        return {
            id(node): grid.options[at[node.path] % len(grid.options)] for node, grid in self._grids
        }

    def is_turn(self, config: Mapping[str, Any], trial: int) -> bool:
        """Return whether a configuration has the options that a trial takes from grids."""
        options = self.grid_options(trial)
        return all(
            value_at(config, node.path) == (True, options[id(node)])
            for node, _ in self._grids
            if node.applies(config)
        )

    def fill(self, point: Mapping[str, Any], choose: Callable[[Node], Any]) -> dict[str, Any]:
        """Return `point`, with missing values chosen by ``choose(node)``, in order.

        ``choose`` is called for conditional dimensions only if their conditions hold, and not for
        constants.

        Raises
        ------
        InputError
            As :meth:`complete`.
        """
        if not isinstance(point, Mapping):
            raise InputError(f"a point must be a mapping of names to values, not {point!r}")
        fixed = json_value(point, "points")
        config: dict[str, Any] = {}
        for node in self.nodes:
            if not node.applies(config):
                continue
            there, value = value_at(fixed, node.path)
            if node.nest:
                value = {}
            elif not there and isinstance(node.dimension, Constant):
                value = node.dimension.value
            elif not there:
                value = choose(node)
            if not isinstance(value, Unsettled):
                value = copy.deepcopy(value)
            put_at(config, node.path, value)
        self._settle(config)
        nests = {node.path for node in self.nodes if node.nest}
        leaves = iterate_leaves(fixed, nests.__contains__)
        unknown = [path for path, _ in leaves if not value_at(config, path)[0]]
        if unknown:
            names = ", ".join(path_name(path) for path in self.paths) or "nothing"
            raise InputError(
                f"points: {path_name(unknown[0])!r} is not in the space, or its condition does "
                f"not hold (the space has {names})"
            )
        return config

    @property
    def is_finite(self) -> bool:
        """Whether every dimension has finitely many values."""
        return all(node.dimension.count() is not None for node in self.nodes)

    def grid(self) -> list[dict[str, Any]]:
        """Return every configuration.

        The order is that of nested loops over the dimensions in order of definition: the first
        dimension is the outermost loop, conditional ones are innermost.

        Raises
        ------
        InputError
            A dimension cannot be enumerated (the message names it), or there are more than 100,000
            configurations.
        """
        for node in self.nodes:
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
        """Yield all completions of `config`, in which the first `index` nodes are set."""
        while index < len(self.nodes) and not self.nodes[index].applies(config):
            index += 1
        if index == len(self.nodes):
            yield self._settle(copy.deepcopy(config))
            return
        node = self.nodes[index]
        for value in node.dimension.values():
            put_at(config, node.path, {} if node.nest else value)
            yield from self._expand(config, index + 1)
        self._remove(config, node.path)

    def _settle(self, config: dict[str, Any]) -> dict[str, Any]:
        """Compute the values that functions of Ray Tune make of others; they come last."""
        unsettled = []
        for node in self.nodes:
            there, value = value_at(config, node.path)
            if there and isinstance(value, Unsettled):
                self._remove(config, node.path)
                unsettled.append((node.path, value))
        settle_values(unsettled, config)
        return config

    @staticmethod
    def _remove(config: dict[str, Any], path: Path) -> None:
        for key in path[:-1]:
            config = config[key]
        del config[path[-1]]

    def describe(self) -> str:
        """Return the space as text, one line per value: name, dimension and conditions."""
        lines = []
        leaves = [node for node in self.nodes if not node.nest]
        width = max((len(path_name(node.path)) for node in leaves), default=0)
        for node in leaves:
            conditions = [
                f"{path_name(c.path)} = {' or '.join(repr(v) for v in _strip_list(c.values))}"
                for c in node.conditions
            ]
            suffix = f"   if {' and '.join(conditions)}" if conditions else ""
            lines.append(f"{path_name(node.path):{width}}  {node.dimension!r}{suffix}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Space({self.mapping!r})"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value from which :meth:`from_json` makes an equal space."""
        return _mapping_to_json(self.mapping)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Space:
        """Return the space that :meth:`to_json` was called on.

        Raises
        ------
        InputError
            `data` was not returned by :meth:`to_json`.
        """
        mapping = _from_json(data)
        if not isinstance(mapping, dict):
            raise InputError(_NOT_STORED)
        return cls(mapping)


def _strip_list(values: list[Any]) -> list[Any]:
    """Return a condition's values for display: without a leading list of all the others."""
    if len(values) > 1 and isinstance(values[0], list) and values[0] == values[1:]:
        return values[1:]
    return values


def _to_json(value: object, name: str) -> dict[str, Any]:
    whens = Compiler.find_whens(value, (name,))
    if isinstance(value, When):
        space = _mapping_to_json(value.space)
        return {"type": "when", "name": value.name, "value": json_value(value.value, name), **space}
    if whens is not None:
        return {"type": "whens", "items": [_to_json(item, name) for item in whens]}
    if isinstance(value, Space):
        return {**value.to_json(), "type": "space"}
    foreign = translate(value, name)
    if foreign is not None:
        return foreign.checked(name).to_json()
    if isinstance(value, Mapping):
        return {**_mapping_to_json(value), "type": "space"}
    return as_dimension(value, name).checked(name).to_json()


def _mapping_to_json(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {"entries": [[key, _to_json(value, key)] for key, value in mapping.items()]}


_DIMENSIONS: dict[str, Callable[..., Dimension]] = {
    kind.__name__.lower(): kind
    for kind in (Uniform, LogUniform, Integer, Normal, Choice, Constant, Grid)
}
_DIMENSIONS["quantized"] = lambda inner, q: Quantized(_from_json(inner), q)
_DIMENSIONS["derived"] = Derived.from_json

_NOT_STORED = (
    "the stored value is not a search space, or is damaged: pass a return value of Space.to_json()"
)


def _from_json(data: Any) -> Any:
    try:
        kind = data.get("type", "space")
        if kind == "whens":
            return [_from_json(item) for item in data["items"]]
        if kind in ("space", "when"):
            mapping = {key: _from_json(value) for key, value in data["entries"]}
            return mapping if kind == "space" else When(data["name"], data["value"], mapping)
        return _DIMENSIONS[kind](**{key: value for key, value in data.items() if key != "type"})
    except InputError:  # a function that was not stored
        raise
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError(_NOT_STORED) from None


SpaceLike = Space | Mapping[str, Any]


def as_space(space: SpaceLike) -> Space:
    return space if isinstance(space, Space) else Space(space)

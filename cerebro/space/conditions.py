"""Conditional dimensions: compile a mapping of dimensions and `when`s into a list of nodes.

Every node comes after the nodes that it depends on, so one pass over the list determines a
configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import cerebro._core as _core
from cerebro.errors import InputError
from cerebro.space.dimensions import Choice, Constant, Dimension, Path, When, json_value, path_name
from cerebro.space.foreign import Derived, translate


@runtime_checkable
class Mapped(Protocol):
    """A space used as a value in another space, into which its mapping is merged."""

    mapping: Mapping[str, Any]


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
    # A mapping, not a value: created empty and filled by the nodes below it.
    nest: bool = False

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
            elif isinstance(value, (Mapping, Mapped)):
                inner = value.mapping if isinstance(value, Mapped) else value
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

"""Choices of `SearchCV` that are not JSON: tuples and mappings.

A configuration stores a tuple as a list and a mapping as its text, so that tables and plots show
what it is. Both become the original again before they reach the estimator or the results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np

from cerebro.errors import InputError
from cerebro.space import Space, as_space
from cerebro.space.dimensions import Choice, When, json_value
from cerebro.space.foreign import translate
from cerebro.space.search_space import Compiler, as_dimension

Originals = dict[str, dict[str, Any]]
"""Choices by parameter and by the JSON text of the value that stands for them."""


def as_choices(space: Any) -> tuple[Space, Originals]:
    """Return a space whose configurations are JSON, and the choices that its values stand for."""
    if isinstance(space, (list, tuple)):
        raise InputError(
            "space must be a mapping, not a list of grids: search each one separately, or use "
            "cerebro.when(...) for parameters that depend on others"
        )
    mapping = space.mapping if isinstance(space, Space) else space
    originals: Originals = {}
    if isinstance(mapping, Mapping):
        mapping = _convert_mapping(mapping, originals)
    return as_space(mapping), originals


def restore_choices(config: Mapping[str, Any], originals: Originals) -> dict[str, Any]:
    """Return a configuration's parameters, with the choices that its values stand for."""
    return {
        name: deepcopy(originals[name].get(json.dumps(value), value))
        if name in originals
        else value
        for name, value in config.items()
    }


def _convert_mapping(mapping: Mapping[str, Any], originals: Originals) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for name, value in mapping.items():
        whens = Compiler.find_whens(value, (str(name),))
        if whens is None:
            result[name] = _convert_dimension(value, name, originals)
        else:
            result[name] = [_convert_condition(item, originals) for item in whens]
    return result


def _convert_condition(item: Any, originals: Originals) -> Any:
    """Return a condition, with its value or list of values as configurations have them."""
    if not isinstance(item.space, Mapping):
        return item  # as_space raises an error
    is_list = isinstance(item.value, list)
    value = [*map(_encode_choice, item.value)] if is_list else _encode_choice(item.value)
    return When(item.name, value, _convert_mapping(item.space, originals))


def _convert_dimension(value: Any, name: Any, originals: Originals) -> Any:
    """Return a value of the space, with JSON in place of its choices."""
    if not isinstance(name, str):
        return value  # as_space raises an error
    if isinstance(value, tuple):  # choices, as in scikit-learn's grids
        value = list(value)
    dimension = translate(value, name)
    if dimension is None:
        if isinstance(value, (Mapping, Space)):
            raise InputError(
                f"space: {name!r} is a mapping, not a list of choices: give "
                f"[{value!r}] for a constant; parameters of a pipeline's steps have names such as "
                "'sgdclassifier__alpha'"
            )
        dimension = as_dimension(value, name)
    if not isinstance(dimension, Choice) or not isinstance(dimension.options, (list, tuple)):
        return value
    special = [option for option in dimension.options if _is_special(option)]
    if not special:
        return value
    for option in special:
        text = json.dumps(json_value(_encode_choice(option), name))
        originals.setdefault(name, {}).setdefault(text, option)
    return type(dimension)([_encode_choice(option) for option in dimension.options])


def _is_special(option: Any) -> bool:
    if isinstance(option, list):
        return any(map(_is_special, option))
    return isinstance(option, (tuple, Mapping))


def _encode_choice(option: Any) -> Any:
    """Return what stands for a choice in configurations; tuples become lists later."""
    return str(_convert_numbers(option)) if isinstance(option, Mapping) else option


def _convert_numbers(value: Any) -> Any:
    """Return a mapping with Python's numbers in place of NumPy's, whose text is easy to read."""
    if isinstance(value, Mapping):
        return {_convert_numbers(key): _convert_numbers(item) for key, item in value.items()}
    return value.item() if isinstance(value, np.generic) else value

"""Augmented columns, stored as several copies; each epoch reads one copy.

`Dataset.derive(copies=k)` writes a derived column ``c`` k + 1 times: without augmentation as ``c``,
and as ``c@0`` to ``c@{k - 1}``, each with different random crops and flips. Batches have one column
``c``: copy ``epoch % k`` in training, the column without augmentation in evaluation. The manifest's
``arguments`` list the columns that have copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cerebro.errors import CorruptDataError

MAX_COPIES = 1000


def copy_name(column: str, copy: int) -> str:
    return f"{column}@{copy}"


def copied_columns(
    path: Any, arguments: Mapping[str, Any], columns: Mapping[str, Any]
) -> dict[str, int]:
    """Return the number of copies of each column that has copies.

    Raises CorruptDataError if a copy named in the manifest's arguments is not among its columns, or
    its rows differ in type or shape.
    """
    number = arguments.get("copies") if arguments.get("derived") else None
    if not number:
        return {}
    names = arguments.get("outputs")
    whole = isinstance(number, int) and 0 < number <= MAX_COPIES
    if not whole or not isinstance(names, list):
        raise CorruptDataError(f"{path}: field 'arguments.copies' is not a number of copies")
    for name in names:
        for copy in range(number):
            column = columns.get(copy_name(str(name), copy))
            base = columns.get(str(name))
            kinds = [None if c is None else (c.dtype, c.shape, c.ragged) for c in (base, column)]
            if None in kinds or kinds[0] != kinds[1]:
                raise CorruptDataError(
                    f"{path}: field 'arguments.copies': there is no column "
                    f"{copy_name(str(name), copy)!r} like {str(name)!r}"
                )
    return dict.fromkeys(map(str, names), number)


def count_copies(dataset: Any) -> int:
    """Return the number of copies that training reads in turn, one per epoch; at least 1."""
    copied: Mapping[str, int] = getattr(dataset, "_copied", {})
    return max(copied.values(), default=1)


def stored_copies(dataset: Any) -> set[str]:
    """Return the names of the columns that are copies; batches do not have them."""
    copied: Mapping[str, int] = getattr(dataset, "_copied", {})
    return {copy_name(name, copy) for name, number in copied.items() for copy in range(number)}


def choose_copy(plan: list[dict[str, Any]], dataset: Any, copy: int | None) -> list[dict[str, Any]]:
    """Return a loader's plan in which each column with copies has one entry.

    `plan`, from `cerebro.transforms.compile`, has an entry for every stored column. `copy` is the
    copy to gather; None: the values without augmentation.
    """
    copied: Mapping[str, int] = getattr(dataset, "_copied", {})
    if not copied:
        return plan
    stored = stored_copies(dataset)
    plan = [entry for entry in plan if entry["name"] not in stored]
    if copy is None:
        return plan
    return [
        entry | {"source": copy_name(entry["name"], copy)} if entry["name"] in copied else entry
        for entry in plan
    ]

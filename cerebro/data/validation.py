"""The validation data of a search: a dataset, a part of the training rows, or folds.

`KFold` describes how rows are chosen; `Folds` holds the chosen rows, as views of one dataset. Each
fold has two views, which all configurations share in every process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cerebro.arguments import check_whole_number
from cerebro.data import Dataset
from cerebro.data import rows as splitting
from cerebro.data.dtypes import Array, quote_cell
from cerebro.data.manifest import Column, checksum_of
from cerebro.data.rows import Part, part_from_json, part_to_json, select_rows
from cerebro.errors import InputError, text_of
from cerebro.transforms import Normalize, Pad, Scale

MAX_FOLDS = 10_000

_ONCE = "give each row once (Dataset.with_sampling trains on some rows more often)"


class KFold:
    """Cross-validation: `n` parts of the rows, each held out in turn while training on the others.

    Every fold has rows of every shard and is trained like the whole dataset. The choice of rows
    depends only on `seed`.

    Parameters
    ----------
    n
        The number of folds, at least 2; or a scikit-learn splitter (any object with ``split`` and
        ``get_n_splits``), which gets the column `stratify` as ``y`` and the column `groups` as
        ``groups``.
    stratify
        A scalar integer, boolean or category column whose values have the same proportions
        in each fold.
    groups
        A scalar integer, boolean or category column; in a fold, rows with the same value are all
        trained on or all held out.
    seed
        Keys the choice of rows. Splitters use their ``random_state`` instead.

    Raises
    ------
    InputError
        `n` or `seed` is out of range, or both `stratify` and `groups` are given with a number.
        :meth:`split` and `cerebro.search` check the folds against the data.

    Examples
    --------
    >>> cerebro.search(build, space, data, validation=cerebro.KFold(5, stratify="y"), ...)
    ...                                                             # doctest: +SKIP
    """

    def __init__(
        self, n: Any, stratify: str | None = None, groups: str | None = None, seed: int = 0
    ) -> None:
        self.n = n if is_splitter(n) else check_whole_number("KFold: n", n, 2, MAX_FOLDS)
        self.stratify = stratify
        self.groups = groups
        self.seed = check_whole_number("KFold: seed", seed, 0, 2**64 - 1)
        if stratify is not None and groups is not None and not is_splitter(n):
            raise InputError(
                "KFold takes stratify or groups, not both: choose one, or give a splitter that "
                "can do both, such as KFold(StratifiedGroupKFold(5), stratify=..., groups=...)"
            )

    def split(self, data: Dataset) -> list[tuple[Dataset, Dataset]]:
        """Return the training and validation view of each fold.

        Raises
        ------
        InputError
            A column is missing or unsuitable, a class has fewer rows than there are folds, there
            are fewer groups than folds, or a splitter chooses invalid rows. Or `data` repeats rows,
            which would be both trained on and held out.
        """
        folds = make_folds(data, self)
        return [folds.get_views(fold) for fold in range(len(folds))]

    def __repr__(self) -> str:
        options = {"stratify": self.stratify, "groups": self.groups, "seed": self.seed or None}
        shown = [f"{name}={value!r}" for name, value in options.items() if value is not None]
        return f"KFold({', '.join([repr(self.n), *shown])})"


class Folds:
    """The folds of a dataset: of each, the rows to train on and the rows held out, by shard."""

    def __init__(
        self, data: Dataset, parts: Sequence[tuple[Sequence[Part], Sequence[Part]]], name: str
    ) -> None:
        self.data = data
        self.name = name  # of the splitter, for display
        self._views = [
            (
                data._with_rows(train, {"fold": fold, "of": name, "part": "train"}),
                data._with_rows(held_out, {"fold": fold, "of": name, "part": "validation"}),
            )
            for fold, (train, held_out) in enumerate(parts)
        ]

    def __len__(self) -> int:
        return len(self._views)

    def get_views(self, trial: int) -> tuple[Dataset, Dataset]:
        """Return the views that a trial is trained and validated on."""
        return self._views[trial % len(self._views)]

    @property
    def checksum(self) -> str:
        """32 hexadecimal digits that differ if the data or the folds differ."""
        return checksum_of([self.data.checksum, self.to_json()["folds"]])

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value from which `from_json` makes the folds, together with the data."""
        return {
            "name": self.name,
            "folds": [
                {
                    "train": list(map(part_to_json, train.view.parts)),
                    "validation": list(map(part_to_json, held_out.view.parts)),
                }
                for train, held_out in self._views
            ],
        }

    @classmethod
    def from_json(cls, data: Dataset, value: Mapping[str, Any]) -> Folds:
        """Return the folds of a `to_json` value; raise InputError if they do not fit the data."""
        rows = data.shards.stored_rows

        def parts(fold: Mapping[str, Any], name: str) -> list[Part]:
            described = fold[name]
            if len(described) != len(rows):
                raise InputError(f"the folds do not fit '{data.path}': its shards differ")
            return [part_from_json(part, n) for part, n in zip(described, rows, strict=True)]

        pairs = [(parts(fold, "train"), parts(fold, "validation")) for fold in value["folds"]]
        return cls(data, pairs, str(value["name"]))

    def __reduce__(self) -> tuple[Callable[..., Folds], tuple[Dataset, dict[str, Any]]]:
        return Folds.from_json, (self.data, self.to_json())

    def __repr__(self) -> str:
        return f"<{len(self)} folds by {self.name} of {self.data.num_rows:,} rows>"


class Validation(NamedTuple):
    """The data that a search trains on and validates on."""

    train: Dataset
    held_out: Dataset | None
    folds: Folds | None

    def get_views(self, trial: int) -> tuple[Dataset, Dataset | None]:
        return (self.train, self.held_out) if self.folds is None else self.folds.get_views(trial)


def is_splitter(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("split", "get_n_splits"))


def make_folds(data: Dataset, splitter: Any) -> Folds:
    """Return the folds that a `KFold` or a splitter makes of a dataset; see `KFold.split`."""
    kfold = splitter if isinstance(splitter, KFold) else KFold(splitter)
    name = " ".join(repr(kfold.n if is_splitter(kfold.n) else kfold).split())
    repeated = any(map(splitting.repeats, data.view.parts))
    if repeated and kfold.groups is None:
        raise InputError(
            f"{name}: this view repeats rows, so that folds would train on rows that they hold "
            f"out: {_ONCE}, or give groups=, whose rows stay together"
        )
    if is_splitter(kfold.n):
        pairs = _split_by(kfold.n, data, kfold)
    else:
        fold_of, folds = _assign_folds(data, kfold), range(kfold.n)
        pairs = [(np.flatnonzero(fold_of != n), np.flatnonzero(fold_of == n)) for n in folds]
    all_rows = data.view.parts
    parts = [(select_rows(all_rows, train), select_rows(all_rows, held)) for train, held in pairs]
    if repeated:  # a splitter need not keep groups together
        _check_disjoint(parts, name)
    return Folds(data, parts, name)


def _check_disjoint(parts: Sequence[tuple[list[Part], list[Part]]], name: str) -> None:
    for fold, sides in enumerate(parts):
        for shard, (train, held) in enumerate(zip(*sides, strict=True)):
            rows = np.intersect1d(train, held)
            if len(rows):
                raise InputError(
                    f"{name}, fold {fold}: row {rows[0]} of shard {shard} is on both sides, "
                    f"because this view repeats it: {_ONCE}"
                )


# --- by number ------------------------------------------------------------------------------------


def _assign_folds(data: Dataset, kfold: KFold) -> Array:
    """Return the fold that holds out each row."""
    n = kfold.n
    if n > data.num_rows:
        raise InputError(f"{kfold!r} needs a row for each fold, but the data has {data.num_rows}")
    if kfold.groups is not None:
        labels = data.view.labels(kfold.groups)
        groups = len(np.unique(np.concatenate(labels)))
        if groups < n:
            raise InputError(
                f"{kfold!r}: column {kfold.groups!r} has {groups} groups, fewer than the {n} "
                f"folds: use at most {groups} folds"
            )
        bounds = [*(np.arange(1, n) / n), 1.0]
        return splitting.assign_groups(labels, bounds, kfold.seed)
    if kfold.stratify is not None:
        labels = data.view.labels(kfold.stratify)
        _check_classes(data, kfold, np.concatenate(labels))
    else:
        labels = [np.zeros(rows, np.int64) for rows in data.view.shard_rows]
    return splitting.deal_folds(labels, n, kfold.seed)


def _check_classes(data: Dataset, kfold: KFold, labels: Array) -> None:
    """Raise InputError if a fold would have no rows of some class."""
    classes, counts = np.unique(labels, return_counts=True)
    label, fewest = classes[counts.argmin()].item(), int(counts.min())
    if fewest >= kfold.n:
        return
    name = str(kfold.stratify)
    class_names = data.classes.get(name)
    label_text = repr(label if class_names is None else class_names[label])
    rows = "1 row" if fewest == 1 else f"{fewest} rows"
    cure = f"use at most {fewest} folds, " if fewest > 1 else ""
    raise InputError(
        f"{kfold!r}: class {label_text} of column {name!r} has {rows}, so that "
        f"{kfold.n - fewest} of the {kfold.n} folds would have none of it: {cure}leave the class "
        "out with Dataset.select, or do not stratify"
    )


# --- by a splitter --------------------------------------------------------------------------------


def _split_by(splitter: Any, data: Dataset, kfold: KFold) -> list[tuple[Array, Array]]:
    """Return the rows that a splitter chooses, checked and in ascending order."""
    name = " ".join(repr(splitter).split())
    y, groups = (
        None if column is None else np.concatenate(data.view.scalars(column))
        for column in (kfold.stratify, kfold.groups)
    )
    try:
        splits = splitter.split(np.zeros((data.num_rows, 1)), y, groups)
        pairs = [(train, held_out) for train, held_out in splits]
    except Exception as error:
        columns = [("stratify", "classes"), ("groups", "groups")]
        missing = [f"{a}= (a column of {b})" for a, b in columns if getattr(kfold, a) is None]
        hint = f": if it needs them, give cerebro.KFold(splitter) {' and '.join(missing)}"
        raise InputError(
            f"{name} cannot split the data: {text_of(error)}{hint if missing else ''}"
        ) from error
    if not 1 <= len(pairs) <= MAX_FOLDS:
        raise InputError(f"{name} gives {len(pairs)} folds: there must be 1 to {MAX_FOLDS}")
    checked = []
    for fold, pair in enumerate(pairs):
        train, held_out = (
            _check_row_numbers(rows, data.num_rows, f"{name}, fold {fold}") for rows in pair
        )
        shared = np.intersect1d(train, held_out)
        if len(shared):
            raise InputError(
                f"{name}, fold {fold}: row {shared[0]} is on both sides ({len(shared)} rows are): "
                "validation rows must not be trained on"
            )
        checked.append((train, held_out))
    return checked


def _check_row_numbers(rows: Any, count: int, where: str) -> Array:
    numbers = np.asarray(rows)
    if numbers.ndim != 1 or numbers.size == 0 or numbers.dtype.kind not in "iu":
        raise InputError(f"{where}: it must give two non-empty lists of row numbers")
    wrong = numbers[(numbers < 0) | (numbers >= count)]
    if len(wrong):
        raise InputError(f"{where}: no row {wrong[0]}: rows are numbered 0 to {count - 1}")
    return np.sort(numbers.astype(np.int64))


def make_validation(data: Any, validation: Any) -> Validation:
    """Return the data that the arguments of a search choose; a fraction is of the last rows."""
    if isinstance(validation, Folds):  # already made
        return Validation(validation.data, None, validation)
    if isinstance(data, (str, os.PathLike)):
        data = Dataset(data)
    if not isinstance(data, Dataset):
        raise InputError(
            f"data must be a cerebro.Dataset, not {type(data).__name__}: write one with "
            "cerebro.shard(rows, folder), or give search() arrays as (x, y) or by name, a table or "
            "a PyTorch dataset"
        )
    if isinstance(validation, KFold) or is_splitter(validation):
        return Validation(data, None, make_folds(data, validation))
    if isinstance(validation, (str, os.PathLike)):
        validation = Dataset(validation)
    if isinstance(validation, Dataset) and validation.num_rows == 0:
        raise InputError(f"validation ({validation.path}) has no rows")
    if validation is None or isinstance(validation, Dataset):
        return Validation(data, validation, None)
    if isinstance(validation, (float, np.floating)) and 0 < validation < 1:
        share = float(validation)
        train, held_out = data.split(1 - share, share)
        return Validation(train, held_out, None)
    raise InputError(
        f"validation must be a cerebro.Dataset, a fraction between 0 and 1, a cerebro.KFold, or "
        f"None, not {validation!r}"
    )


class UnfitDataError(InputError):
    """Raised if a model reads a column whose rows mean something else in the training data."""


def find_unfit_columns(
    train: Dataset, data: Dataset, what: str, columns: Iterable[str] | None = None
) -> dict[str, str]:
    """Return an error message for each column of `data` that a model trained on `train` misreads.

    A column is unfit if it is missing, or if its codes stand for other categories: a dataset
    numbers only the categories of its own rows. `columns` are those that the model reads, by
    default all of `train`.
    """
    if data.shards.manifest.checksum == train.shards.manifest.checksum:
        return {}
    names = train.columns if columns is None else columns
    problems = {n: _explain_unfit(train.columns[n], data) for n in names if n in train.columns}
    return {name: f"{what} {problem}" for name, problem in problems.items() if problem}


def _explain_unfit(ours: Column, data: Dataset) -> str | None:
    name, theirs = ours.name, data.columns.get(ours.name)
    if theirs is None:
        return f"lacks the training data's column(s) {name}"
    if theirs.classes is None:
        return None
    if ours.classes is None:
        if ours.dtype.startswith(("int", "uint")):
            return None  # integer labels, of which only this dataset has the names
        return (
            f"has names in column {name!r} ({quote_cell(theirs.classes[0])}), but the training "
            "data has numbers: give the same kind"
        )
    for code, (here, there) in enumerate(zip(theirs.classes, ours.classes, strict=False)):
        if here != there:
            return (
                f"has other categories: class {code} of column {name!r} is {here!r} here and "
                f"{there!r} in the training data: write all rows as one dataset and split that, or "
                "give the rows themselves (a table or arrays), whose names are compared"
            )
    if len(theirs.classes) <= len(ours.classes):
        return None
    for codes in data.view.runs(theirs):
        unknown = codes[codes >= len(ours.classes)]
        if unknown.size:
            return (
                f"has {theirs.classes[int(unknown.flat[0])]!r} in column {name!r}, which the "
                "training data does not have: leave those rows out, or train on some of them"
            )
    return None


def describe_other_numbers(train: Dataset, data: Dataset, columns: Iterable[str]) -> str:
    """Return which column's transforms give `data` other numbers than `train`; "" if none do.

    Columns that are stored with different types are not compared, nor are crops and flips.
    """
    for name in columns:
        ours, theirs = train.columns.get(name), data.columns.get(name)
        if ours is None or theirs is None or ours.dtype != theirs.dtype:
            continue
        there, here = _list_scaling(train, ours), _list_scaling(data, theirs)
        if here != there:
            trained, given = (
                " and ".join(type(step).__name__ for step in steps) for steps in (there, here)
            )
            others = "other numbers" if trained == given else given or "none"
            return f"column {name!r} has {trained or 'no transform'} in training, but {others} here"
    return ""


def _list_scaling(data: Dataset, column: Column) -> list[Scale | Normalize | Pad]:
    """Return the transforms that decide the numbers of a column's batches."""
    kinds = (Scale, Normalize, Pad)
    steps = [step for step in data.transforms.get(column.name, ()) if isinstance(step, kinds)]
    if column.ragged and not any(isinstance(step, Pad) for step in steps):
        steps.append(Pad())
    return [Pad(step.value) if isinstance(step, Pad) else step for step in steps]

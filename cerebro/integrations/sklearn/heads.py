"""The rows of a `SearchCV` by their numbers, and the heads of its pipelines.

A head is the part of a pipeline before its last step, which need not learn by batch. It is fitted
as scikit-learn's searches fit it, on all training rows of a fold, but only once for each fold and
each setting of its parameters. Training reads the columns that it made.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Mapping
from copy import copy
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import joblib
import numpy as np
from scipy import sparse
from sklearn.base import clone
from sklearn.pipeline import Pipeline
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import _check_method_params, _num_samples

from cerebro._core import trial_seed
from cerebro.errors import InputError
from cerebro.integrations.sklearn.steps import keep_rows, steps_of
from cerebro.machine import generators


class Rows:
    """The rows of a search, as files in a folder: as given, and as the heads make them.

    Parameters
    ----------
    x, y
        As `fit` got them.
    metadata
        What scorers get beside them, by its name.
    matrix
        The rows as numbers; None if they go through heads.
    folds
        The numbers of each fold's rows for training and validation.
    names
        The names of the columns of `x`, or None.
    """

    def __init__(
        self,
        folder: Path,
        x: Any,
        y: Any,
        *,
        metadata: Mapping[str, Any],
        matrix: Any,
        folds: list[tuple[Any, Any]],
        names: Any,
        seed: int,
    ) -> None:
        folder.mkdir()
        self.has_heads, self.names = matrix is None, names
        self._folder, self._seed = folder, seed
        joblib.dump(x, folder / "x")
        joblib.dump((y, metadata, folds), folder / "others")
        if matrix is not None:
            joblib.dump(as_numbers(matrix), folder / "matrix")

    def fold(self, number: int | None) -> tuple[Any, Any]:
        """Return the numbers of a fold's rows for training and validation."""
        train, test = self._others[2][0 if number is None else number]
        return train, test

    def take(self, numbers: Any, *, x: bool) -> tuple[Any, Any, dict[str, Any]]:
        """Return rows, if `x`, targets and metadata of these numbers, as `fit` got them."""
        y, metadata, _ = self._others
        rows = _safe_indexing(self._x, numbers) if x else None
        of_rows = _check_method_params(y, params=metadata, indices=numbers)
        return rows, _safe_indexing(y, numbers), of_rows

    def fit_head(self, head: Pipeline, setting: str, fold: int | None) -> str:
        """Fit a head on a fold's training rows, unless another model has done so; return its key.

        `setting` is the text of the head's parameters; a fold of None stands for all rows.
        """
        key = hashlib.sha256(f"{fold} {setting}".encode()).hexdigest()
        path = self._folder / key
        self._check_folder()
        with Path(f"{path}.lock").open("wb") as lock:  # so that one worker fits, and others wait
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                head = clone(head)  # the model's own stays as in other processes
                keep_rows(head)
                matrix, names = self._fit(head, fold)
                # Its steps may be classes and functions of the user's script.
                joblib.dump(cloudpickle.dumps((head, names)), f"{path}.head")
                joblib.dump(matrix, f"{path}.new")
                Path(f"{path}.new").replace(path)
        return key

    def matrix(self, key: str) -> Any:
        """Return all rows as numbers: those of a head's key, or of ``"matrix"``."""
        return self._load(key)

    def whole(self, pipeline: Any, key: str) -> Any:
        """Return a copy with the fitted head of a key, whose steps know the names of columns."""
        made, names = copy(pipeline), self.names
        if isinstance(made, Pipeline):
            made.steps = [(name, copy(step)) for name, step in made.steps]
        if self.has_heads:
            head, names = cloudpickle.loads(joblib.load(self._folder / f"{key}.head"))
            made.steps[:-1] = head.steps
        if names is not None:
            rename_features(made.steps[-1][1] if self.has_heads else made, names)
        return made

    def _fit(self, head: Pipeline, fold: int | None) -> tuple[Any, Any]:
        """Fit a head; return the fold's rows at their numbers, and the names of their columns."""
        x, y = self._x, self._others[0]
        count = _num_samples(x)
        train, test = (np.arange(count), []) if fold is None else self.fold(fold)
        others = np.setdiff1d(test, train)
        learned = fit_head(head, _safe_indexing(x, train), _safe_indexing(y, train), self._seed)
        parts = [as_numbers(learned)]
        if len(others):
            made = _safe_indexing(x, others)
            for _, step in steps_of(head):  # a Pipeline would ask whether its last step is fitted
                made = step.transform(made)
            parts.append(as_numbers(made))
        numbers, first = np.unique([*train, *others], return_index=True)
        place = np.zeros(count, np.int64)  # rows of neither side have those of another
        place[numbers] = first
        names = names_of(learned)
        if any(map(sparse.issparse, parts)):
            return sparse.vstack(parts, format="csr")[place], names
        return np.concatenate(parts)[place], names

    @cached_property
    def _x(self) -> Any:
        return self._load("x")

    @cached_property
    def _others(self) -> Any:
        return self._load("others")

    def _load(self, name: str) -> Any:
        self._check_folder()
        return joblib.load(self._folder / name, mmap_mode="r")

    def _check_folder(self) -> None:
        if not self._folder.exists():
            raise InputError(
                "this trial of SearchCV reads rows that fit() has removed at its end: use "
                "best_estimator_, or fit again"
            )


def rename_features(estimator: Any, names: Any) -> None:
    """Name the features of an estimator that has learned from rows without names."""
    steps = [step for _, step in steps_of(estimator)]
    steps[0].feature_names_in_ = np.asarray(names, object)
    for previous, step in pairwise(steps):
        if hasattr(step, "feature_names_in_"):  # it has names that the previous step made up
            step.feature_names_in_ = previous.get_feature_names_out()


def names_of(rows: Any) -> Any:
    """Return a frame's column names, or None for other rows and names that are not strings."""
    names = getattr(rows, "columns", None)
    return names if names is not None and all(isinstance(name, str) for name in names) else None


def fit_head(head: Pipeline, x: Any, y: Any, seed: int) -> Any:
    """Fit a head in place and return the rows as it transforms them; the seed decides the bits."""
    with generators.preserve_generators(False, trial_seed(seed, 0) % 2**32):
        return head.fit_transform(x, y)


def split_pipeline(estimator: Any) -> tuple[Pipeline | None, Any]:
    """Return a pipeline's head, None if it has no steps, and its last step."""
    if not isinstance(estimator, Pipeline):
        return None, estimator
    steps = estimator.steps[:-1]
    return (Pipeline(steps) if steps else None), estimator.steps[-1][1]


def take_rows(matrix: Any, numbers: Any) -> Any:
    """Return rows of a matrix by their numbers, as a dense array."""
    rows = matrix[np.asarray(numbers).reshape(-1)]
    return rows.toarray() if sparse.issparse(rows) else np.asarray(rows)


def as_numbers(rows: Any) -> Any:
    """Return rows as a matrix of floats, sparse (CSR) if they are sparse."""
    if sparse.issparse(rows):
        return sparse.csr_matrix(rows, dtype=rows.dtype if rows.dtype.kind == "f" else float)
    try:
        matrix = np.asarray(rows)
        matrix = matrix if matrix.dtype.kind == "f" else matrix.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the steps before the last one leave values that are not numbers: {error}"
        ) from error
    if not np.isfinite(matrix).all():
        raise InputError("the steps before the last one leave NaN or infinity: add a SimpleImputer")
    return matrix

"""The head of a pipeline: its steps before the last one, which need not learn by batch.

A head is fitted as scikit-learn's searches fit it, on all training rows of a fold, but only once
for each fold and each setting of its parameters. Training reads the columns that it made.
"""

from __future__ import annotations

import fcntl
import hashlib
from pathlib import Path
from typing import Any

import joblib
import numpy as np
from scipy import sparse
from sklearn.pipeline import Pipeline
from sklearn.utils import _safe_indexing

from cerebro._core import trial_seed
from cerebro.errors import InputError
from cerebro.machine import generators


class Heads:
    """The columns that the heads of a search make, as files in a folder.

    `folds` has the numbers of each fold's training rows.
    """

    def __init__(self, folder: Path, x: Any, y: Any, folds: list[Any], seed: int) -> None:
        folder.mkdir()
        self._folder, self._seed = folder, seed
        joblib.dump((x, y, folds), folder / "rows")

    def transform(self, head: Pipeline | None, setting: str, fold: int | None) -> Any:
        """Return all rows as `head` transforms them, fitted on a fold's training rows.

        `setting` is the text of the head's parameters; a fold of None stands for all rows.
        """
        key = hashlib.sha256(f"{fold} {setting}".encode()).hexdigest()
        path = self._folder / key
        with Path(f"{path}.lock").open("wb") as lock:  # so that one worker fits, and others wait
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                rows = self._fit(head, fold)
                joblib.dump(rows, f"{path}.new")
                Path(f"{path}.new").replace(path)
        return joblib.load(path, mmap_mode="r")

    def _fit(self, head: Pipeline | None, fold: int | None) -> Any:
        x, y, folds = joblib.load(self._folder / "rows")
        if head is None:
            return as_numbers(x)
        count = len(y)
        train = np.arange(count) if fold is None else folds[fold]
        others = np.setdiff1d(np.arange(count), train)
        learned = fit_head(head, _safe_indexing(x, train), y[train], self._seed)
        parts = [as_numbers(learned)]
        if len(others):
            parts.append(as_numbers(head.transform(_safe_indexing(x, others))))
        place = np.argsort(np.concatenate([train, others]), kind="stable")
        if any(map(sparse.issparse, parts)):
            return sparse.vstack(parts, format="csr")[place]
        return np.concatenate(parts)[place]


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

"""Define the base class of callbacks that observe a search, and the one that writes a CSV file."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cerebro.machine.files import path_of
from cerebro.machine.mappings import flatten

FIRST = ("trial", "epoch", "seconds", "state_hash")


class Observer:
    """A callback whose failures do not end the search.

    Subclasses define any of the hooks of a callback: ``on_run_start(run)``,
    ``on_trial_start(trial)``, ``on_unit_end(trial, metrics)``, ``on_epoch_end(trial, metrics)``,
    ``on_trial_end(trial)``, ``on_run_end(result)``. If a hook raises an exception, Cerebro warns
    once, and does not call the observer again in this run. An exception in any other callback ends
    the run.

    ``on_run_closed()``, which only observers have, is called last, when the run's folder is
    complete and released; ``on_commit()`` is called by the thread that writes the run's store
    whenever rows have become durable, and must return at once.

    A resumed run calls ``on_run_start`` again, with the trials as they are; it reports epochs that
    have not been reported before, unless their record was lost in a crash.

    Parameters
    ----------
    strict
        Whether a failure ends the run, as with any other callback.
    """

    strict = False

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict

    def close(self) -> None:
        """Release the observer's resources; called once, however the run has ended."""


class CSV(Observer):
    """Write a CSV file with a row for each epoch of each trial.

    The columns are ``trial``, ``epoch`` (from 0), ``seconds``, ``state_hash``, the metrics, and the
    settings as ``config.lr``. The file is complete after every epoch. In the run's folder, it is
    created when the first epoch ends. When a run is resumed, the file is written again from the
    run's record.

    Parameters
    ----------
    path
        The file; None: ``metrics.csv`` in the run's folder.
    strict
        Whether a failure of the observer ends the run.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, strict: bool = False) -> None:
        super().__init__(strict=strict)
        self.path = None if path is None else path_of("path", path)
        self._file: Any = None
        self._columns: dict[str, None] = {}
        self._rows: list[dict[str, Any]] = []

    def on_run_start(self, run: Any) -> None:
        self._target = Path(run.path) / "metrics.csv" if self.path is None else self.path
        self._columns = dict.fromkeys(FIRST)
        self._rows = [_make_row(trial, epoch) for trial in run.trials for epoch in trial.history]
        if self._rows or self.path is not None:
            self._write_all()
        # Else the first epoch writes it: a new search replaces a run that has no other files.

    def on_epoch_end(self, trial: Any, metrics: Mapping[str, float]) -> None:
        row = _make_row(trial, trial.history[-1])
        self._rows.append(row)
        if self._file is not None and row.keys() <= self._columns.keys():
            csv.DictWriter(self._file, list(self._columns)).writerow(row)
            self._file.flush()
        else:
            self._write_all()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_all(self) -> None:
        """Write the whole file, because a row has new columns."""
        self.close()
        for row in self._rows:
            self._columns.update(dict.fromkeys(row))
        self._file = self._target.open("w", encoding="utf-8", newline="")
        writer = csv.DictWriter(self._file, list(self._columns))
        writer.writeheader()
        writer.writerows(self._rows)
        self._file.flush()


def _make_row(trial: Any, epoch: Mapping[str, Any]) -> dict[str, Any]:
    config = {f"config.{name}": value for name, value in flatten(trial.config).items()}
    return {
        "trial": trial.number,
        **{name: epoch[name] for name in FIRST[1:]},
        **epoch["metrics"],
        **config,
    }

"""What a searcher was told since its state was written down, told again from a run's record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cerebro.failures import as_told, worst
from cerebro.saved_run import SavedRun
from cerebro.searchers.base import Searcher
from cerebro.searchers.notes import Word, catch_up
from cerebro.settings import Settings
from cerebro.stopping import EarlyStopping
from cerebro.store import read_said, reader
from cerebro.trial import TrialRecord


def retell(saved: SavedRun, settings: Settings, searcher: Searcher) -> None:
    """Bring a searcher that has its last recorded state to where the run was left.

    Raises
    ------
    InputError
        If it does not say again what it said.
    """
    at = saved.meta.get("searcher_said")
    if at is None or not searcher.adaptive:  # of an older run: written down with every answer
        return
    with reader(saved.folder) as connection:
        words = [Word(*row) for row in read_said(connection, at)]
    if not words:
        return
    records = saved.configurations

    def told(trial: int, epoch: int) -> Mapping[str, float]:
        return as_told(
            reported(records[trial], epoch, settings.stop, settings.metric, settings.mode),
            settings.metric,
            settings.mode,
        )

    def config_of(trial: int) -> Mapping[str, Any]:
        return records[trial].config

    epochs = saved.settings["epochs"]
    catch_up(searcher, words, told=told, config_of=config_of, epochs=epochs)


def reported(
    record: TrialRecord, epoch: int, stop: EarlyStopping | None, metric: str, mode: str
) -> Mapping[str, float]:
    """What was reported of a trial's epoch; see `cerebro.search_loop`."""
    own = epoch - record.first_epoch
    if own < len(record.epochs):
        return record.epochs[own].metrics
    history = [known.to_history() for known in record.epochs]
    if record.status == "stopped" and stop is not None and stop.should_stop(history):
        return record.epochs[-1].metrics  # it stands for what it was
    return {metric: worst(mode)}  # it failed, or the user stopped it

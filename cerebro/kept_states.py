"""Which states of a trial stay on disk, and which are deleted when."""

from __future__ import annotations

from pathlib import Path

from cerebro.settings import Settings
from cerebro.store import Store
from cerebro.trial import EpochRecord, TrialRecord
from cerebro.unit import RunContext


class KeptStates:
    """The files of finished epochs' states, and the slots of live trials."""

    def __init__(self, settings: Settings, context: RunContext, store: Store) -> None:
        self._settings = settings
        self._folder = Path(context.epoch_dir)
        self._slots = Path(context.state_dir)
        self._store = store
        self._kept: dict[int, dict[int, EpochRecord]] = {}

    def add(self, record: TrialRecord, epoch: EpochRecord) -> None:
        """Record a finished epoch; its state is published, others are retired."""
        record.epochs.append(epoch)
        file = epoch.state_file
        self._store.add_epoch(
            record.number,
            epoch.epoch,
            epoch.metrics,
            epoch.seconds,
            epoch.state_hash,
            file,
            None if file is None else (self._folder / (file + ".new"), self._folder / file),
        )
        self._retire(record)

    def discard(self, file: str | None) -> None:
        """Delete the state of an epoch that does not count."""
        if file is not None:
            (self._folder / (file + ".new")).unlink(missing_ok=True)

    def _retire(self, record: TrialRecord) -> None:
        """Delete kept states that `keep` no longer asks for; the last one always stays."""
        kept = self._kept.setdefault(record.number, {})
        last = record.epochs[-1]
        # A trial that goes on has states of an earlier process.
        for epoch in record.epochs if not kept else [last]:
            if epoch.state_file is not None:
                kept[epoch.epoch] = epoch
        if self._settings.keep == "all":
            return
        wanted = {last.epoch}
        if self._settings.keep == "best":
            best = record.best_epoch(self._settings.metric, self._settings.mode)
            if best is not None:
                wanted.add(best)
        for number in sorted(set(kept) - wanted):
            epoch = kept.pop(number)
            assert epoch.state_file is not None
            self._store.retire_state(record.number, number, self._folder / epoch.state_file)
            epoch.state_file = None

    def remove_slots(self, number: int) -> None:
        for suffix in (".a", ".b", ".slots"):
            (self._slots / f"{number}{suffix}").unlink(missing_ok=True)

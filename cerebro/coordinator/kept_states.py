"""Decide which states of a trial stay on disk, and delete the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

from cerebro.errors import StateError
from cerebro.run.records import EpochRecord, TrialRecord
from cerebro.run.states import CloneOf, KeptState, remove_slots, remove_state, unpublished_name
from cerebro.run.store import Store


class KeptStates:
    """Keeps the states of finished epochs, and removes slots.

    `folder` and `slots` are the folders of kept states and of slots. `keep` is "best", "last" or
    "all". `best_epoch` returns the epoch whose state ``keep="best"`` keeps. `pinned` has trials and
    epochs whose states the searcher needs.
    """

    def __init__(
        self,
        folder: Path,
        slots: Path,
        store: Store,
        keep: str,
        best_epoch: Callable[[TrialRecord], int | None],
        pinned: Collection[tuple[int, int]],
    ) -> None:
        self._folder = folder
        self._slots = slots
        self._store = store
        self._keep = keep
        self._kept: dict[int, dict[int, EpochRecord]] = {}
        self._needed: Counter[tuple[int, int]] = Counter()
        self._best_epoch = best_epoch
        self._pinned = pinned

    def add_epoch(
        self, record: TrialRecord, epoch: EpochRecord, for_clones: int | None = None
    ) -> None:
        """Record a finished epoch, publish its state, and delete states that are no longer needed.

        The state of `for_clones`, the last reported epoch, also stays, because a clone would begin
        with it.
        """
        record.epochs.append(epoch)
        file = epoch.state_file
        self._store.add_epoch(
            record.number,
            epoch.epoch,
            epoch.metrics,
            epoch.seconds,
            epoch.state_hash,
            file,
            None if file is None else self._paths_of(file, epoch.state_hash),
        )
        self.retire(record, for_clones)

    def clone_of(self, record: TrialRecord, epoch: int) -> CloneOf:
        """Return a trial's state after an epoch; the state stays on disk until :meth:`release`."""
        start = next((e for e in record.epochs if e.epoch == epoch), None)
        if start is None or start.state_file is None:
            raise StateError(f"trial {record.number} has no state of epoch {epoch}: it was deleted")
        self._needed[record.number, epoch] += 1
        return CloneOf(str(self._folder / start.state_file), start.state_hash)

    def find_last_state(self, record: TrialRecord) -> KeptState | None:
        """Return the state of a trial's last epoch, which always stays; None before any epoch."""
        if not record.epochs or record.epochs[-1].state_file is None:
            return None
        last = record.epochs[-1]
        return KeptState(str(self._folder / str(last.state_file)), last.state_hash)

    def release(self, record: TrialRecord, epoch: int, for_clones: int | None) -> None:
        """Release a parent's state once the clone has its own."""
        self._needed[record.number, epoch] -= 1
        self._needed += Counter()  # drops counts that are not above 0
        self.retire(record, for_clones)

    def discard(self, file: str | None, state_hash: str) -> None:
        """Delete the unpublished state of an epoch that does not count."""
        if file is not None:
            remove_state(self._paths_of(file, state_hash)[0])

    def _paths_of(self, file: str, state_hash: str) -> tuple[Path, Path]:
        """Return the paths of a state before and after it is published."""
        return self._folder / unpublished_name(file, state_hash), self._folder / file

    def retire(self, record: TrialRecord, for_clones: int | None = None) -> None:
        """Delete states that `keep` does not require; the state of the last epoch always stays."""
        if not record.epochs:
            return
        epochs = self._kept.setdefault(record.number, {})
        last = record.epochs[-1]
        # A resumed trial also has states written by an earlier process.
        for epoch in record.epochs if not epochs else [last]:
            if epoch.state_file is not None:
                epochs[epoch.epoch] = epoch
        if self._keep == "all":
            return
        required = {last.epoch}
        if self._keep == "best":
            best = self._best_epoch(record)
            if best is not None:
                required.add(best)
        for number in sorted(set(epochs) - required - {for_clones}):
            if self._needed[record.number, number] > 0 or (record.number, number) in self._pinned:
                continue
            epoch = epochs.pop(number)
            assert epoch.state_file is not None
            self._store.retire_state(record.number, number, self._folder / epoch.state_file)
            epoch.state_file = None

    def is_needed(self, number: int) -> bool:
        return any(trial == number for trial, _ in self._needed)

    def forget(self, number: int) -> None:
        """Forget a trial that has ended; its kept states stay as they are."""
        self._kept.pop(number, None)

    def remove_slots(self, number: int) -> None:
        remove_slots(self._slots, number)

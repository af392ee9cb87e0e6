"""Memory that grows with a trial: found before it ends the run, and named.

A worker says with every unit by how much its own memory (without mapped files)
grew while the unit trained, less what a unit may keep: one that had to load
its model keeps gradients and the like, so only what exceeds a few times the
state's size counts there. Summed over an epoch this is close to zero for code
that keeps nothing, whatever is freed and taken in between.

The rule: a trial is named when each of three epochs in a row, the trial's first
not counted, grew by at least 8 MB, and those in a row together by 64 MB. Caches
that fill once do not last that long; a list of outputs does.
"""

from __future__ import annotations

from dataclasses import dataclass

from cerebro.machine.resources import Usage

EPOCHS = 3
LEAST_PER_EPOCH = 8 << 20
LEAST_TOGETHER = 64 << 20
LOADED_ALLOWANCE = 32 << 20
LOADED_STATES = 3


def unexplained(
    before: Usage | None, after: Usage | None, *, loaded: bool, state_bytes: int
) -> int:
    """Bytes by which a unit grew its process beyond what it may keep.

    Parameters
    ----------
    before, after
        Use of memory once the model was in place, and at the unit's end.
    loaded
        Whether the unit had to build and load its model.
    state_bytes
        Length of the trial's packed state.
    """
    if before is None or after is None:
        return 0
    grown = after.private - before.private
    if not loaded:
        return grown
    return max(0, grown - LOADED_ALLOWANCE - LOADED_STATES * state_bytes)


@dataclass
class _Trial:
    grown: int = 0
    ended: int = 0
    epochs: int = 0
    together: int = 0
    named: bool = False


class Growth:
    """Watches the trials of a run; see the module's text for the rule."""

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = {}

    def add(self, trial: int, grown: int) -> None:
        """Note a unit's unexplained growth, in bytes."""
        self._trials.setdefault(trial, _Trial()).grown += grown

    def end_epoch(self, trial: int, epoch: int, resident: int) -> str | None:
        """Judge an epoch; returns what to tell the user, once for a trial that grows.

        `resident` is what its worker's process held at the end, in bytes.
        """
        t = self._trials.setdefault(trial, _Trial())
        grown, t.grown = t.grown, 0
        t.ended += 1
        if t.ended == 1 or grown < LEAST_PER_EPOCH:
            t.epochs = t.together = 0
            return None
        t.epochs += 1
        t.together += grown
        if t.named or t.epochs < EPOCHS or t.together < LEAST_TOGETHER:
            return None
        t.named = True
        return (
            f"trial {trial} keeps about {t.together / t.epochs / 1e6:.0f} MB more memory with "
            f"every epoch (its process holds {resident / 1e6:.0f} MB after epoch {epoch}): does "
            "the model, a metric or build keep batches, outputs or losses?"
        )

    def forget(self, trial: int) -> None:
        """The trial has ended."""
        self._trials.pop(trial, None)

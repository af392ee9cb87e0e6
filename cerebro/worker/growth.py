"""Find trials whose memory keeps growing, before they run out of memory.

With every unit a worker reports how much its private memory (without mapped files) grew during the
unit. A unit that had to load its model also keeps gradients and the like, so for this unit only
growth beyond a few times the state's size counts. Code that keeps nothing has a total growth close
to zero over an epoch, whatever it allocates in between.

The rule: a trial gets a warning if three consecutive epochs, not counting its first, each grew by
at least 8 MB and together by at least 64 MB. A cache that fills once does not grow for that long,
but a list of outputs does.
"""

from __future__ import annotations

from dataclasses import dataclass

from cerebro.machine.resources import Usage

EPOCHS = 3
LEAST_PER_EPOCH = 8 << 20
LEAST_TOGETHER = 64 << 20
LOADED_ALLOWANCE = 32 << 20
LOADED_STATES = 3


def measure_unexplained(
    before: Usage | None, after: Usage | None, *, loaded: bool, state_bytes: int
) -> int:
    """Return how many bytes a unit's process grew beyond what is expected.

    `before` is the memory after the model was loaded, `after` that at the unit's end. `loaded` says
    whether the unit had to build and load its model, whose packed state has `state_bytes`.
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
    """Watches the memory of a run's trials; see the module's docstring for the rule."""

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = {}

    def add(self, trial: int, grown: int) -> None:
        """Add a unit's unexplained growth, in bytes."""
        self._trials.setdefault(trial, _Trial()).grown += grown

    def end_epoch(self, trial: int, epoch: int, resident: int) -> str | None:
        """Apply the rule at an epoch's end; return a warning, at most once per trial."""
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
        self._trials.pop(trial, None)

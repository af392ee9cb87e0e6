"""Which worker has which shard in its GPU's memory.

A seat is where a worker sits: a GPU, or one of several processes that share one. Every shard is
dealt to one seat and stays there, whoever takes the seat over, so that the data are in device
memory once, whatever the number of trials and workers. Trials go to where the shards are; the
scheduler knows it as exclusive placement. Validation data are read by all, and held by each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cerebro.devices import Device
    from cerebro.unit import RunContext

DATA_SHARE = 0.5
"""Of a GPU's memory for shards that stay; the rest is for models and what they compute."""


class SeatedShards:
    """The shards of each seat.

    Parameters
    ----------
    seats
        How many there are.
    rows
        Of each shard; empty: every worker reads all.
    """

    def __init__(self, seats: int, rows: Sequence[int]) -> None:
        self._seat_of: dict[int, int] = {}
        load = [0] * seats
        # Largest first to the least loaded; of equals the lower number.
        for shard in sorted(range(len(rows)), key=lambda shard: (-rows[shard], shard)):
            seat = min(range(seats), key=lambda seat: (load[seat], seat))
            load[seat] += rows[shard]
            self._seat_of[shard] = seat

    def give(self, seat: int, shard: int) -> None:
        """A seat has a shard from now on: nobody sat where it was."""
        self._seat_of[shard] = seat

    def holders(self, seated: Mapping[int, int]) -> dict[int, list[int]] | None:
        """Return the workers that have each shard, by who sits where; None: all have all."""
        if not self._seat_of:
            return None
        return {
            shard: [seated[seat]] if seat in seated else []
            for shard, seat in sorted(self._seat_of.items())
        }


def fits_devices(context: RunContext, seats: Sequence[Device | None]) -> bool:
    """Whether shards are dealt out to stay in device memory.

    They are where several workers have GPUs, each gets a shard at least, and the data fit beside
    the models; with ``stagger=False`` all trials go through the shards together instead, which
    are not held then.
    """
    gpus = [device for device in seats if device is not None]
    train = context.train
    if len(gpus) < 2 or train.num_shards < len(gpus) or not context.stagger:
        return False
    together = max(map(gpus.count, gpus))
    validation = 0 if context.validation is None else context.validation.nbytes
    mine = together * (train.nbytes / len(gpus) + validation)
    return mine <= DATA_SHARE * min(device.memory for device in gpus)

"""Which worker has which shard in its GPU's memory.

A seat is where a worker sits: a GPU, or one of several processes that share one. Every shard is
dealt to one seat and stays there, whoever takes the seat over, so that the data are in device
memory once, whatever the number of trials and workers. Trials go to where the shards are; the
scheduler knows it as exclusive placement. Validation data are read by all, and held by each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cerebro.data import Dataset
    from cerebro.machine.devices import Device
    from cerebro.worker.messages import RunContext

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


def stay(
    train: Dataset, validation: Dataset | None, seats: Sequence[Device | None], *, stagger: bool
) -> bool:
    """Whether shards are dealt out to stay in device memory.

    They are where several workers have GPUs, each gets a shard at least, and the data fit beside
    the models; with ``stagger=False`` all trials go through the shards together instead, which
    are not held then.
    """
    gpus = [device for device in seats if device is not None]
    if len(gpus) < 2 or train.num_shards < len(gpus) or not stagger:
        return False
    together = max(map(gpus.count, gpus))
    mine = together * (train.nbytes / len(gpus) + _bytes_of(validation))
    return mine <= DATA_SHARE * min(device.memory for device in gpus)


def with_shares(context: RunContext, seats: Sequence[Device | None]) -> RunContext:
    """Tell workers what of their GPU's memory shards and live models may take.

    Half of it is for shards and a quarter for models, shared out among those who sit there.
    """
    gpus = [device for device in seats if device is not None]
    if not gpus:
        return context
    data = min(int(DATA_SHARE * device.memory) // gpus.count(device) for device in gpus)
    return replace(context, data_bytes=data, live_bytes=min(context.live_bytes, data // 2))


def kept_bytes(
    train: Dataset, validation: Dataset | None, seats: Sequence[Device | None], *, dealt: bool
) -> int:
    """Bytes of the data in the memory of the GPU that has most of them.

    Parameters
    ----------
    dealt
        Whether the shards are dealt out, see `stay`. Otherwise every worker reads all, and keeps
        what its share of the GPU's memory takes.
    """
    gpus = [device for device in seats if device is not None]
    if not gpus:
        return 0
    together = max(map(gpus.count, gpus))
    share = DATA_SHARE * min(device.memory for device in gpus)
    mine = train.nbytes / len(gpus) if dealt else train.nbytes
    return int(min(together * (mine + _bytes_of(validation)), share))


def _bytes_of(data: Dataset | None) -> int:
    return 0 if data is None else data.nbytes

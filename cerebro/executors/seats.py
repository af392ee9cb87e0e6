"""Assign pools of shards to workers that hold them in GPU memory.

A seat is a GPU, or one of several workers of a GPU, which are threads of one process and together
one *holder*. Every pool (see `cerebro.data.order`) is assigned to one holder and stays there, even
if its process is replaced. So device memory holds the data once, and trials move to the shards: for
the scheduler, placement is exclusive. With ``shuffle="rows"`` every worker reads all shards. Every
holder has the validation data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cerebro.data import Dataset
    from cerebro.data.order import EpochOrder
    from cerebro.machine.devices import Device
    from cerebro.worker.messages import RunContext

DATA_SHARE = 0.5  # of a GPU's memory for the shards it keeps; the rest is for models in training


class SeatedShards:
    """The assignment of shards to seats.

    `holders` has for each seat the number of the process that holds its shards. `rows` has the
    number of rows of each pool; if empty, every worker reads all shards.
    """

    def __init__(self, holders: Sequence[int] = (), rows: Sequence[int] = ()) -> None:
        self._holder = holders
        self._seat_of: dict[int, int] = {}  # the first seat of the holder of a pool
        first = [holders.index(holder) for holder in dict.fromkeys(holders)]
        load = dict.fromkeys(first, 0)
        # The largest pool is assigned first, to the least loaded seat; ties go to the lower number.
        for pool in sorted(range(len(rows)), key=lambda pool: (-rows[pool], pool)):
            seat = min(first, key=lambda seat: (load[seat], seat))
            load[seat] += rows[pool]
            self._seat_of[pool] = seat

    @property
    def stay(self) -> bool:
        """Whether shards are assigned to seats; if not, every worker reads all shards."""
        return bool(self._seat_of)

    def give(self, seat: int, pool: int) -> None:
        self._seat_of[pool] = seat

    def holders(self, seated: Mapping[int, int]) -> dict[int, list[int]] | None:
        """Return the workers that hold each pool, from the worker of each seat; None: all do."""
        if not self._seat_of:
            return None
        return {
            pool: [
                seated[other]
                for other, holder in enumerate(self._holder)
                if holder == self._holder[seat] and other in seated
            ]
            for pool, seat in sorted(self._seat_of.items())
        }


def fits_gpu_memory(
    train: Dataset, validation: Dataset | None, seats: Sequence[Device | None], *, order: EpochOrder
) -> bool:
    """Return whether to assign pools of shards to GPUs and keep them in device memory.

    This requires several GPUs, a pool for each, and data that fits in GPU memory together with the
    models. With ``stagger=False`` all trials go through the shards together, and
    shards are not kept; with ``shuffle="rows"`` there is one pool.
    """
    gpus = {device for device in seats if device is not None}
    if len(gpus) < 2 or len(order.pools) < len(gpus) or not order.stagger:
        return False
    mine = train.nbytes / len(gpus) + _bytes_of(validation)
    return mine <= DATA_SHARE * min(device.memory for device in gpus)


def place_pools(
    train: Dataset,
    validation: Dataset | None,
    seats: Sequence[Device | None],
    *,
    order: EpochOrder,
) -> SeatedShards:
    """Return where pools stay."""
    gpus = list(dict.fromkeys(seats))
    holders = [gpus.index(device) for device in seats]
    resident = fits_gpu_memory(train, validation, seats, order=order)
    return SeatedShards(holders, order.pool_rows if resident else [])


def set_memory_shares(context: RunContext, seats: Sequence[Device | None]) -> RunContext:
    """Return the context with the GPU memory, in bytes, for shards and a worker's live models.

    Shards, which the workers of a GPU share, get half of its memory. Models get a quarter, divided
    among these workers.
    """
    gpus = [device for device in seats if device is not None]
    if not gpus:
        return context
    data = min(int(DATA_SHARE * device.memory) for device in gpus)
    each = min(int(DATA_SHARE * device.memory) // gpus.count(device) for device in gpus)
    live = min(context.share.live_bytes, each // 2)
    return replace(context, share=replace(context.share, data_bytes=data, live_bytes=live))


def count_kept_bytes(
    train: Dataset,
    validation: Dataset | None,
    seats: Sequence[Device | None],
    *,
    dealt: bool,
) -> int:
    """Return the bytes of data in the memory of the GPU that holds the most.

    `dealt` says whether the shards are assigned to GPUs (`fits_gpu_memory`). If not, every GPU's
    workers read all shards and keep as many as fit into their share of its memory.
    """
    gpus = {device for device in seats if device is not None}
    if not gpus:
        return 0
    share = DATA_SHARE * min(device.memory for device in gpus)
    mine = train.nbytes / len(gpus) if dealt else train.nbytes
    return int(min(mine + _bytes_of(validation), share))


def _bytes_of(data: Dataset | None) -> int:
    return 0 if data is None else data.nbytes

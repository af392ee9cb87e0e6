"""Lots of shards that come to nodes during a run, and the workers that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cerebro.cluster.events import Events
from cerebro.cluster.placement import Pace
from cerebro.cluster.supply import EVERYWHERE, Supply
from cerebro.cluster.workers import RemoteWorker
from cerebro.errors import CorruptDataError, text_of
from cerebro.worker.messages import ShardsPlaced

Arrival = Callable[[RemoteWorker, int, BaseException | None, Sequence[int]], None]


class Transfers:
    """The lots of a run: where they are, and which are on their way.

    When a lot has arrived, or has failed to, `handle_arrival` is called with the worker to whose
    node it was sent, the lot, the error, and the numbers of the workers that wait for it.
    """

    def __init__(self, supply: Supply, events: Events, handle_arrival: Arrival) -> None:
        self.pace = Pace()
        self._supply = supply
        self._events = events
        self._handle_arrival = handle_arrival
        self._loading: set[tuple[str, int]] = set()  # place and lot
        self._waiting: dict[tuple[str, int], list[int]] = {}

    def add_worker(self, remote: RemoteWorker, *, with_node: bool = False) -> None:
        """Add a worker, and `with_node` the lots that are at its place already."""
        placement = self._supply.placement
        if placement is None:
            return
        placement.add_worker(remote.number, remote.place)
        if with_node:
            for lot in self._supply.arrived.get(remote.place, set()) - {EVERYWHERE}:
                placement.add_lot(remote.place, lot)

    def remove_worker(self, remote: RemoteWorker, *, with_place: bool) -> None:
        self.pace.forget(remote.number)
        if self._supply.placement is not None:
            self._supply.placement.remove_worker(remote.number)
        if with_place:
            self._supply.forget(remote.place)

    def holders(self) -> Mapping[int, Sequence[int]] | None:
        """Return the workers that can read each lot; None: all read all."""
        return None if self._supply.placement is None else self._supply.placement.holders()

    def load(self, remote: RemoteWorker, lot: int) -> None:
        """Make a lot readable for a worker and all others on its node."""
        if self._supply.placement is not None:
            self._supply.placement.add_lot(remote.place, lot)
            self._fetch(remote, lot)

    def is_there(self, remote: RemoteWorker, lot: int | None) -> bool:
        """Whether a worker can read a lot; None: it needs none."""
        return lot is None or self._supply.is_there(remote, lot)

    def wait_for(self, remote: RemoteWorker, lot: int, *, damaged: bool = False) -> None:
        """Have a worker wait for a lot, which is sent to its node if it is not on its way."""
        self._waiting.setdefault((remote.place, lot), []).append(remote.number)
        self._fetch(remote, lot, damaged=damaged)

    def mark_damaged(self, remote: RemoteWorker, lot: int) -> str:
        """Note that the copy of a lot at a worker's place is damaged; return the lot's name."""
        self._supply.arrived[remote.place].discard(lot)
        return self._supply.describe_lot(lot)

    def rebalance(self, remotes: Sequence[RemoteWorker]) -> None:
        """Copy one lot from a slow place to a fast one, if that helps."""
        if self._supply.placement is None or self._supply.derives or self._loading:
            return
        wish = self._supply.placement.choose_lot_to_copy(self.pace.speeds())
        if wish is not None:
            lot, place = wish
            remote = next(remote for remote in remotes if remote.place == place)
            if self._supply.is_there(remote, lot):
                self._add_lot(place, lot)
            else:
                self._fetch(remote, lot)

    def _add_lot(self, place: str, lot: int) -> None:
        placement = self._supply.placement
        if placement is not None and not placement.has_lot(place, lot):
            placement.add_lot(place, lot)
            self._events.now.append(ShardsPlaced())

    def _fetch(self, remote: RemoteWorker, lot: int, *, damaged: bool = False) -> None:
        key = remote.place, lot
        if self._supply.is_there(remote, lot) or key in self._loading:
            return
        self._loading.add(key)
        if damaged:
            job = self._events.fetch_pool.submit(self._supply.resend_damaged, remote, lot)
        else:
            job = self._events.fetch_pool.submit(self._supply.send, remote, [lot])
        self._events.when_done(job, self._finish, remote, lot)

    def _finish(self, receiver: RemoteWorker, lot: int, done: Any) -> None:
        key = receiver.place, lot
        self._loading.discard(key)
        error = done.exception()
        if error is None:
            self._supply.arrived.setdefault(receiver.place, set()).add(lot)
            if lot != EVERYWHERE:
                self._add_lot(receiver.place, lot)
        self._handle_arrival(receiver, lot, error, self._waiting.pop(key, ()))


def find_fatal_error(receiver: RemoteWorker, lot: int, error: BaseException) -> Exception | None:
    """Return what ends the run after a failed transfer; None: only the agent has failed."""
    if isinstance(error, (CorruptDataError, OSError)):  # the files here
        return CorruptDataError(text_of(error))
    cause = getattr(error, "cause", None)
    if isinstance(cause, CorruptDataError):
        return CorruptDataError(f"node {receiver.name}: {text_of(cause)}")
    if isinstance(cause, OSError):
        what = "the validation rows" if lot == EVERYWHERE else "its shards"
        return OSError(
            f"node {receiver.name} cannot store {what} ({text_of(cause)}): make room in its "
            "cache folder ($CEREBRO_CACHE), or give it access to the data, and resume the run"
        )
    return None

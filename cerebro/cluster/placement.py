"""Decide which shards go to which nodes; nothing is moved here.

A *place* holds lots, shards that stay together (`cerebro.cluster.supply`): it is the cache folder
of a node, which all workers of the node read. Each lot is assigned to the place with the fewest
rows per worker, and to `replicas` places in all. Copies from an earlier run are used unless they
give a place more than its share.

During the run, slow places are relieved, and new ones get work: `choose_lot_to_copy` names
one lot to copy to a different place, so that its units can also run there. Copies are never
removed, because they are harmless.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

PIECES = 16  # the parts into which a lot at several places is divided to estimate their work
MARGIN = 1.15  # a place is relieved when its work exceeds its share by this factor


@dataclass
class Placement:
    """The lots of a run, with their rows, and their places."""

    rows: Sequence[int]
    workers: dict[int, str] = field(default_factory=dict)  # the place of each worker
    lots: dict[str, set[int]] = field(default_factory=dict)
    """The lots that each place has or will have."""

    def add_worker(self, worker: int, place: str) -> None:
        """Add a worker that reads the lots of a place, which may be new."""
        self.workers[worker] = place
        self.lots.setdefault(place, set())

    def remove_worker(self, worker: int) -> None:
        """Remove a worker, but not its place, which may be useful again."""
        self.workers.pop(worker, None)

    def remove_place(self, place: str) -> None:
        self.lots.pop(place, None)
        for worker in [w for w, p in self.workers.items() if p == place]:
            del self.workers[worker]

    def add_lot(self, place: str, lot: int) -> None:
        self.lots.setdefault(place, set()).add(lot)

    def has_lot(self, place: str, lot: int) -> bool:
        return lot in self.lots.get(place, ())

    def holders(self) -> dict[int, list[int]]:
        return {
            lot: [w for w, place in sorted(self.workers.items()) if self.has_lot(place, lot)]
            for lot in range(len(self.rows))
        }

    def assign_lots(
        self, replicas: int = 1, cached: Mapping[str, Collection[int]] | None = None
    ) -> dict[str, list[int]]:
        """Return each place's lots: each lot gets `replicas` places, first those in `cached`."""
        places = self._count_workers()
        order = list(places)
        copies = min(replicas, len(places))
        share = copies * sum(self.rows) / sum(places.values())
        load = dict.fromkeys(places, 0.0)
        largest_first = sorted(range(len(self.rows)), key=lambda s: (-self.rows[s], s))

        def after(place: str, lot: int) -> float:
            return load[place] + self.rows[lot] / places[place]

        def give(place: str, lot: int) -> None:
            load[place] = after(place, lot)
            self.add_lot(place, lot)

        for lot in largest_first:
            have = [p for p in order if cached and lot in cached.get(p, ())]
            have = [p for p in have if after(p, lot) <= MARGIN * share]
            for place in sorted(have, key=lambda p: load[p])[:copies]:
                give(place, lot)
        for lot in largest_first:
            while sum(self.has_lot(place, lot) for place in places) < copies:
                others = [place for place in order if not self.has_lot(place, lot)]
                give(min(others, key=lambda p: (after(p, lot), order.index(p))), lot)
        return {place: sorted(self.lots[place]) for place in places}

    def choose_lot_to_copy(
        self, speeds: Mapping[int, float] | None = None
    ) -> tuple[int, str] | None:
        """Return a lot and the place to copy it to, if one needs relief; `speeds` are relative."""
        places = self._count_workers(speeds)
        if len(places) < 2:
            return None
        load, alone = self._compute_loads(places)
        mean = sum(self.rows) / sum(places.values())
        # Ties go to the first, so that the result does not depend on the order of a set.
        slow = max(load, key=lambda p: load[p])
        fast = min(load, key=lambda p: load[p])
        if load[slow] <= MARGIN * mean:
            return None
        lots = [s for s in sorted(alone[slow]) if not self.has_lot(fast, s)]
        gap = (load[slow] - load[fast]) * places[fast]
        fitting = [s for s in lots if self.rows[s] / PIECES <= gap]
        if not fitting:
            return None
        return max(fitting, key=lambda s: (self.rows[s], -s)), fast

    def _count_workers(self, speeds: Mapping[int, float] | None = None) -> dict[str, float]:
        counts: dict[str, float] = {}
        for worker, place in sorted(self.workers.items()):
            counts[place] = counts.get(place, 0.0) + (speeds or {}).get(worker, 1.0)
        return counts

    def _compute_loads(
        self, places: Mapping[str, float]
    ) -> tuple[dict[str, float], dict[str, set[int]]]:
        """Return each place's time for an epoch, and the lots that contribute to it.

        A lot at several places is divided into parts, each taken by the first idle place.
        """
        load = dict.fromkeys(places, 0.0)
        of: dict[str, set[int]] = {place: set() for place in places}
        at = {s: [p for p in places if self.has_lot(p, s)] for s in range(len(self.rows))}
        for lot in sorted(at, key=lambda s: (len(at[s]), -self.rows[s], s)):
            pieces = 1 if len(at[lot]) == 1 else PIECES
            for _ in range(pieces if at[lot] else 0):
                rows = self.rows[lot] / pieces
                place = min(at[lot], key=lambda p: load[p] + rows / places[p])
                load[place] += rows / places[place]
                of[place].add(lot)
        return load, of


class Pace:
    """The speed of each worker, compared with the others on the same trials."""

    def __init__(self) -> None:
        self._trials: dict[int, float] = {}  # seconds per row, moving means
        self._workers: dict[int, tuple[int, float]] = {}  # units, and seconds relative to that

    def add(self, worker: int, trial: int, rows: int, seconds: float) -> None:
        if rows <= 0 or seconds <= 0:
            return
        rate = seconds / rows
        units, factor = self._workers.get(worker, (0, 1.0))
        if units > 0 and trial in self._trials:  # the first unit includes starting frameworks
            weight = 1 / min(units, 16)
            factor += weight * (rate / self._trials[trial] - factor)
        self._workers[worker] = units + 1, factor
        if units > 0:
            before = self._trials.get(trial, rate)
            self._trials[trial] = before + (rate - before) / 8

    def forget(self, worker: int) -> None:
        self._workers.pop(worker, None)

    def speeds(self) -> dict[int, float]:
        """Return the speed of each worker that has done a few units; 1 is the average."""
        return {w: 1 / factor for w, (units, factor) in self._workers.items() if units > 3}

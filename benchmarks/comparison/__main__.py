"""``python -m benchmarks.comparison``: run every rival on every workload, and write the record.

Cells run one at a time, in the order in which they matter: a round over all workloads, and two
more. In one workload a worker is then killed, three times. The slow rivals, which communicate at
every step or start a job for every configuration, take 6 to 12 times as long as the others. They
run once, in three workloads. With ``--quick`` there is one round, the slow ones have only the
workload in which a worker is killed, and the killed workers come last, once each. When the time is
up the remaining cells are named in the record, and ``--continue`` runs them; a round that was cut
off is run again as a whole.
``--page`` writes `docs/comparison.md` and its pictures from the record.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.comparison import page, papers, record
from benchmarks.comparison.measures import figures
from benchmarks.comparison.rivals import LOOP, NOT_RUN, RIVALS
from benchmarks.comparison.watch import Cell, run_cell
from benchmarks.comparison.workloads import KILLED, WORKLOADS, write
from benchmarks.peers import scratch

MINUTES = {"tiny": 9.5, "quick": 9.5, "full": 89.0}
"""No cell begins after this time, so that all end within 10 and 90 minutes."""
ROUNDS = {"tiny": 1, "quick": 1, "full": 3}
LIMIT = {"tiny": 60.0, "quick": 40.0, "full": 150.0}
"""Seconds for one cell."""
MORE_IF_KILLED = 30.0
"""Seconds of a cell in which a worker is killed, beyond twice those of the undisturbed one: some
rivals then wait forever."""
KILLS = {"tiny": 1, "quick": 1, "full": 3}
FOR_SLOW = ("equal", "three", "large")
"""The workloads of the slow rivals."""


CellPlan = tuple[str, str, int, bool]
"""A workload, a rival, a round, and whether a worker is killed."""


def plan(size: str) -> list[CellPlan]:
    """Return all cells in order: workload, rival, round, whether a worker is killed."""
    cells = []
    killed = [(KILLED, rival, kill, True) for kill in range(KILLS[size]) for rival in RIVALS]
    for number in range(ROUNDS[size]):
        names = [name for name in WORKLOADS if number == 0 or name != "large"]
        for workload in names:
            cells += [
                (workload, name, number, False)
                for name, rival in RIVALS.items()
                if not rival.is_slow or number < rounds_of_slow(workload, size)
            ]
            if number == 0 and workload == KILLED and size == "full":
                cells += killed
    return cells if size == "full" else cells + killed


def rounds_of_slow(workload: str, size: str) -> int:
    """Return how often slow rivals run a workload."""
    if size == "tiny":
        return 1
    if size == "quick":
        return int(workload == KILLED)
    return int(workload in FOR_SLOW)


class Comparison:
    """One run of all cells."""

    def __init__(self, size: str, minutes: float, limit: float, folder: Path) -> None:
        self.size, self.limit, self.folder = size, limit, folder
        self.over = time.monotonic() + 60 * minutes
        self.loops: dict[tuple[str, int], Cell] = {}
        self.undisturbed: dict[str, float] = {}
        """Seconds of a rival on the workload in which a worker is killed."""
        self.kept: dict[str, Path] = {}
        self.cells: list[dict[str, object]] = []
        self.left: list[str] = []
        self.prepared: dict[str, float] = {}

    def data(self, kind: str) -> Path:
        """Write a kind of data, once; keep only one of the large ones."""
        if kind not in self.kept:
            start = time.monotonic()
            place = self.folder / kind
            place.mkdir()
            write(next(w for w in WORKLOADS.values() if w.kind == kind), self.size, place)
            self.kept[kind] = place
            self.prepared[kind] = round(time.monotonic() - start, 1)
        return self.kept[kind]

    def run(self, workload: str, rival: str, number: int, kill: bool) -> None:
        """Run a cell unless the time is up."""
        if time.monotonic() > self.over:
            return
        data = self.data(WORKLOADS[workload].kind)
        chosen = WORKLOADS[workload]
        after = max(1, len(chosen.configs) * chosen.epochs[self.size] // 4) if kill else 0
        limit = self.limit
        if kill and rival in self.undisturbed:
            limit = min(limit, 2 * self.undisturbed[rival] + MORE_IF_KILLED)
        cell = run_cell(rival, workload, self.size, data, self.folder, limit, number, after)
        if rival == LOOP and not kill and not cell.why:
            self.loops[workload, number] = cell
        if workload == KILLED and not kill and not cell.why:
            self.undisturbed[rival] = cell.seconds
        loop = self.loops.get((workload, number))
        made = figures(cell, loop, self.size)
        self.cells.append(made)
        name = named(workload, rival, number, kill)
        self.left.remove(name)
        ratio, best = made.get("ratio"), made.get("best")
        print(
            f"  {name}: {cell.seconds:.1f} s, makespan / bound {ratio}, best {best}, "
            f"{cell.peak / 1e6:.0f} MB{', ' + cell.why if cell.why else ''}",
            flush=True,
        )


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--quick", action="store_true", help="smaller data, at most 10 minutes")
    made.add_argument("--tiny", action="store_true", help="to see that every cell works")
    made.add_argument("--minutes", type=float, help="start no cell after this time")
    made.add_argument("--limit", type=float, help="seconds for one cell, on a busy machine")
    made.add_argument("--only", default="", metavar="TEXT", help="rivals with this in their name")
    made.add_argument("--workload", action="append", choices=list(WORKLOADS))
    made.add_argument("--record", type=Path, default=record.PATH, help="where to write the record")
    made.add_argument("--note", default="", help="a remark for the record")
    made.add_argument("--continue", dest="goes_on", action="store_true", help="run what is left")
    made.add_argument("--page", action="store_true", help="only write the page from the record")
    options = made.parse_args()
    if not options.page:
        size = "tiny" if options.tiny else "quick" if options.quick else "full"
        measure(size, options)
    if options.record == record.PATH:
        page.write(record.load(options.record))


def measure(size: str, options: argparse.Namespace) -> None:
    """Run the cells and write the record."""
    absent = {**NOT_RUN}
    for name, rival in RIVALS.items():
        lacking = rival.lacking()
        if lacking:
            absent[name] = lacking
            print(f"  {name}: {lacking}")
    whole = [cell for cell in plan(size) if cell[1] not in absent]
    wanted = [
        cell
        for cell in whole
        if (options.only.lower() in cell[1].lower() or cell[1] == LOOP)
        and cell[0] in (options.workload or WORKLOADS)
    ]
    if options.goes_on:
        found = record.load(options.record)
        if found["size"] != size:
            raise SystemExit(f"{options.record} has the size {found['size']!r}, not {size!r}")
        wanted = reopen(found, whole, wanted)
    else:
        found = record.header(size, options.note)
        found.update(absent=absent, papers=papers.table(many=size == "full"))
        found.update(minutes=0.0, prepared={}, cells=[], left=[named(*cell) for cell in wanted])
    begun, before = time.time(), found["minutes"]
    minutes, limit = options.minutes or MINUTES[size], options.limit or LIMIT[size]
    with scratch() as folder:
        comparison = Comparison(size, minutes, limit, folder)
        comparison.cells, comparison.left = found["cells"], found["left"]
        comparison.prepared = found["prepared"]
        comparison.undisturbed = {
            cell["rival"]: cell["seconds"]
            for cell in found["cells"]
            if cell["workload"] == KILLED and not cell["kill"] and not cell["why"]
        }
        for cell in wanted:
            comparison.run(*cell)
            found["minutes"] = round(before + (time.time() - begun) / 60, 1)
            record.save(found, options.record)  # after each, so that nothing is lost


def reopen(found: record.Record, whole: list[CellPlan], wanted: list[CellPlan]) -> list[CellPlan]:
    """Return the wanted cells of rounds that were cut off, and remove their results."""
    rounds = {round_of(cell) for cell in wanted if named(*cell) in found["left"]}
    again = [cell for cell in wanted if round_of(cell) in rounds]
    removed = {named(*cell) for cell in again}
    kept = {
        named(cell["workload"], cell["rival"], cell["round"], cell["kill"]): cell
        for cell in found["cells"]
        if named(cell["workload"], cell["rival"], cell["round"], cell["kill"]) not in removed
    }
    found["cells"] = list(kept.values())
    found["left"] = [named(*cell) for cell in whole if named(*cell) not in kept]
    return again


def round_of(cell: CellPlan) -> tuple[str, int, bool]:
    """Return a cell's workload, its round, and whether a worker is killed."""
    workload, _, number, kill = cell
    return workload, number, kill


def named(workload: str, rival: str, number: int, kill: bool) -> str:
    """Return a cell's name."""
    return f"{rival}, {workload}, round {number + 1}{', a worker killed' * kill}"


if __name__ == "__main__":
    main()

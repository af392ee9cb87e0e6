"""A run's faults, drawn from a seed before anything starts.

A run is a sequence of *legs*: a process that searches or resumes, and its timed faults. The last
fault of a leg may end it; another leg follows until the run is finished. The draw is deterministic,
so a seed identifies a run; a fault's exact target also depends on timing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from benchmarks.faults.problem import Problem
from benchmarks.faults.shim import ANY, CLASSES, COORDINATOR, WORKER


@dataclass(frozen=True)
class Moment:
    """When a fault strikes.

    ``unit``: the `count`-th unit from the leg's start begins, and `offset` seconds pass. ``call``:
    before the `count`-th operation on the run's files, of some classes, in the coordinator or in
    workers; the calling process is halted there. ``start``: `offset` seconds after the leg's
    process was started.
    """

    kind: str
    count: int = 0
    offset: float = 0.0
    classes: int = ANY
    roles: int = COORDINATOR | WORKER


@dataclass(frozen=True)
class Fault:
    kind: str
    moment: Moment
    seed: int
    """Seed for further draws when it strikes."""


@dataclass(frozen=True)
class Leg:
    how: str
    """``script``: the same script again; ``resume``: `cerebro.resume`; ``command``: the CLI;
    ``further``: `cerebro.resume` with one more epoch."""
    workers: int
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class Plan:
    seed: int
    problem: Problem
    keep: str
    state_dir: str | None
    """None: in the run's folder; ``memory``: a folder that a power loss empties."""
    children: bool
    """Whether workers start child processes."""
    disk: bool
    """Whether the run is on a separate small disk."""
    again: bool
    """Whether the finished run is resumed once more, which must do nothing."""
    further: bool
    """Whether the finished run is trained for one more epoch."""
    legs: tuple[Leg, ...] = field(default=())

    @property
    def needs_shim(self) -> bool:
        return any(
            fault.moment.kind == "call" or fault.kind in SHIMMED
            for leg in self.legs
            for fault in leg.faults
        )

    @property
    def goes_back(self) -> bool:
        """Whether a fault may cost more than running units, whose rows then repeat."""
        kinds = {fault.kind for leg in self.legs for fault in leg.faults}
        return bool(kinds & (TORN.keys() | POWER.keys()))

    @property
    def loses_power(self) -> bool:
        return any(fault.kind == "power loss" for leg in self.legs for fault in leg.faults)


def calm(seed: int) -> Plan:
    """A run without faults."""
    problem = Problem(trials=3, shards=3, epochs=2)
    return Plan(seed, problem, "last", None, False, False, False, False, (Leg("script", 2, ()),))


# Kinds and their weights. A leg has up to three of the first two groups and one of the others.
WORKER_FAULTS = {"worker killed": 6, "socket cut": 3, "worker stopped": 1}
PAUSES = {"worker paused": 1, "coordinator paused": 1, "all paused": 1, "second owner": 1}
ENDS = {
    "coordinator killed": 5,
    "all killed": 5,
    "coordinator killed, worker stopped": 1,
    "coordinator killed, worker deaf": 1,
    "coordinator killed, disk slow": 2,
    "interrupted": 2,
    "terminated": 2,
}
DISK_FAULTS = {
    "disk full": 3,
    "folder read-only": 2,
    "sync fails once": 2,
    "syncs fail": 2,
    "write fails once": 2,
    "writes fail": 1,
    "short write": 1,
}
TORN = {
    "torn epoch state": 2,
    "torn slot page": 2,
    "torn slot": 2,
    "torn new file": 1,
    "torn log of the store": 2,
    "torn store": 1,
}
POWER = {"power loss": 1}

SMALL_DISK = ["disk full", "folder read-only"]
SHIMMED = {
    "sync fails once",
    "syncs fail",
    "write fails once",
    "writes fail",
    "short write",
    "coordinator killed, disk slow",
    "power loss",
}
ALL = [*WORKER_FAULTS, *PAUSES, *ENDS, *DISK_FAULTS, *TORN, *POWER]

GROUPS = [
    (2, WORKER_FAULTS),
    (6, ENDS),
    (3, DISK_FAULTS),
    (2, TORN),
    (4, POWER),
]
MAX_OFFSET = 0.006
"""Seconds: longer than most units take."""


def draw(seed: int, kinds: frozenset[str] = frozenset(ALL)) -> Plan:
    """Draw the run of a seed, with the kinds of faults that this machine supports."""
    rng = random.Random(f"faults-{seed}")
    # The shadow for a power loss is not kept on a disk that fills up.
    kinds -= frozenset(rng.choice([list(POWER), SMALL_DISK]))
    problem = Problem(
        searcher=rng.choice(["random", "grid", "tournament"]),
        trials=rng.choice([3, 5]),
        shards=rng.choice([3, 5]),
        epochs=rng.choice([2, 3]),
    )
    if rng.random() < 0.04:  # importing PyTorch takes longer than all the rest
        problem = Problem("torch", trials=3, shards=3, epochs=2)
    legs = []
    for index in range(rng.choice([1, 2, 2, 3])):
        how = "script" if index == 0 else rng.choice(["script", "resume", "command"])
        workers = rng.choice([0, 1, 2, 2, 3])
        legs.append(Leg(how, workers, tuple(_faults(rng, problem, workers, kinds))))
    struck = {fault.kind for leg in legs for fault in leg.faults}
    return Plan(
        seed=seed,
        problem=problem,
        keep=rng.choice(["best", "last", "all"]),
        state_dir=rng.choice([None, None, "memory"]),
        children=rng.random() < 0.2 and not struck & set(POWER),
        disk=bool(struck & set(SMALL_DISK)),
        again=rng.random() < 0.2,
        further=rng.random() < 0.15 and not problem.adaptive,
        legs=tuple(legs),
    )


def _faults(
    rng: random.Random, problem: Problem, workers: int, kinds: frozenset[str]
) -> list[Fault]:
    """Draw the faults of one leg: minor ones first, then at most one that may end it."""
    faults = []
    if workers > 0:
        for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
            group = {**WORKER_FAULTS, **PAUSES}
            faults.append(_fault(rng, problem, workers, group, kinds))
    elif rng.random() < 0.2:
        faults.append(_fault(rng, problem, 0, {"coordinator paused": 1, "second owner": 1}, kinds))
    if rng.random() < 0.85 or not faults:
        weights = [weight for weight, _ in GROUPS]
        group = rng.choices([group for _, group in GROUPS], weights)[0]
        if group is WORKER_FAULTS and workers == 0:
            group = ENDS
        faults.append(_fault(rng, problem, workers, group, kinds))
    found = [fault for fault in faults if fault is not None]
    first = [f for f in found if f.kind in WORKER_FAULTS or f.kind in PAUSES]
    last = [f for f in found if f not in first][:1]
    # The shim handles one fault at a time, so only one fault of a leg may need it.
    calls = [f for f in (*last, *first) if f.moment.kind == "call" or f.kind in SHIMMED]
    first = [f for f in first if f not in calls[1:]]
    return sorted(first, key=lambda f: f.moment.count) + last


def _fault(
    rng: random.Random,
    problem: Problem,
    workers: int,
    group: dict[str, int],
    kinds: frozenset[str],
) -> Fault | None:
    left = {kind: weight for kind, weight in group.items() if kind in kinds}
    if workers == 0:
        left = {kind: weight for kind, weight in left.items() if ", worker" not in kind}
    seed = rng.randrange(2**32)
    if not left:
        return None
    kind = rng.choices(list(left), list(left.values()))[0]
    return Fault(kind, _moment(rng, problem, kind, workers, kinds), seed)


def _moment(
    rng: random.Random, problem: Problem, kind: str, workers: int, kinds: frozenset[str]
) -> Moment:
    unit = Moment("unit", rng.randint(1, problem.units * 2 // 3), rng.random() ** 2 * MAX_OFFSET)
    shimmed = bool(kinds & SHIMMED)
    some = rng.choice([ANY, ANY, *CLASSES.values()])
    count = round(2 ** rng.uniform(0, 8 if some == ANY else 5))
    if kind in ("sync fails once", "syncs fail"):
        return Moment("call", round(2 ** rng.uniform(0, 5)), classes=CLASSES["sync"])
    if kind in ("write fails once", "writes fail", "short write"):
        classes = rng.choice([CLASSES["write"], CLASSES["resize"], CLASSES["write"] | 1])
        if kind == "short write":
            classes = CLASSES["write"]
        return Moment("call", round(2 ** rng.uniform(0, 7)), classes=classes)
    if kind in PAUSES or kind in ("disk full", "folder read-only", *TORN) or not shimmed:
        return unit
    if kind.startswith("coordinator killed,"):
        return unit
    if kind in WORKER_FAULTS:
        if kind == "worker killed" and rng.random() < 0.3:
            return Moment("call", count, classes=some, roles=WORKER)
        return unit
    chance = rng.random()
    if chance < 0.1:
        return Moment("start", offset=rng.uniform(0.0, 0.8))
    if chance < 0.55:
        roles = COORDINATOR if kind == "coordinator killed" else COORDINATOR | WORKER
        return Moment("call", count, classes=some, roles=roles)
    return unit

"""A run's faults, drawn from a seed before anything starts."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.faults.problem import Problem

ACTOR = "actor killed"
PROCESS = "worker process killed"
REMOVED = "node removed"
ADDED = "node added"
COORDINATOR = "coordinator killed"
KINDS = {ACTOR: 3, PROCESS: 2, REMOVED: 3, ADDED: 2, COORDINATOR: 3}
"""Each kind's weight."""


@dataclass(frozen=True)
class Strike:
    """A fault and its time: when the `count`-th unit of the leg begins or is done."""

    kind: str
    event: str
    count: int


@dataclass(frozen=True)
class Leg:
    """A process that searches or resumes."""

    before: str | None
    """A change of the cluster before it starts: `REMOVED`, `ADDED` or None."""
    strikes: tuple[Strike, ...]


@dataclass(frozen=True)
class Plan:
    seed: int
    problem: Problem
    apart: bool
    """Whether the run's folder is hidden from nodes, as on separate machines."""
    replicas: int
    shared: bool
    """Whether nodes read the data in place."""
    legs: tuple[Leg, ...]


def draw(seed: int) -> Plan:
    """Draw the run of a seed.

    A leg loses at most one node, so that one of two with a CPU remains.
    """
    rng = random.Random(f"cluster-soak-{seed}")
    problem = Problem(
        searcher=rng.choice(["random", "random", "tournament"]),
        trials=rng.choice([3, 4]),
        shards=rng.choice([3, 4]),
        epochs=rng.choice([2, 3]),
    )
    return Plan(
        seed=seed,
        problem=problem,
        apart=rng.random() < 0.6,
        replicas=rng.choice([1, 1, 2]),
        shared=rng.random() < 0.2,
        legs=_legs(rng, problem.units * 2 // 3),
    )


def _legs(rng: random.Random, units: int) -> tuple[Leg, ...]:
    kinds = []
    for _ in range(rng.choice([1, 2, 2])):
        left = {k: w for k, w in KINDS.items() if k != REMOVED or REMOVED not in kinds}
        kinds.append(rng.choices(list(left), list(left.values()))[0])
    legs: list[Leg] = []
    strikes: list[Strike] = []
    before = None
    for kind in kinds:
        strikes.append(Strike(kind, rng.choice(["start", "start", "done"]), rng.randint(1, units)))
        if kind == COORDINATOR:
            legs.append(_leg(before, strikes))
            strikes = []
            before = rng.choice([None, ADDED, *([] if REMOVED in kinds else [REMOVED])])
    return (*legs, _leg(before, strikes))


def _leg(before: str | None, strikes: list[Strike]) -> Leg:
    """The faults in order; one that ends the leg comes last."""
    return Leg(before, tuple(sorted(strikes, key=lambda s: (s.kind == COORDINATOR, s.count))))

"""The figures of a cell, from what it reported and what was seen of its processes."""

from __future__ import annotations

import hashlib
from typing import Any

from benchmarks.comparison.watch import Cell
from benchmarks.comparison.workloads import WORKLOADS
from benchmarks.peers import CORES

NEAR = 0.005
"""How far below the plain loop's best accuracy counts as reached."""


def epochs_of(log: list[list[Any]]) -> list[tuple[float, int, int, float]]:
    """Return time, trial, epoch and accuracy of every reported epoch."""
    return [(line[0], line[2], line[3], line[5]) for line in log if line[1] == "epoch"]


def span(log: list[list[Any]]) -> tuple[float, float] | None:
    """Return when the first epoch began and when the last one ended."""
    for line in log:
        if line[1] == "span":
            return line[2], line[3]
    begins = [line[0] for line in log if line[1] == "begin"]
    ends = [line[0] for line in epochs_of(log)]
    return (min(begins), max(ends)) if begins and ends else None


def seconds_by_trial(log: list[list[Any]]) -> dict[int, float]:
    """Return how long each trial trained, in a cell that trains one at a time."""
    begins = {(line[2], line[3]): line[0] for line in log if line[1] == "begin"}
    found: dict[int, float] = {}
    for end, trial, epoch, _ in epochs_of(log):
        found[trial] = found.get(trial, 0.0) + end - begins[trial, epoch]
    return found


def bound(loop: Cell) -> float:
    """Return the least makespan on the cores, by the plain loop's times: the longest trial, or the
    work of all divided by the cores."""
    seconds = seconds_by_trial(loop.log)
    return max(sum(seconds.values()) / CORES, max(seconds.values()))


def bits(log: list[list[Any]]) -> str | None:
    """Return one hash of all trained weights."""
    finals = {line[2]: line[3] for line in log if line[1] == "final"}
    if not finals:
        return None
    return hashlib.sha256(repr(sorted(finals.items())).encode()).hexdigest()[:12]


def figures(cell: Cell, loop: Cell | None, size: str) -> dict[str, Any]:
    """Return a cell's figures: seconds, bytes and shares; None where there is no figure."""
    workload = WORKLOADS[cell.workload]
    epochs = epochs_of(cell.log)
    finals = {line[2] for line in cell.log if line[1] == "final"}
    moved = sum(line[2] for line in cell.log if line[1] == "moved")
    made: dict[str, Any] = {
        "rival": cell.rival,
        "workload": cell.workload,
        "round": cell.round,
        "kill": cell.kill,
        "why": cell.why,
        "seconds": round(cell.seconds, 2),
        "cpu": round(cell.cpu, 1),
        "peak": cell.peak,
        "read": cell.read,
        "loopback": cell.loopback,
        "moved": moved,
        "lost": sum(line[1] == "lost" for line in cell.log),
        "trials": len(finals),
        "of": len(workload.configs),
        "epochs": len(epochs),
        "epochs_of": len(workload.configs) * workload.epochs[size],
        "bits": bits(cell.log) if len(finals) == len(workload.configs) else None,
    }
    made["whole"] = not cell.why and made["trials"] == made["of"]
    if epochs:
        made["first"] = round(epochs[0][0] - cell.began, 2)
        made["best"] = round(max(each[3] for each in epochs), 4)
        made["curve"] = curve(epochs, cell.began)
    times = span(cell.log)
    if times and made["whole"]:
        made["makespan"] = round(times[1] - times[0], 3)
    if loop and epochs_of(loop.log):
        if "makespan" in made:
            made["ratio"] = round(made["makespan"] / bound(loop), 3)
        goal = max(each[3] for each in epochs_of(loop.log)) - NEAR
        reached = [each[0] for each in epochs if each[3] >= goal]
        made["reached"] = round(min(reached) - cell.began, 2) if reached else None
    return made


def curve(epochs: list[tuple[float, int, int, float]], began: float) -> list[list[float]]:
    """Return when the best accuracy so far rose, and to what."""
    best, points = -1.0, []
    for time, _, _, accuracy in epochs:
        if accuracy > best:
            best = accuracy
            points.append([round(time - began, 2), round(accuracy, 4)])
    return points

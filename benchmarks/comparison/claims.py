"""The page in short: sentences whose figures are written from the record."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.comparison.formats import megabytes, number
from benchmarks.comparison.record import Record, cells, median, values
from benchmarks.comparison.rivals import LOOP, OURS, RECORDED, RIVALS
from benchmarks.comparison.workloads import KILLED, WORKLOADS

POOL, TUNE, ALL_REDUCE = "joblib", "Ray Tune", "DDP"
FEW = {"equal": "16 configurations", "nine": "9", "three": "3"}


def listed(items: Sequence[str]) -> str:
    """Write a list with commas and a last "and"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def ratios(found: Record, rival: str) -> list[float]:
    """Return a rival's makespans over the bound for 16, 9 and 3 configurations."""
    known = [median(found, rival, workload, "ratio") for workload in FEW]
    return [ratio for ratio in known if ratio is not None]


def makespan(found: Record) -> str:
    """How well two workers are used, by a few trials and by many."""
    ours, recorded, pool = (ratios(found, name) for name in (OURS, RECORDED, POOL))
    if not len(ours) == len(recorded) == len(pool) == len(FEW):
        return ""
    each = [f"{number(r)} for {what}" for r, what in zip(ours, FEW.values(), strict=True)]
    return (
        f"Makespan over the least time that two workers need for the same steps of a plain PyTorch "
        f"loop: {listed(each)}; {listed([number(r) for r in recorded])} with `graph=True`; "
        f"{listed([number(r) for r in pool])} with joblib, one trial per worker."
    )


def moved(found: Record) -> str:
    """What is held in memory and moved."""
    held = [median(found, name, "equal", "peak") for name in (OURS, TUNE)]
    between = [
        median(found, OURS, "equal", "moved"),
        median(found, ALL_REDUCE, "equal", "loopback"),
    ]
    if None in held or None in between:
        return ""
    return (
        f"16 configurations on two workers: {megabytes(held[0])} MB for all processes "
        f"(Ray Tune: {megabytes(held[1])}); {megabytes(between[0])} MB of states move "
        f"(gradients in PyTorch's DDP: {megabytes(between[1])})."
    )


def unharmed(found: Record, rival: str) -> tuple[int, int]:
    """Return how many searches with a killed worker gave the same bits, and of how many."""
    undisturbed = [cell["bits"] for cell in cells(found, rival, KILLED) if cell["bits"]]
    disturbed = cells(found, rival, KILLED, kill=True)
    same = sum(c["trials"] == c["of"] and c["bits"] in undisturbed for c in disturbed)
    return same, len(disturbed)


def killed(found: Record) -> str:
    """What a `kill -9` of a worker leaves."""
    same, tried = unharmed(found, OURS)
    if not tried:
        return ""
    others = [unharmed(found, name) for name in RIVALS if not name.startswith((OURS, LOOP))]
    others = [pair for pair in others if pair[1]]
    always = sum(theirs == of for theirs, of in others)
    sometimes = sum(0 < theirs < of for theirs, of in others)
    return (
        f"After a `kill -9` of a worker, all configurations still end with the undisturbed "
        f"search's states in {same} of {tried} searches; of {len(others)} other ways to train "
        f"them, {always} do this each time{f', and {sometimes} sometimes' if sometimes else ''}."
    )


def factors(found: Record, figure: str) -> list[float]:
    """Return Ray Tune's figure over Cerebro's for each workload in which both have one."""
    pairs = [[median(found, name, each, figure) for name in (TUNE, OURS)] for each in WORKLOADS]
    return [theirs / ours for theirs, ours in pairs if theirs and ours]


def between(values: Sequence[float]) -> str:
    """Write a range."""
    return f"{number(min(values), 2)} to {number(max(values), 2)}"


def tune(found: Record) -> str:
    """The same searches with Ray Tune."""
    figures = ("ratio", "seconds", "peak")
    makespans, totals, memory = (factors(found, figure) for figure in figures)
    if not makespans:
        return ""
    return (
        f"Over {len(makespans)} workloads, Ray Tune takes {between(makespans)} times as long to "
        f"train, {between(totals)} times with its start-up, and {between(memory)} times the memory."
    )


CLAIMS = {
    "All cores, few trials or many": makespan,
    "One copy of the data": moved,
    "Crash-safe": killed,
    "Ray Tune": tune,
}


def in_short(found: Record) -> str:
    """Return a line for each claim; the record of less than a full run gives none."""
    if found["size"] != "full" or found["note"] or not values(found, OURS, "equal", "ratio"):
        return "Only a full run is summed up here."
    lines = [(name, claim(found)) for name, claim in CLAIMS.items()]
    return "\n".join(f"- **{name}.** {text}" for name, text in lines if text)

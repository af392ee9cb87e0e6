"""README's figures: each sentence with a number is written from the record.

A sentence stands between ``<!-- measured:NAME -->`` and ``<!-- /measured -->``, where NAME is one
of `CLAIMS`. A record that is not of a full run gives no sentences.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence

from benchmarks.comparison.formats import megabytes, number
from benchmarks.comparison.record import Record, cells, median, values
from benchmarks.comparison.rivals import LOOP, OURS, RIVALS

ORDINARY = f"{OURS}, ordinary steps"
POOL, TUNE, ALL_REDUCE = "joblib", "Ray Tune", "DDP"
FEW = {"equal": "16 configurations", "nine": "9", "three": "3"}
MARK = re.compile(r"<!-- measured:(\w+) -->.*?<!-- /measured -->", re.DOTALL)
WIDTH = 114


def listed(items: Sequence[str]) -> str:
    """Write a list with commas and a last "and"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def ratios(found: Record, rival: str) -> list[float]:
    """Return a rival's makespans over the bound for 16, 9 and 3 configurations."""
    known = [median(found, rival, workload, "ratio") for workload in FEW]
    return [ratio for ratio in known if ratio is not None]


def makespan(found: Record) -> str:
    """How well two workers are used, by a few trials and by many."""
    ours, ordinary, pool = (ratios(found, name) for name in (OURS, ORDINARY, POOL))
    if not len(ours) == len(ordinary) == len(pool) == len(FEW):
        return ""
    each = [f"{number(r)} for {what}" for r, what in zip(ours, FEW.values(), strict=True)]
    return (
        f"Makespan over the least time that two workers need for the same steps of a plain PyTorch "
        f"loop: {listed(each)}; {listed([number(r) for r in ordinary])} without recorded steps; "
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


def killed(found: Record) -> str:
    """What a `kill -9` of a worker leaves."""
    for cell in cells(found, OURS, "equal", kill=True):
        undisturbed = [each["bits"] for each in cells(found, OURS, "equal") if each["bits"]]
        before = median(found, OURS, "equal", "seconds")
        whole = cell["trials"] == cell["of"]
        if not whole or cell["bits"] not in undisturbed or before is None:
            return ""
        return (
            f"After a `kill -9` of a worker all {cell['of']} configurations end with the states of "
            f"the undisturbed search; {of_rivals(found)}."
        )
    return ""


def of_rivals(found: Record) -> str:
    """How many rivals trained everything, to the same bits, although a worker was killed."""
    same = tried = 0
    for name in RIVALS:
        for cell in [] if name.startswith((OURS, LOOP)) else cells(found, name, "equal", kill=True):
            tried += 1
            undisturbed = [each["bits"] for each in cells(found, name, "equal") if each["bits"]]
            same += cell["trials"] == cell["of"] and cell["bits"] in undisturbed
    return f"so do {same} of {tried} other ways to train them"


def tune(found: Record) -> str:
    """The same search with Ray Tune."""
    both = [[median(found, name, "equal", f) for name in (TUNE, OURS)] for f in ("seconds", "peak")]
    if any(None in pair for pair in both):
        return ""
    seconds, memory = (pair[0] / pair[1] for pair in both if pair[0] and pair[1])
    return (
        f"16 configurations take Ray Tune {number(seconds, 2)} times as long, from the start of "
        f"the program, and {number(memory, 2)} times the memory."
    )


CLAIMS: dict[str, Callable[[Record], str]] = {
    "makespan": makespan,
    "moved": moved,
    "killed": killed,
    "tune": tune,
}


def claim(name: str, found: Record) -> str:
    """Return a sentence of README with its figures; empty unless the record is a full run's."""
    if found["size"] != "full" or found["note"] or not values(found, OURS, "equal", "ratio"):
        return ""
    text = CLAIMS[name](found)
    return f"*Measured:* {text}" if text else ""


def with_claims(readme: str, found: Record) -> str:
    """Return README with the sentences that the record gives."""

    def written(match: re.Match[str]) -> str:
        text = claim(match[1], found)
        lines = textwrap.fill(text, WIDTH, initial_indent="\n  ", subsequent_indent="  ",
                              break_long_words=False, break_on_hyphens=False)  # fmt: skip
        return f"<!-- measured:{match[1]} -->{lines}{' ' if text else ''}<!-- /measured -->"

    return MARK.sub(written, readme)

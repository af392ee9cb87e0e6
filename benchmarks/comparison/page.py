"""Writes `docs/comparison.md`, its pictures and README's chart from the record.

`page.md` beside this file is the text; a name in double braces stands for a table or a figure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.comparison.claims import in_short, listed, unharmed
from benchmarks.comparison.formats import NONE, megabytes, number, spread, table
from benchmarks.comparison.record import Record, cells, median, values
from benchmarks.comparison.rivals import LOOP, OURS, RECORDED, RIVALS
from benchmarks.comparison.workloads import KILLED, WORKLOADS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "comparison.md"
TEMPLATE = Path(__file__).parent / "page.md"
WHAT = {
    "equal": "16 equal",
    "uneven": "16 uneven",
    "three": "3",
    "nine": "9",
    "clicks": "clicks",
    "pictures": "images",
    "text": "text",
    "large": "larger than memory",
}
NAME_OF_CELL = re.compile(r"(.+), (\w+), round (\d+)(, a worker killed)?")
CLEAR = 1.05
"""A rival is ahead if its median is better by this factor."""


def present(found: Record) -> list[str]:
    """Return the rivals that ran."""
    return [name for name in RIVALS if any(cell["rival"] == name for cell in found["cells"])]


def moved_bytes(found: Record, rival: str, workload: str) -> float | None:
    """Return the bytes that went between processes: over the loopback, and as states."""
    both = [median(found, rival, workload, figure) for figure in ("moved", "loopback")]
    known = [each for each in both if each is not None]
    return max(known) if known else None


def same_bits(found: Record, rival: str, workload: str) -> str:
    """Say whether the rounds gave the same weights."""
    bits = [cell["bits"] for cell in cells(found, rival, workload) if cell["bits"]]
    if len(bits) < 2:
        return "one round"
    return "yes" if len(set(bits)) == 1 else "no"


def equal_table(found: Record) -> str:
    """All measures on 16 equal configurations."""
    rows = []
    for name in present(found):

        def of(figure: str, name: str = name) -> list[float]:
            return values(found, name, "equal", figure)

        reached = [value for value in of("reached") if value]
        rows.append([
            name,
            spread(of("ratio")),
            spread(of("seconds")),
            spread(of("first")),
            spread(reached) if reached else "not reached" if of("best") else NONE,
            spread(of("best")),
            spread(of("cpu")),
            spread(of("peak"), megabytes),
            megabytes(moved_bytes(found, name, "equal")),
            same_bits(found, name, "equal"),
        ])  # fmt: skip
    head = ["", "makespan / bound", "total, s", "first result, s", "to the accuracy, s",
            "best accuracy", "CPU, s", "memory, MB", "moved, MB", "same bits"]  # fmt: skip
    return table(head, rows)


def all_table(found: Record, figure: str, write: Callable[[float], str] = number) -> str:
    """One figure on every workload, or why it is missing."""
    rows = []
    for name in present(found):
        row = [name]
        for workload in WHAT:
            known = values(found, name, workload, figure)
            row.append(spread(known, write) if known else why(found, name, workload))
        rows.append(row)
    return table(["", *WHAT.values()], rows)


def why(found: Record, rival: str, workload: str) -> str:
    """Say why a rival has no figure on a workload."""
    known = cells(found, rival, workload)
    for cell in known:
        if not cell["whole"]:
            trained = f"{cell['trials']} of {cell['of']} trained"
            return (cell["why"].partition(":")[0] or trained) if cell["why"] else trained
    return "no bound" if known else "not run"


def accuracy_table(found: Record) -> str:
    """The best accuracies, and how far one may be off by its validation rows alone."""
    halves = ["half of the 95 % interval"]
    for workload in WHAT:
        best = median(found, LOOP, workload, "best") or median(found, OURS, workload, "best")
        labels = WORKLOADS[workload].labels_of(found["size"])
        # By this formula, the interval of a perfect score would have the width 0.
        half = 1.96 * math.sqrt(best * (1 - best) / labels) if best and best < 1 else None
        halves.append(number(half, 2))
    return f"{all_table(found, 'best')}\n| {' | '.join(halves)} |"


def killed_table(found: Record) -> str:
    """What a `kill -9` of one worker leaves."""
    rows = []
    for name in present(found):
        known = cells(found, name, KILLED, kill=True)
        if not known:
            continue
        before = median(found, name, KILLED, "seconds")
        whole = [cell for cell in known if cell["trials"] == cell["of"]]
        again = [max(0, cell["epochs"] - cell["epochs_of"]) for cell in whole]
        more = [cell["seconds"] - before for cell in whole] if before else []
        rows.append([
            name,
            f"{len(whole)} of {len(known)}",
            spread([cell["trials"] for cell in known]),
            f"{unharmed(found, name)[0]} of {len(known)}",
            listed(sorted({how_it_ended(cell) for cell in known})),
            spread(again),
            spread(more, "{:+.1f}".format),
        ])  # fmt: skip
    head = ["", "all configurations trained", "configurations trained", "same bits as undisturbed",
            "the search", "epochs again", "seconds more"]  # fmt: skip
    return table(head, rows)


def how_it_ended(cell: dict[str, Any]) -> str:
    """Say how a search with a killed worker ended."""
    if cell["why"].startswith("over"):
        return "hangs"
    return "ends with an error" if cell["why"] else "ends by itself"


def large_table(found: Record) -> str:
    """Data larger than the memory."""
    rows = []
    for name in present(found):
        for cell in cells(found, name, "large")[:1]:
            rows.append([
                name,
                number(cell["seconds"]) if cell["whole"] else why(found, name, "large"),
                megabytes(cell["peak"]),
                megabytes(cell["read"]),
            ])  # fmt: skip
    return table(["", "total, s", "memory, MB", "read from disk, MB"], rows)


def papers_table(found: Record) -> str:
    """The papers' case and more workers, simulated."""
    rows = []
    for case in found["papers"]:
        for name, hours in case["hours"].items():
            same_as = "MOP" if name == OURS else name
            rows.append([
                str(case["configs"]),
                str(case["workers"]),
                str(case["epochs"]),
                name if name != "MOP" else "MOP, random order",
                f"{hours:.2f}",
                f"{hours / case['bound']:.3f}",
                f"{100 * case['idle'][name]:.1f}",
                number(case["network"][same_as], 4),
            ])  # fmt: skip
    head = ["configurations", "workers", "epochs", "", "hours", "/ bound", "idle, %",
            "moved, GB"]  # fmt: skip
    return table(head, rows)


def published_table(found: Record) -> str:
    """The figures as the paper gives them, and the network by its formula."""
    from benchmarks.comparison.papers import PUBLISHED

    moved = found["papers"][0]["network"]
    rows = [
        [name, f"{hours:.2f}", f"{use:.1f}", f"{stored:,}", number(moved[name], 4)]
        for name, (hours, use, stored) in PUBLISHED.items()
    ]
    head = ["", "hours of an epoch", "GPU use, %", "stored, GB", "moved in 10 epochs, GB"]
    return table(head, rows)


BETTER = {
    "ratio": ("makespan", "min"),
    "seconds": ("total time", "min"),
    "first": ("first result", "min"),
    "reached": ("time to the accuracy", "min"),
    "cpu": ("CPU time", "min"),
    "peak": ("memory", "min"),
}


def losses(found: Record) -> str:
    """List where a rival, other than the plain loop and Cerebro's other cell, is clearly ahead."""
    if not found["cells"]:
        return "No run is recorded yet. Cerebro is expected to be behind on the measures below."
    lines = []
    for figure, (what, _) in BETTER.items():
        ahead = []
        for workload, named in WHAT.items():
            ours = median(found, OURS, workload, figure)
            if not ours:
                continue
            best: tuple[float, str] | None = None
            for name in present(found):
                theirs = median(found, name, workload, figure)
                if name.startswith((OURS, LOOP)) or not theirs or theirs * CLEAR > ours:
                    continue
                best = min(best or (theirs, name), (theirs, name))
            if best:
                ahead.append(f"{named}: {best[1]}, {best[0] / ours:.2f} of Cerebro's")
        if ahead:
            lines.append(f"- **{what[0].upper() + what[1:]}.** {'; '.join(ahead)}.")
    lines += slower_recorded(found)
    return "\n".join(lines) or "- No rival was ahead by 5 % or more in a median."


def slower_recorded(found: Record) -> list[str]:
    """List where whole recorded steps are clearly slower than Cerebro's default."""
    slower = []
    for workload, named in WHAT.items():
        default, recorded = (median(found, name, workload, "ratio") for name in (OURS, RECORDED))
        if default and recorded and recorded > CLEAR * default:
            slower.append(f"{named}: {recorded / default:.2f} of the default's")
    return [f"- **Makespan with `graph=True`.** {'; '.join(slower)}."] if slower else []


def header(found: Record) -> str:
    """Say when and where the record was made."""
    if not found["cells"]:
        return "**No run is recorded yet: the tables are empty, except for the simulated ones.**"
    rounds = 1 + max((cell["round"] for cell in found["cells"]), default=0)
    kinds = {"full": "A full run", "quick": "A `--quick` run: small data", "tiny": "A `--tiny` run"}
    versions = ", ".join(
        f"{name} {version}" for name, version in found["versions"].items() if version
    )
    lines = [
        f"{kinds[found['size']]}, {found['date']}, {found['minutes']:g} minutes, up to {rounds} "
        f"round(s) of a cell; {found['machine']}, {found['cores']} cores, "
        f"{found['memory'] / 2**30:.0f} GiB; Python {found['python']}, {versions}. Load of the "
        f"machine when it began: {found['load']:g}."
    ]
    if found["note"]:
        lines.append(f"**{found['note']}**")
    if found.get("remark"):  # unlike a note, it does not make the figures unfit for the summary
        lines.append(found["remark"])
    return "\n\n".join(lines)


def absent(found: Record) -> str:
    """Name the systems that did not run, and cells that the time did not allow."""
    lines = [f"- {name}: {why}." for name, why in found["absent"].items()]
    if found["left"]:
        lines.append(f"- No time was left for {left_out(found)}.")
    return "\n".join(lines)


def left_out(found: Record) -> str:
    """Sum up the cells that did not run: whole rounds by their workloads, then single systems."""
    begun = {(cell["workload"], cell["round"], cell["kill"]) for cell in found["cells"]}
    rounds: dict[str, list[str]] = {}
    single = []
    for name in found["left"]:
        rival, workload, number, killed = NAME_OF_CELL.findall(name)[0]
        if (workload, int(number) - 1, bool(killed)) in begun:
            single.append(f"{rival} on {WHAT[workload]} in round {number}{killed}")
            continue
        workloads = rounds.setdefault(f"round {number}{killed}", [])
        if WHAT[workload] not in workloads:
            workloads.append(WHAT[workload])
    whole = [f"{number} ({', '.join(workloads)})" for number, workloads in rounds.items()]
    return "; ".join([*whole, *single])


def settings(found: Record) -> str:
    """Say how each rival is set up."""
    return table(
        ["", "settings", "code"],
        [[name, r.settings, f"`{r.module}.py`"] for name, r in RIVALS.items()],
    )


PARTS: dict[str, Callable[[Record], str]] = {
    "header": header,
    "settings": settings,
    "equal": equal_table,
    "makespans": lambda found: all_table(found, "ratio"),
    "totals": lambda found: all_table(found, "seconds"),
    "accuracies": accuracy_table,
    "memories": lambda found: all_table(found, "peak", megabytes),
    "killed": killed_table,
    "large": large_table,
    "published": published_table,
    "papers": papers_table,
    "losses": losses,
    "short": in_short,
    "absent": absent,
}


def page(found: Record) -> str:
    """Return the page."""
    template = TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: PARTS[match[1]](found), template)


def write(found: Record) -> None:
    """Write the page, its pictures and README's chart."""
    from benchmarks.comparison import pictures

    PAGE.write_text(page(found), encoding="utf-8")
    pictures.write(found, PAGE.parent / "comparison")

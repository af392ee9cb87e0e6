"""``python -m benchmarks.accuracy``: do Cerebro's orders of rows cost accuracy?

The reference is PyTorch's DataLoader with ``shuffle=True``. For each seed, every order trains the
same network from the same weights on the same rows, and the figure is the mean difference of the
validation accuracy, in points. Seeds are drawn until its 95% interval is narrow enough. Intervals
are not adjusted for the number of rows of the table. It takes about 15 minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy.paired import FEWEST, WIDTH, Paired
from benchmarks.accuracy.tasks import TASKS, Rows, Task
from benchmarks.accuracy.training import (
    Reference,
    check_reference,
    prove,
    through_cerebro,
    train,
)

EPOCHS = 4
QUICK_ROWS = 1_024
MOST = 128  # seeds
HEAD = """
| Task | Order | DataLoader's accuracy | Difference, points | Seeds | Bar | Within the bar? |
|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Order:
    """One of Cerebro's orders of rows, the shards that it is measured with, and its bar."""

    shards: int
    bar: float


ORDERS = {"rows": Order(8, 0.3), "shards": Order(32, 0.5)}


def measure(task: Task, rows: Rows, seeds: int | None) -> dict[str, Paired]:
    """Train a task over seeds in every order; `seeds` None: until the intervals are narrow."""
    found = {name: Paired(order.bar) for name, order in ORDERS.items()}
    for seed in range(seeds or MOST):
        missing = [
            name for name, pairs in found.items() if seeds is not None or not pairs.is_decided()
        ]
        if not missing:
            break
        reference = train(task, rows, seed, EPOCHS, Reference(rows, task.batch, seed))[1]
        for name in missing:
            shards = ORDERS[name].shards
            scores = through_cerebro(task, rows, seed, EPOCHS, order=name, shards=shards)
            found[name].add(scores, reference)
    return found


def check(task: Task, rows: Rows) -> None:
    """Exit unless the reference is PyTorch's and the loop trains what a search trains."""
    check_reference(rows, task.batch)
    for name, order in ORDERS.items():
        prove(task, rows, EPOCHS, order=name, shards=order.shards)


def line(task: str, order: str, pairs: Paired) -> str:
    """Return a row of the table."""
    cells = (
        f"{task}: {TASKS[task].what}",
        order,
        f"{pairs.accuracy:.2f}",
        f"{pairs.mean:+.2f} ± {pairs.interval:.2f}",
        f"{len(pairs.order)}",
        f"±{pairs.bar}",
        pairs.verdict(),
    )
    return f"| {' | '.join(cells)} |"


def record(task: str, order: str, pairs: Paired) -> dict[str, Any]:
    """Return the figures of a row as JSON."""
    return {
        "task": task,
        "what": TASKS[task].what,
        "order": order,
        "shards": ORDERS[order].shards,
        "batch": TASKS[task].batch,
        "accuracy": pairs.accuracy,
        "difference": pairs.mean,
        "interval": pairs.interval,
        "seeds": len(pairs.order),
        "bar": pairs.bar,
        "within": pairs.verdict(),
        "epochs": [{"difference": mean, "interval": half} for mean, half in pairs.by_epoch],
        "differences": pairs.differences,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.accuracy",
        description="Compare the accuracy of Cerebro's orders of rows with a DataLoader's.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few rows and two seeds, to see that it runs"
    )
    parser.add_argument("--only", choices=TASKS, action="append", help="measure this task")
    parser.add_argument(
        "--seeds",
        type=int,
        help=f"seeds to draw; default: {FEWEST} to {MOST}, until the interval is below ±{WIDTH}",
    )
    parser.add_argument("--record", metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    if options.seeds is not None and options.seeds < 2:
        parser.error("--seeds: an interval needs at least 2")
    torch.set_num_threads(1)
    seeds = options.seeds or (2 if options.quick else None)
    lines: list[dict[str, Any]] = []
    wide: list[str] = []
    print(
        f"Accuracy: mean over the last two of {EPOCHS} epochs, 95% intervals of paired means, "
        + (f"{seeds} seeds" if seeds else f"{FEWEST} to {MOST} seeds, until below ±{WIDTH}")
        + HEAD,
        flush=True,
    )
    began = time.monotonic()
    for name in options.only or TASKS:
        task = TASKS[name]
        rows = task.rows()
        if options.quick:
            rows = rows.few(QUICK_ROWS)
        check(task, rows)
        for order, pairs in measure(task, rows, seeds).items():
            print(line(name, order, pairs), flush=True)
            lines.append(record(name, order, pairs))
            if seeds is None and not pairs.is_decided():
                wide.append(f"{name}, {order}")
    print(
        "\nThe reference equals DataLoader(shuffle=True), and searches trained the loop's states, "
        f"bit for bit. {time.monotonic() - began:.0f} s."
    )
    if wide:
        print(f"Still wider than ±{WIDTH} after {MOST} seeds: {'; '.join(wide)}.")
    if options.record:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        made = {**versions, "epochs": EPOCHS, "quick": options.quick, "results": lines}
        Path(options.record).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if options.quick:
        print("So few rows and seeds decide nothing about the bars.")
        return 0
    return 1 if any(entry["within"] == "no" for entry in lines) else 0


if __name__ == "__main__":
    sys.exit(main())

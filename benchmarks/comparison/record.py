"""The record of a run: a JSON file in the tree, from which the page and its claims are made."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "record.json"
PACKAGES = ("torch", "numpy", "ray", "optuna", "joblib", "dask", "distributed", "dask-ml",
            "hyperopt", "pyspark")  # fmt: skip
Record = dict[str, Any]


def processor() -> str:
    """Return the processor's name."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def header(size: str, note: str) -> Record:
    """Return when and on what machine a run begins, and how busy that is."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    now = time.time()
    return {
        "size": size,
        "note": note,
        "time": round(now),
        "date": time.strftime("%Y-%m-%d", time.gmtime(now)),
        "machine": processor(),
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
        "versions": versions,
    }


def save(found: Record, path: Path) -> None:
    """Write a record, one cell a line."""
    cells = [json.dumps(cell) for cell in found["cells"]]
    rest = {name: value for name, value in found.items() if name != "cells"}
    text = (
        json.dumps(rest, indent=1)[:-2] + ',\n "cells": [\n  ' + ",\n  ".join(cells) + "\n ]\n}\n"
    )
    path.write_text(text, encoding="utf-8")


def load(path: Path = PATH) -> Record:
    """Read a record."""
    found: Record = json.loads(path.read_text(encoding="utf-8"))
    return found


def cells(found: Record, rival: str, workload: str, *, kill: bool = False) -> list[dict[str, Any]]:
    """Return a rival's cells on a workload, by round."""
    return [
        cell
        for cell in found["cells"]
        if (cell["rival"], cell["workload"], cell["kill"]) == (rival, workload, kill)
    ]


def values(found: Record, rival: str, workload: str, figure: str) -> list[float]:
    """Return a figure of every whole round."""
    chosen = [cell for cell in cells(found, rival, workload) if cell["whole"]]
    return [cell[figure] for cell in chosen if cell.get(figure) is not None]


def median(found: Record, rival: str, workload: str, figure: str) -> float | None:
    """Return the median of a figure over the rounds, or None."""
    known = values(found, rival, workload, figure)
    return statistics.median(known) if known else None

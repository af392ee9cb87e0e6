"""Golden schedules: tests/golden/schedule-*.json say which unit runs where and when.

A change of the scheduler that changes one is to be seen and meant. To write
them anew: python tests/sim/test_golden_schedules.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from simulation import simulate

GOLDEN = Path(__file__).parent.parent / "golden"

# No noise, and costs that are sums of powers of two: the times are exact.
SEARCHES: dict[str, dict[str, Any]] = {
    "shared": {"costs": [1, 1, 1, 1, 1], "workers": 2, "shards": 3, "epochs": 2},
    "one-worker": {"costs": [1, 2, 0.5], "workers": 1, "shards": 2, "epochs": 2, "eval_cost": 0.5},
    "costs": {"costs": [1, 4, 1, 2, 8, 1, 1, 2], "workers": 3, "shards": 4, "epochs": 2},
    "validation": {"costs": [1, 1, 2], "workers": 2, "shards": 2, "epochs": 3, "eval_cost": 0.5},
    "weights": {"costs": [1, 1.5], "workers": 2, "shards": [4, 2, 1], "epochs": 2},
    "exclusive": {
        "costs": [1, 1, 2, 1, 1, 4],
        "workers": 3,
        "shards": 6,
        "epochs": 1,
        "exclusive": True,
        "eval_cost": 1,
    },
    "two-open": {
        "costs": [1, 2, 1, 1, 4],
        "workers": 3,
        "shards": 4,
        "epochs": 2,
        "stagger": False,
        "eval_cost": 0.5,
    },
    "one-leaves": {
        "costs": [1, 1, 1, 1],
        "workers": 2,
        "shards": 4,
        "epochs": 1,
        "exclusive": True,
        "leaves": [(2.5, 0)],
        "joins": [6.0],
    },
    "failures": {"costs": [1, 2, 1], "workers": 2, "shards": 3, "epochs": 2, "failures": 0.25},
}


def schedule_of(arguments: dict[str, Any]) -> list[list[Any]]:
    """Return (trial, epoch, step, shard, worker, attempt, start, end, outcome) of each unit."""
    return [
        [u.trial, u.epoch, u.step, u.shard, u.worker, u.attempt, u.start, u.end, u.outcome]
        for u in simulate(**arguments).units
    ]


def write(name: str, arguments: dict[str, Any]) -> None:
    lines = ",\n    ".join(json.dumps(unit) for unit in schedule_of(arguments))
    text = f'{{\n  "arguments": {json.dumps(arguments)},\n  "units": [\n    {lines}\n  ]\n}}\n'
    (GOLDEN / f"schedule-{name}.json").write_text(text)


@pytest.mark.parametrize("name", SEARCHES)
def test_schedule_is_the_golden_one(name: str) -> None:
    golden = json.loads((GOLDEN / f"schedule-{name}.json").read_text())
    assert golden["arguments"] == json.loads(json.dumps(SEARCHES[name]))
    assert schedule_of(SEARCHES[name]) == golden["units"]


if __name__ == "__main__":
    for search_name, search_arguments in SEARCHES.items():
        write(search_name, search_arguments)

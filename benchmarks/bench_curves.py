"""Which searcher? Searches over stored learning curves: ``python -m benchmarks.bench_curves``.

Six tables of real curves (`benchmarks/curves`): 100 or 64 configurations, 27 epochs. Each searcher
runs through `cerebro.testing.drive` with 8 live trials, until 400 epochs have been trained. In each
run all searchers meet the same configurations in the same order, so differences are paired.

Regret after a number of epochs: (test error at the best validation epoch so far - the table's
best) / (the table's median - its best), at most 1. The figure is its mean over the 400 epochs
("area"; 0 is perfect). A note has a 95 % interval, from resampling the runs of each table, the
regret at shares of the budget, and the paired difference to ASHA(3). The same call prints the same.

TPE is left out: it would have to choose among 100 given configurations, which understates it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Bench, parser
from cerebro.searchers import ASHA, Hyperband, MedianStopping, Searcher, SuccessiveHalving
from cerebro.testing import drive

FOLDER = Path(__file__).parent / "curves"
TABLES = ("digits", "diamonds", "flights", "source", "chars", "convnets")
BUDGET, LIVE = 400, 8
SHARES = (10, 20, 30, 50, 100)
REFERENCE = "ASHA(3)"

# The searcher, and how many trials it begins at most. Random search is the median rule that never
# stops a trial, so that it has as many live trials as the others.
SEARCHERS: dict[str, tuple[Callable[[], Searcher], int]] = {
    REFERENCE: (lambda: ASHA(reduction_factor=3), 100),
    "ASHA(2)": (lambda: ASHA(reduction_factor=2), 100),
    "ASHA(4)": (lambda: ASHA(reduction_factor=4), 100),
    "Hyperband(3)": (lambda: Hyperband(reduction_factor=3), 100),
    "successive halving(3), 81 trials": (lambda: SuccessiveHalving(reduction_factor=3), 81),
    "median": (MedianStopping, 100),
    "random": (lambda: MedianStopping(grace_epochs=100), 100),
}


class Spent(Exception):
    """The budget of epochs has been used."""


def load_curves(name: str) -> np.ndarray:
    """Return a table: configurations x epochs x (validation error, test error).

    Where a configuration has diverged, both are infinite.
    """
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        errors = file["curves"][:, :, :2].astype(np.float64)
    return np.where(np.isnan(errors).any(axis=2, keepdims=True), np.inf, errors)


def regret_by_epoch(curves: np.ndarray, make: Callable[[], Searcher], n: int, seed: int) -> Any:
    """Run one search; return the regret after each of `BUDGET` epochs."""
    order = np.random.default_rng(seed).permutation(len(curves))
    chosen = curves[np.arange(len(curves)), curves[:, :, 0].argmin(axis=1), 1]
    best, median = chosen.min(), np.median(chosen)
    lowest, error = np.inf, np.inf
    regrets: list[float] = []

    def curve(config: Mapping[str, Any], trial: int, epoch: int) -> float:
        nonlocal lowest, error
        if len(regrets) == BUDGET:
            raise Spent
        value, test = curves[order[trial], epoch]
        if value < lowest:
            lowest, error = value, test
        regrets.append(float(np.clip((error - best) / (median - best), 0.0, 1.0)))
        return float(value)

    n, epochs = min(n, len(curves)), curves.shape[1]
    with contextlib.suppress(Spent):
        drive(make(), curve, epochs=epochs, n_trials=n, width=LIVE, seed=seed, order=seed)
    return np.pad(regrets, (0, BUDGET - len(regrets)), mode="edge")


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return a 95 % interval of the mean of tables x runs; each table's runs are resampled."""
    rng = np.random.default_rng(0)
    tables, runs = values.shape
    picks = rng.integers(runs, size=(2_000, tables, runs))
    means = np.take_along_axis(values[None], picks, axis=2).mean(axis=(1, 2))
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--runs", type=int, default=30, help="runs of each table")
    arguments = made.parse_args()
    runs = 2 if arguments.quick else arguments.runs
    tables = {name: load_curves(name) for name in TABLES}
    bench = Bench("bench_curves: regret on stored learning curves", arguments.json)
    areas: dict[str, np.ndarray] = {}
    for name, (make, n) in SEARCHERS.items():
        found = np.array(
            [
                [regret_by_epoch(curves, make, n, seed) for seed in range(runs)]
                for curves in tables.values()
            ]
        )  # tables x runs x epochs
        areas[name] = found.mean(axis=2)
        area = float(areas[name].mean())
        bench.add(name, area, "area", reference=REFERENCE, ratio=area / areas[REFERENCE].mean())
        at = [f"{s} %: {found[:, :, BUDGET * s // 100 - 1].mean():.3f}" for s in SHARES]
        low, high = interval(areas[name])
        difference = areas[name] - areas[REFERENCE]
        down, up = interval(difference)
        better = int((difference.mean(axis=1) < 0).sum())
        bench.note(
            f"    [{low:.3f}, {high:.3f}]; {', '.join(at)}; "
            f"- {REFERENCE}: {difference.mean():+.3f} [{down:+.3f}, {up:+.3f}], "
            f"better on {better} of {len(TABLES)}"
        )
    bench.report()


if __name__ == "__main__":
    main()

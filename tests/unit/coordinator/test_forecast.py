"""Forecasts beside what really happens, on a simulated clock with the real scheduler."""

from __future__ import annotations

import random
from typing import Any

import pytest

import cerebro._core as _core
from cerebro.coordinator.overview import EpochParts, Forecaster, ToCome
from cerebro.coordinator.trial import LiveTrial
from cerebro.executors.simulated import SimulatedRun, SimulatedUnit
from cerebro.run.records import EpochRecord, TrialRecord

SHARDS, ROWS, EVALUATION = 4, 10.0, 8.0
PARTS = EpochParts(SHARDS, EVALUATION / (SHARDS * ROWS + EVALUATION))


class Run(SimulatedRun):
    """Trials of different cost whose units a forecaster observes."""

    def __init__(self, costs: list[float], epochs: int, workers: int) -> None:
        super().__init__(
            _core.Schedule(shards=[ROWS] * SHARDS, exclusive=False, stagger=True,
                           eval_cost=EVALUATION, live_models=8),
            [ROWS] * SHARDS, EVALUATION,
        )  # fmt: skip
        self.costs = costs
        self.forecaster = Forecaster(PARTS, epochs)
        self.trials = [
            LiveTrial(TrialRecord(n, {}, target_epochs=epochs)) for n in range(len(costs))
        ]
        for _ in range(workers):
            self.join()
        for number in range(len(costs)):
            self.schedule.add_trial(number, epochs=epochs)
            self.epochs[number] = epochs
            self.unfinished.add(number)
        self.seen: list[tuple[float, float | None, float | None]] = []

    def run(self, unit: SimulatedUnit) -> None:
        seconds = (unit.end - unit.start) * self.costs[unit.trial]
        late = SimulatedUnit(*(getattr(unit, n) for n in unit.__slots__[:-1]), unit.start + seconds)
        super().run(late)
        self.forecaster.unit_begins(unit.trial, unit.worker, self.now)

    def end_unit(self, unit: SimulatedUnit) -> None:
        trial = self.trials[unit.trial]
        self.forecaster.unit_ends(unit.worker, self.now, unit.step)
        trial.position += 1
        if unit.step + 1 == PARTS.units:
            trial.record.epochs.append(EpochRecord(unit.epoch, {}, 0.0, "", None))
            if trial.record.done == self.epochs[unit.trial]:
                trial.record.status = "finished"
                self.forecaster.trial_ended(trial)
        super().end_unit(unit)

    def start_units(self) -> None:
        super().start_units()
        left = self.forecaster.forecast(
            self.trials, ToCome(trials=0), self.workers, self.now, self.workers * self.now
        )
        self.seen.append((self.now, left.seconds, left.epochs))


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("trials", [1, 2, 3, 5, 16])
def test_equal_trials_on_several_workers(trials: int, workers: int) -> None:
    run = Run([1.0] * trials, 6, workers)
    end = run.run_to_end().makespan
    known = [(now, left) for now, left, _ in run.seen if left is not None]
    assert len(known) > 0.75 * len(run.seen) - 3 * workers
    for now, left in known:
        assert left == pytest.approx(end - now, rel=0.1, abs=0.05 * end)
    assert run.seen[0][2] == pytest.approx(6 * trials)
    assert run.seen[-1][1:] == (0.0, 0.0)


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_trials_of_different_cost_on_several_workers(workers: int, seed: int) -> None:
    rng = random.Random(seed)
    run = Run([rng.uniform(0.5, 2.0) for _ in range(16)], 6, workers)
    end = run.run_to_end().makespan
    for now, left, _ in run.seen:
        if now > 0.2 * end:
            assert left is not None
            assert (end - now) / 2.5 - 0.05 * end <= left <= (end - now) * 2.5 + 0.05 * end


def test_the_time_passes_within_a_unit() -> None:
    forecaster = Forecaster(EpochParts(1), 10)
    trial = LiveTrial(TrialRecord(0, {}, target_epochs=10))
    for epoch in range(4):
        forecaster.unit_begins(0, 0, 100.0 * epoch)
        forecaster.unit_ends(0, 100.0 * (epoch + 1), 0)
        trial.position += 1
    forecaster.unit_begins(0, 0, 400.0)

    def left(now: float) -> Any:
        return forecaster.forecast([trial], ToCome(trials=0), 1, now, now).seconds

    assert [left(now) for now in (400.0, 430.0, 499.0)] == [600.0, 570.0, 501.0]
    assert left(900.0) == 500.0  # late: at least the units after it are left


def test_first_and_lost_units_of_a_worker_are_not_counted() -> None:
    forecaster = Forecaster(EpochParts(1), 10)
    trial = LiveTrial(TrialRecord(0, {}, target_epochs=10))
    forecaster.unit_begins(0, 0, 0.0)
    forecaster.unit_ends(0, 60.0, 0)  # it imported a library
    forecaster.unit_begins(0, 0, 60.0)
    forecaster.unit_ends(0, 90.0)  # it was lost
    for begin in (90.0, 91.0):
        forecaster.unit_begins(0, 0, begin)
        forecaster.unit_ends(0, begin + 1.0, 0)
    trial.position = 3
    forecaster.unit_ends(7, 92.0)  # a worker that had none
    found = forecaster.forecast([trial], ToCome(trials=0), 1, 92.0, 92.0)
    assert (found.epochs, found.seconds, forecaster.done) == (7.0, 7.0, 3.0)
    forecaster.trial_went_back(3, 2)
    assert forecaster.done == 2.0


def test_positions_are_converted_to_epochs() -> None:
    parts = EpochParts(2, 0.5)
    assert [parts.count_epochs(position) for position in range(5)] == [0.0, 0.25, 0.5, 1.0, 1.25]
    assert parts.units == 3 and EpochParts(2).units == 2


def test_trials_that_are_pruned_train_less() -> None:
    forecaster = Forecaster(EpochParts(1), 10)
    opened = LiveTrial(TrialRecord(9, {}, target_epochs=10))

    def count_left(*trials: LiveTrial) -> Any:
        return forecaster.forecast([opened, *trials], ToCome(trials=4), 1, 0.0, 0.0).epochs

    assert count_left() == 50.0  # nothing is known yet
    for number in range(3):
        trial = LiveTrial(TrialRecord(number, {}, target_epochs=10, status="stopped"))
        trial.record.epochs += [EpochRecord(epoch, {}, 0.0, "", None) for epoch in range(2)]
        forecaster.trial_ended(trial)
    assert count_left() == 50.0 * (1 + 3 * 0.2) / 4
    paused = LiveTrial(TrialRecord(8, {}, target_epochs=4, status="paused"))
    paused.record.epochs += [EpochRecord(epoch, {}, 0.0, "", None) for epoch in range(4)]
    paused.paused_by_searcher = True
    assert count_left(paused) == 50.0 * (1 + 3 * 0.2 + 0.4) / 5
    exact = forecaster.forecast([opened, paused], ToCome(epochs=7.0), 1, 0.0, 0.0)
    assert exact.epochs == 17.0  # the searcher knows


def test_unknown_remaining_trials_give_no_forecast() -> None:
    forecaster = Forecaster(EpochParts(1), 3)
    trial = LiveTrial(TrialRecord(0, {}, target_epochs=3))
    unknown = forecaster.forecast([trial], ToCome(), 1, 1.0, 1.0)
    assert (unknown.epochs, unknown.seconds) == (None, None)
    assert forecaster.forecast([trial], ToCome(epochs=4.0), 1, 1.0, 1.0).epochs == 7.0
    assert forecaster.forecast([trial], ToCome(trials=2.0), 1, 1.0, 1.0).epochs == 9.0

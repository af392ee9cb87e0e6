"""Forecasts beside what really happens, on a simulated clock with the real scheduler."""

from __future__ import annotations

import random
from typing import Any

import pytest

import cerebro._core as _core
from cerebro.coordinator.forecast import (
    FORGET,
    EpochParts,
    Forecaster,
    Paces,
    Pruning,
    ToCome,
)
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
            self.forecaster.epoch_done(trial)
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
            assert left == pytest.approx(end - now, rel=0.5, abs=0.05 * end)


def test_a_single_long_trial_is_not_divided_among_the_workers() -> None:
    run = Run([1.0, 1.0, 10.0], 4, 3)
    end = run.run_to_end().makespan
    for now, left, _ in run.seen:
        if now > 0.2 * end:
            assert left == pytest.approx(end - now, rel=0.02, abs=0.01 * end)


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


def test_a_workers_first_unit_does_not_count_and_lost_units_neither() -> None:
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


def test_a_pace_is_that_of_the_latest_epoch() -> None:
    paces = Paces(EpochParts(2, 0.5))
    assert paces.mean is None and paces.pace_of(0) is None
    for step, seconds in enumerate([1.0, 1.0, 2.0]):
        paces.add(0, step, seconds)
    assert paces.pace_of(0) == 4.0
    for step, seconds in enumerate([4.0, 4.0, 8.0]):
        paces.add(0, step, seconds)
    assert paces.pace_of(0) == 16.0
    paces.add(1, 0, 0.5)  # a quarter of an epoch
    assert paces.pace_of(1) == 2.0 and paces.mean == 9.0
    paces.take_over(2, 6.0)
    assert paces.pace_of(2) == pytest.approx(6.0)
    paces.forget(0)
    assert paces.pace_of(0) is None and paces.mean == pytest.approx(8.0)


def test_positions_are_epochs() -> None:
    parts = EpochParts(2, 0.5)
    assert [parts.count_epochs(position) for position in range(5)] == [0.0, 0.25, 0.5, 1.0, 1.25]
    assert parts.units == 3 and EpochParts(2).units == 2


def test_pruning_follows_the_trials() -> None:
    never = Pruning()
    for epochs in range(3):
        never.note_passed(epochs)
    assert all_of(never, 4) == [4.0, 3.0, 2.0, 1.0, 0.0]
    half = Pruning()
    for _ in range(400):
        half.note_passed(0)
        for epochs in (1, 2, 3):
            half.note_passed(epochs)
        half.note_ended(1)
    # Half of the trials end after one epoch, the others train all four.
    assert half.expect_further(4)[0] == pytest.approx(1 + 0.5 * 3, rel=0.15)
    stricter = Pruning()
    for _ in range(50):
        stricter.note_passed(1)
    before = stricter.expect_further(4)[0]
    for _ in range(20):
        stricter.note_ended(1)
    assert before == 4.0 and stricter.expect_further(4)[0] < 1.5  # lately, all end there
    paused = Pruning()
    paused.note_passed(1)
    paused.note_ended(1)
    paused.note_resumed(1)
    assert all_of(paused, 3) == [3.0, 2.0, 1.0, 0.0]


def all_of(pruning: Pruning, epochs: int) -> list[float]:
    further = pruning.expect_further(epochs)
    return [further[done] for done in range(epochs + 1)]


@pytest.mark.parametrize("seed", range(20))
def test_epochs_without_decisions_are_summed_at_once(seed: int) -> None:
    """As epoch by epoch, from the target back."""
    rng = random.Random(seed)
    pruning, epochs = Pruning(), rng.choice([1, 7, 60])
    ended, decided = [0.0] * (epochs + 9), [0.0] * (epochs + 9)
    for _ in range(rng.choice([0, 1, 5, 40])):
        done, ends = rng.randrange(epochs + 9), rng.random() < 0.3
        (pruning.note_ended if ends else pruning.note_passed)(done)
        ended[done] = FORGET * ended[done] + ends
        decided[done] = FORGET * decided[done] + 1.0
    usual = sum(ended) / max(1.0, sum(decided))
    wanted = [0.0]
    for done in reversed(range(epochs)):
        share = (ended[done] + usual) / (decided[done] + 1.0)
        wanted.insert(0, (1.0 - share) * (1.0 + wanted[0]))
    assert all_of(pruning, epochs) == pytest.approx(wanted, rel=1e-9)


def test_a_target_far_away_costs_nothing() -> None:
    """Users give a large number of epochs and stop early."""
    pruning = Pruning()
    assert pruning.expect_further(10**15)[3] == 10**15 - 3
    for done in range(9):
        pruning.note_passed(done)
    pruning.note_ended(9)
    # A tenth ends after each number of epochs that no trial has reached.
    assert pruning.expect_further(10**15)[10] == pytest.approx(9.0)


def test_what_is_unknown_is_not_guessed() -> None:
    forecaster = Forecaster(EpochParts(1), 3)
    trial = LiveTrial(TrialRecord(0, {}, target_epochs=3))
    unknown = forecaster.forecast([trial], ToCome(), 1, 1.0, 1.0)
    assert (unknown.epochs, unknown.seconds) == (None, None)
    assert forecaster.forecast([trial], ToCome(epochs=4.0), 1, 1.0, 1.0).epochs == 7.0
    assert forecaster.forecast([trial], ToCome(trials=2.0), 1, 1.0, 1.0).epochs == 9.0

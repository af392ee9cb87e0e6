"""The scheduler's state machine through its binding: events in, commands out."""

from __future__ import annotations

import pytest

from cerebro._core import Schedule, visit_order


def run_all(schedule: Schedule, seconds: float = 1.0) -> list[tuple[int, int, int, int, int]]:
    """Runs units of equal length until nothing is left: (worker, trial, epoch, step, shard)."""
    now, running, units = 0.0, {}, []
    while True:
        while (command := schedule.next(now)) is not None:
            if command[0] == "run":
                running[command[1]] = command
                units.append(command[1:6])
        if not running:
            return units
        now += seconds
        for worker in sorted(running):
            trial, epoch, step = schedule.unit_done(worker, now)
            assert (trial, epoch, step) == running.pop(worker)[2:5]


def new(workers: int = 1, **kwargs: object) -> Schedule:
    schedule = Schedule(**kwargs)  # type: ignore[arg-type]
    assert [schedule.add_worker(0.0) for _ in range(workers)] == list(range(workers))
    return schedule


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("exclusive", [False, True])
def test_every_trial_visits_every_shard_in_its_order(workers: int, exclusive: bool) -> None:
    schedule = new(workers, shards=3, exclusive=exclusive)
    for trial in range(4):
        schedule.add_trial(trial, epochs=2)
    units = run_all(schedule)
    for trial in range(4):
        shards = [unit[4] for unit in units if unit[1] == trial]
        assert shards == visit_order(trial, 0, 3) + visit_order(trial, 1, 3)
    assert schedule.finished


def test_validation_follows_the_epochs_training() -> None:
    schedule = new(shards=2, eval_cost=0.5)
    schedule.add_trial(0, epochs=2)
    assert run_all(schedule) == [
        (0, 0, 0, 0, 0),
        (0, 0, 0, 1, 1),
        (0, 0, 0, 2, -1),
        (0, 0, 1, 0, 1),
        (0, 0, 1, 1, 0),
        (0, 0, 1, 2, -1),
    ]


def test_extend_drop_and_fork() -> None:
    schedule = new(shards=2)
    schedule.add_trial(7, epochs=1)
    run_all(schedule)
    assert schedule.trial_status(7) == "waiting"
    schedule.fork_trial(7, 8, epochs=2)
    schedule.extend_trial(7, 2)
    assert schedule.trial_status(7) == "ready"
    schedule.drop_trial(7)
    assert schedule.trial_status(7) == "dropped"
    assert [unit[1:4] for unit in run_all(schedule)] == [(8, 1, 0), (8, 1, 1)]
    with pytest.raises(ValueError, match="trial 7 was dropped"):
        schedule.extend_trial(7, 3)
    with pytest.raises(ValueError, match="there is no trial 9"):
        schedule.drop_trial(9)
    with pytest.raises(ValueError, match="trial 8 is there already"):
        schedule.add_trial(8, epochs=1)


def test_failed_and_lost_units_run_again_with_the_next_attempt() -> None:
    schedule = new(2, shards=2)
    schedule.add_trial(0, epochs=1)
    assert schedule.next(0.0) == ("run", 0, 0, 0, 0, 0, 0)
    assert schedule.live(0) == [0]
    assert schedule.unit_failed(0, 1.0) == (0, 0, 0)
    assert schedule.live(0) == []
    assert schedule.next(1.0) == ("run", 0, 0, 0, 0, 0, 1)
    assert schedule.unit_lost(0, 2.0) == (0, 0, 0)
    assert schedule.next(2.0) == ("run", 0, 0, 0, 0, 0, 2)
    schedule.remove_worker(0, 3.0)
    assert schedule.next(3.0) == ("run", 1, 0, 0, 0, 0, 3)
    assert schedule.unit_done(1, 4.0) == (0, 0, 0)
    assert schedule.next(4.0) == ("run", 1, 0, 0, 1, 1, 0)

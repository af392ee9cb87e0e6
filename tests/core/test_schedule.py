"""The scheduler's state machine through its binding: events in, commands out."""

from __future__ import annotations

import random

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


def test_extend_and_drop() -> None:
    schedule = new(shards=2)
    schedule.add_trial(7, epochs=1)
    run_all(schedule)
    assert schedule.trial_status(7) == "waiting"
    schedule.add_trial(8, epochs=2, epoch=1)
    schedule.extend_trial(7, 2)
    assert schedule.trial_status(7) == "ready"
    schedule.drop_trial(7)
    assert schedule.trial_status(7) == "dropped"
    assert [unit[1:4] for unit in run_all(schedule)] == [(8, 1, 0), (8, 1, 1)]
    with pytest.raises(ValueError, match="trial 7 was dropped"):
        schedule.extend_trial(7, 3)
    with pytest.raises(ValueError, match="there is no trial 9"):
        schedule.drop_trial(9)
    with pytest.raises(ValueError, match="trial 8 already exists"):
        schedule.add_trial(8, epochs=1)


@pytest.mark.parametrize("options", [{}, {"exclusive": True}, {"stagger": False}])
@pytest.mark.parametrize("seed", range(20))
def test_held_trials_get_no_unit_and_resume_where_they_were(
    options: dict[str, bool], seed: int
) -> None:
    shards, trials, rng = 4, 5, random.Random(seed)
    schedule = new(2, shards=shards, eval_cost=0.5, **options)
    for trial in range(trials):
        schedule.add_trial(trial, epochs=2)
    held: set[int] = set()
    running: dict[int, tuple[int, ...]] = {}
    units: dict[int, list[tuple[int, ...]]] = {trial: [] for trial in range(trials)}
    now = 0.0
    while not schedule.finished or held:
        for trial in rng.sample(range(trials), 2):
            (schedule.release_trial if trial in held else schedule.hold_trial)(trial)
            held ^= {trial}
        while (command := schedule.next(now)) is not None:
            if command[0] == "run":
                assert command[2] not in held
                running[command[1]] = command[2:6]
        now += 1.0
        for worker, (trial, *unit) in list(running.items()):
            if rng.random() < 0.7:
                schedule.unit_done(worker, now)
                units[trial].append(tuple(unit))
                del running[worker]
    for trial in range(trials):
        expected = []
        for epoch in range(2):
            order = visit_order(trial, epoch, shards, stagger=options.get("stagger", True))
            expected += [(epoch, step, shard) for step, shard in enumerate([*order, -1])]
        assert units[trial] == expected


def test_a_held_trial_is_waiting_and_keeps_its_worker() -> None:
    schedule = new(2, shards=3)
    schedule.add_trial(0, epochs=1)
    schedule.add_trial(1, epochs=1)
    assert schedule.next(0.0) is not None
    assert schedule.next(0.0) == ("run", 1, 1, 0, 0, 1, 0)
    schedule.hold_trial(1)
    assert schedule.trial_status(1) == "running"
    schedule.unit_done(1, 1.0)
    schedule.unit_done(0, 1.0)
    assert schedule.trial_status(1) == "waiting"
    schedule.hold_trial(0)
    assert schedule.next(1.0) is None
    assert schedule.finished
    schedule.extend_trial(1, 2)
    assert schedule.next(1.0) is None
    schedule.release_trial(1)
    assert schedule.next(1.0) == ("run", 1, 1, 0, 1, 2, 0)
    schedule.drop_trial(0)
    with pytest.raises(ValueError, match="trial 0 was dropped"):
        schedule.hold_trial(0)
    with pytest.raises(ValueError, match="there is no trial 5"):
        schedule.release_trial(5)


@pytest.mark.parametrize("options", [{}, {"exclusive": True}, {"stagger": False}])
def test_a_trial_goes_back_to_an_earlier_unit(options: dict[str, bool]) -> None:
    schedule = new(2, shards=4, **options)
    units: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}
    rewound = False
    for trial in units:
        schedule.add_trial(trial, epochs=2)
    while not schedule.finished or not rewound:
        running = []
        while (command := schedule.next(0.0)) is not None:
            if command[0] == "run":
                running.append(command[1])
                units[command[2]].append((command[3], command[4]))
        for worker in running:
            schedule.unit_done(worker, 1.0)
        if not rewound and schedule.trial_position(1)[:2] == (1, 2):
            schedule.rewind_trial(1, epoch=0, step=3)
            rewound = True
    every = [(epoch, step) for epoch in range(2) for step in range(4)]
    assert units[0] == units[2] == every
    assert units[1] == every[:6] + every[3:]
    assert schedule.remaining() == 0.0


def test_a_trial_goes_back_only_at_rest_and_never_forward() -> None:
    schedule = new(1, shards=2)
    schedule.add_trial(0, epochs=2)
    assert schedule.next(0.0) is not None
    with pytest.raises(ValueError, match="trial 0 is running or was dropped"):
        schedule.rewind_trial(0, epoch=0, step=0)
    schedule.unit_done(0, 1.0)
    with pytest.raises(ValueError, match="cannot go back to epoch 1, step 0"):
        schedule.rewind_trial(0, epoch=1, step=0)
    schedule.rewind_trial(0, epoch=0, step=0)
    assert schedule.next(1.0) == ("run", 0, 0, 0, 0, 0, 1)


def test_failed_units_run_again_with_the_next_attempt() -> None:
    schedule = new(2, shards=2)
    schedule.add_trial(0, epochs=1)
    assert schedule.next(0.0) == ("run", 0, 0, 0, 0, 0, 0)
    assert schedule.live(0) == [0]
    assert schedule.unit_failed(0, 1.0) == (0, 0, 0)
    assert schedule.live(0) == []
    assert schedule.next(1.0) == ("run", 0, 0, 0, 0, 0, 1)
    assert schedule.unit_failed(0, 2.0) == (0, 0, 0)
    assert schedule.next(2.0) == ("run", 0, 0, 0, 0, 0, 2)
    schedule.remove_worker(0, 3.0)
    assert schedule.next(3.0) == ("run", 1, 0, 0, 0, 0, 3)
    assert schedule.unit_done(1, 4.0) == (0, 0, 0)
    assert schedule.next(4.0) == ("run", 1, 0, 0, 1, 1, 0)


def test_workers_join_and_leave_at_any_time() -> None:
    schedule = new(1, shards=2)
    schedule.add_trial(0, epochs=1)
    schedule.add_trial(1, epochs=1)
    assert schedule.next(0.0) == ("run", 0, 0, 0, 0, 0, 0)
    assert schedule.next(0.0) is None
    assert schedule.add_worker(0.5) == 1
    assert schedule.next(0.5) == ("run", 1, 1, 0, 0, 1, 0)
    assert schedule.idle_workers == []
    schedule.remove_worker(0, 0.7)
    assert schedule.trial_status(0) == "ready"
    assert schedule.trial_position(0) == (0, 0, 1)
    with pytest.raises(ValueError, match="there is no worker 0"):
        schedule.unit_done(0, 1.0)
    assert schedule.add_worker(0.8) == 2  # numbers are not used again
    assert schedule.idle_workers == [2]


def test_exclusive_shards_run_on_their_holders_alone() -> None:
    schedule = new(2, shards=2, exclusive=True, eval_cost=1.0)
    schedule.set_holders(0, [1])
    schedule.set_holders(1, [0])
    schedule.set_holders(-1, [1])
    for trial in range(3):
        schedule.add_trial(trial, epochs=1)
    units = run_all(schedule)
    assert {(worker, shard) for worker, _, _, _, shard in units} == {(1, 0), (0, 1), (1, -1)}
    with pytest.raises(ValueError, match="there is no shard 2"):
        schedule.set_holders(2, [0])
    with pytest.raises(ValueError, match="there is no worker 5"):
        schedule.set_holders(0, [5])


class Emptying:
    """A number whose conversion empties the list that it is in."""

    def __init__(self, items: list[object]) -> None:
        self._items = items

    def __float__(self) -> float:
        self._items.clear()
        return 1.0

    def __index__(self) -> int:
        self._items.clear()
        return 0


def test_a_list_that_shrinks_while_it_is_read_is_taken_as_it_was() -> None:
    items: list[object] = []
    items += [Emptying(items), *(float(i) for i in range(2, 50))]
    schedule = new(1, shards=items, exclusive=True)
    assert items == []
    with pytest.raises(ValueError, match="there is no shard 49"):
        schedule.set_holders(49, [0])
    items += [Emptying(items), *range(1, 50)]
    with pytest.raises(ValueError, match="there is no worker 1"):
        schedule.set_holders(0, items)  # type: ignore[arg-type]
    assert items == []
    for wrong in (3.5, None, Emptying(items)):
        with pytest.raises(TypeError, match="a number or a sequence of weights"):
            new(shards=wrong)
        with pytest.raises(TypeError, match="a sequence of numbers"):
            schedule.set_holders(0, wrong)  # type: ignore[arg-type]


def test_shards_of_a_leaving_holder_are_loaded_elsewhere() -> None:
    schedule = new(3, shards=3, exclusive=True)
    loads = [schedule.next(0.0) for _ in range(3)]
    assert loads == [("load", 0, 0), ("load", 1, 1), ("load", 2, 2)]
    schedule.remove_worker(1, 0.0)
    assert schedule.next(0.0) == ("load", 0, 1)
    schedule.remove_worker(2, 0.0)
    schedule.add_worker(0.0)
    assert schedule.next(0.0) == ("load", 3, 2)
    assert schedule.next(0.0) is None


def test_without_stagger_nobody_is_more_than_one_shard_ahead() -> None:
    schedule = new(2, shards=4, stagger=False)
    schedule.add_trial(0, epochs=1)
    schedule.add_trial(1, epochs=1)
    assert schedule.next(0.0) == ("run", 0, 0, 0, 0, 0, 0)
    assert schedule.next(0.0) == ("run", 1, 1, 0, 0, 0, 0)
    schedule.unit_done(0, 1.0)
    assert schedule.next(1.0) == ("run", 0, 0, 0, 1, 1, 0)  # one ahead
    schedule.unit_done(0, 2.0)
    assert schedule.next(2.0) is None  # it would be two ahead
    # A trial that comes now begins at shard 0, which is open still.
    schedule.add_trial(2, epochs=1)
    assert schedule.next(2.0) == ("run", 0, 2, 0, 0, 0, 0)
    schedule.unit_done(0, 3.0)
    schedule.unit_done(1, 3.0)
    assert [schedule.next(3.0), schedule.next(3.0)] == [
        ("run", 1, 1, 0, 1, 1, 0),
        ("run", 0, 2, 0, 1, 1, 0),
    ]
    # Shard 0 is closed now: the next one waits until the others are round, and
    # a trial that is dropped holds nobody up.
    schedule.add_trial(3, epochs=1)
    schedule.drop_trial(1)
    schedule.drop_trial(2)
    schedule.unit_done(0, 4.0)
    schedule.unit_done(1, 4.0)
    units = [(trial, shard) for _, trial, _, _, shard in run_all(schedule)]
    assert units == [(0, 2), (0, 3), (3, 0), (3, 1), (3, 2), (3, 3)]


def test_with_two_shards_no_trial_holds_up_another() -> None:
    schedule = new(2, shards=2, stagger=False)
    schedule.add_trial(0, epochs=3)
    schedule.add_trial(1, epochs=1)
    assert schedule.next(0.0) == ("run", 0, 0, 0, 0, 0, 0)
    assert schedule.next(0.0) == ("run", 1, 1, 0, 0, 0, 0)
    for now in range(1, 6):
        schedule.unit_done(0, float(now))
        assert schedule.next(float(now)) is not None  # trial 1 does not hold it up


def test_resumed_trials_begin_where_they_were() -> None:
    schedule = new(1, shards=3, eval_cost=1.0)
    schedule.add_trial(0, epochs=2, epoch=1, step=2)
    schedule.add_trial(1, epochs=1, epoch=0, step=3)
    schedule.add_trial(2, epochs=1, epoch=1)
    assert schedule.trial_status(2) == "waiting"
    units = [(trial, epoch, step) for _, trial, epoch, step, _ in run_all(schedule)]
    assert sorted(units) == [(0, 1, 2), (0, 1, 3), (1, 0, 3)]


def test_resumed_trials_begin_together_without_stagger() -> None:
    schedule = new(2, shards=5, stagger=False)
    schedule.add_trial(0, epochs=2, step=4)
    schedule.add_trial(1, epochs=2, step=3)
    schedule.add_trial(2, epochs=2, step=3)
    assert schedule.next(0.0) == ("run", 0, 1, 0, 3, 3, 0)
    assert schedule.next(0.0) == ("run", 1, 2, 0, 3, 3, 0)
    schedule.unit_done(0, 1.0)
    schedule.unit_done(1, 1.0)
    assert schedule.next(1.0) == ("run", 0, 0, 0, 4, 4, 0)
    assert schedule.next(1.0) == ("run", 1, 1, 0, 4, 4, 0)


def test_remaining_work_in_seconds() -> None:
    schedule = new(1, shards=[10.0, 30.0], eval_cost=20.0)
    schedule.add_trial(0, epochs=2)
    assert schedule.remaining() is None
    now = 0.0
    for weight in (10.0, 30.0, 20.0, 30.0):  # the first unit is not timed
        assert schedule.next(now) is not None
        now += 0.5 * weight
        schedule.unit_done(0, now)
    assert schedule.remaining() == pytest.approx(0.5 * (10.0 + 20.0))
    run_all(schedule)
    assert schedule.remaining() == 0.0


def test_live_models_are_bounded() -> None:
    schedule = new(1, shards=1, live_models=2)
    for trial in range(4):
        schedule.add_trial(trial, epochs=1)
    run_all(schedule)
    assert schedule.live(0) == [3, 2]
    schedule.forget_live(0, 3)
    assert schedule.live(0) == [2]
    schedule.drop_trial(2)
    assert schedule.live(0) == []


def test_room_for_trials_grows() -> None:
    schedule = new(3, shards=2, capacity=1)
    small = schedule.nbytes
    for trial in range(500):
        schedule.add_trial(trial * 7919 % 500, epochs=1)
    assert len(run_all(schedule)) == 1000
    assert schedule.nbytes - small < 500 * 2048


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shards": 0}, "needs 1 to"),
        ({"shards": []}, "needs 1 to"),
        ({"shards": 2**20 + 1}, "needs 1 to 1048576 shards, not 1048577: write the dataset"),
        ({"shards": 2**31 - 1}, "needs 1 to"),
        ({"shards": 2, "capacity": 2**20 + 1}, "room for at most 1048576 trials, not 1048577"),
        ({"shards": [1.0, float("nan")]}, "weight of shard 1"),
        ({"shards": [-1.0]}, "weight of shard 0"),
        ({"shards": 2, "eval_cost": -1.0}, "eval_cost"),
        ({"shards": 2, "live_models": 0}, "live_models"),
        ({"shards": 2, "exclusive": True, "stagger": False}, "stagger=False"),
        ({"shards": -3}, "-3 is not a number"),
    ],
)
def test_wrong_arguments_of_the_schedule(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(**arguments)  # type: ignore[arg-type]


def test_wrong_arguments_of_the_methods() -> None:
    schedule = new(1, shards=2)
    with pytest.raises(TypeError, match="epochs"):
        schedule.add_trial(0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="shards"):
        Schedule()  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="step 2: the last step of an epoch is 1"):
        schedule.add_trial(0, epochs=1, step=2)
    with pytest.raises(ValueError, match="has begun epoch 3 and cannot train for 2"):
        schedule.add_trial(0, epochs=2, epoch=3)
    with pytest.raises(ValueError, match="worker 0 is not running a unit"):
        schedule.unit_done(0, 0.0)
    with pytest.raises(TypeError, match="takes a worker and the time"):
        schedule.unit_done(0)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="only with exclusive=True"):
        schedule.set_holders(0, [0])
    with pytest.raises(ValueError, match="2\\*\\*32"):
        schedule.add_trial(2**32, epochs=1)
    schedule.add_trial(0, epochs=3)
    schedule.next(0.0)
    with pytest.raises(ValueError, match="has begun 1 epochs and cannot train for 0"):
        schedule.extend_trial(0, 0)


def test_a_running_trial_is_dropped_when_its_unit_ends() -> None:
    schedule = new(1, shards=2)
    schedule.add_trial(0, epochs=5)
    schedule.next(0.0)
    schedule.drop_trial(0)
    assert schedule.trial_status(0) == "running"
    assert not schedule.finished
    assert schedule.unit_done(0, 1.0) == (0, 0, 0)
    assert schedule.trial_status(0) == "dropped"
    assert schedule.finished
    schedule.add_trial(1, epochs=1)
    schedule.extend_trial(1, 2)
    assert len(run_all(schedule)) == 4
    schedule.extend_trial(1, 2)  # nothing changes
    assert schedule.finished


@pytest.mark.parametrize("options", [{}, {"stagger": False}, {"exclusive": True}])
def test_forgetting_changes_no_decision(options: dict[str, bool]) -> None:
    def units(forget: bool) -> list[tuple[int, ...]]:
        schedule = new(3, shards=4, eval_cost=0.5, **options)
        rng = random.Random(3)
        begun, ended, now = 0, set[int](), 0.0
        running: dict[int, int] = {}
        found = []
        while len(ended) < 60:
            while begun < 60 and begun - len(ended) < 7:
                schedule.add_trial(begun, epochs=1 + begun % 3)
                begun += 1
            while (command := schedule.next(now)) is not None:
                if command[0] == "run":
                    running[command[1]] = command[2]
                    found.append(tuple(command[1:6]))
            now += rng.random()
            worker = rng.choice(sorted(running))
            trial = running.pop(worker)
            schedule.unit_done(worker, now)
            if schedule.trial_status(trial) == "waiting":
                schedule.drop_trial(trial)
                ended.add(trial)
                if forget:
                    schedule.forget_trial(trial)
        return found

    assert units(forget=True) == units(forget=False)


# --- units that a worker begins by itself -------------------------------------------


def test_a_worker_continues_with_its_trial() -> None:
    schedule = new(2, shards=3, eval_cost=0.5)
    for trial in range(12):
        schedule.add_trial(trial, epochs=2)
    assert schedule.next(0.0) == ("run", 0, 0, 0, 0, 0, 0)
    assert schedule.next(0.0) == ("run", 1, 1, 0, 0, 1, 0)
    assert schedule.next_here(0) == (0, 1, 1)
    assert schedule.unit_continued(0, 1.0) == (0, 0, 0)
    assert schedule.trial_status(0) == "running"
    assert schedule.trial_position(0) == (0, 1, 0)
    assert schedule.idle_workers == []
    assert schedule.next_here(0) == (0, 2, 2)
    schedule.unit_continued(0, 2.0)
    assert schedule.next_here(0) == (0, 3, -1)
    schedule.unit_continued(0, 3.0)
    assert schedule.next_here(0) is None  # the next epoch may be the searcher's decision
    with pytest.raises(ValueError, match=r"worker 0 cannot continue with trial 0: .* last of an"):
        schedule.unit_continued(0, 4.0)
    assert schedule.unit_done(0, 4.0) == (0, 0, 3)
    assert schedule.next(4.0) == ("run", 0, 0, 1, 0, 1, 0)


def test_a_worker_leaves_its_trial_for_one_that_is_longer() -> None:
    """The new trial needs a worker all the time from now on."""
    schedule = new(2, shards=4)
    for trial in range(2):
        schedule.add_trial(trial, epochs=1)
        assert schedule.next(0.0) == ("run", trial, trial, 0, 0, trial, 0)
    assert schedule.next_here(0) == (0, 1, 1)
    schedule.add_trial(2, epochs=50)
    assert schedule.next_here(0) is None
    schedule.unit_done(0, 1.0)
    assert schedule.next(1.0) == ("run", 0, 2, 0, 0, 2, 0)


@pytest.mark.parametrize("end", ["hold_trial", "drop_trial"])
def test_a_begun_unit_ends_even_if_its_trial_is_held_or_dropped(end: str) -> None:
    schedule = new(1, shards=3)
    schedule.add_trial(0, epochs=1)
    schedule.next(0.0)
    assert schedule.next_here(0) == (0, 1, 1)
    getattr(schedule, end)(0)
    assert schedule.next_here(0) is None
    schedule.unit_continued(0, 1.0)
    assert schedule.trial_status(0) == "running"
    assert schedule.remaining() == 0.0
    assert schedule.unit_done(0, 2.0) == (0, 0, 1)
    assert schedule.next(2.0) is None
    assert schedule.finished


@pytest.mark.parametrize("holds", [True, False])
def test_a_worker_continues_only_on_shards_it_holds(holds: bool) -> None:
    schedule = new(2, shards=2, exclusive=True)
    schedule.set_holders(0, [0])
    schedule.set_holders(1, [0, 1] if holds else [1])
    schedule.add_trial(0, epochs=1)
    assert schedule.next(0.0) == ("run", 0, 0, 0, 0, 0, 0)
    assert schedule.next_here(0) == ((0, 1, 1) if holds else None)


def test_without_stagger_no_worker_continues_by_itself() -> None:
    schedule = new(1, shards=4, stagger=False)
    schedule.add_trial(0, epochs=1)
    schedule.next(0.0)
    assert schedule.next_here(0) is None
    with pytest.raises(ValueError, match="waits for its shard to open"):
        schedule.unit_continued(0, 1.0)


def test_an_idle_worker_has_nothing_to_continue() -> None:
    schedule = new(1, shards=4)
    for call in (lambda: schedule.next_here(0), lambda: schedule.unit_continued(0, 0.0)):
        with pytest.raises(ValueError, match="worker 0 is not running a unit"):
            call()
    with pytest.raises(ValueError, match="there is no worker 3"):
        schedule.next_here(3)

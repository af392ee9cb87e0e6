"""The tracebacks of late units that overlap: when the timer is set, and for whose log."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from cerebro.machine.local import Clock, Machine, Tasks
from cerebro.worker import clock


class HandClock(Clock):
    """A clock that is set by hand."""

    now = 100.0

    def monotonic(self) -> float:  # type: ignore[override]
        return self.now


class Task:
    def __init__(self, name: str, folder: Path, left: float | None) -> None:
        self.identity: object = name
        self.log = folder / f"{name}.log"
        self.seconds_left = left


@pytest.fixture
def timer(monkeypatch, tmp_path):
    """What the timer is set to: the seconds and the log; None if it is not set."""

    class Timer(HandClock):
        to: tuple[float, str] | None = None
        calls = 0

    def set_timer(seconds, file):
        names = {path.stat().st_ino: path.name for path in tmp_path.glob("*.log")}
        timer.to = round(seconds, 6), names[os.fstat(file).st_ino]
        timer.calls += 1

    timer = Timer()
    faulthandler = SimpleNamespace(
        dump_traceback_later=set_timer,
        cancel_dump_traceback_later=lambda: setattr(timer, "to", None),
    )
    monkeypatch.setattr(clock, "faulthandler", faulthandler)
    return timer


def tasks_of(timer: Clock, *tasks: Task) -> clock.LateTasks:
    """Return what looks at tasks, without a thread that does it often."""
    found = clock.LateTasks(Machine(clock=timer))
    found._tasks += tasks
    return found


def test_the_timer_is_set_for_the_task_due_first(timer, tmp_path):
    one, two = Task("one", tmp_path, 5.0), Task("two", tmp_path, 3.0)
    looking = tasks_of(timer, one, two)
    looking.set_timer()
    assert timer.to == (3.0, "two.log")
    two.seconds_left = None  # it waits for its turn
    looking.set_timer()
    assert timer.to == (5.0, "one.log")
    timer.now, one.seconds_left = 101.0, 4.0
    looking.set_timer()
    assert (timer.to, timer.calls) == ((5.0, "one.log"), 2)  # it still fits
    one.seconds_left, two.seconds_left = None, 2.9
    looking.set_timer()
    assert timer.to == (2.9, "two.log")
    two.seconds_left = None
    looking.set_timer()
    assert timer.to is None and looking._file == -1


def test_a_late_task_is_dumped_once(timer, tmp_path):
    one, two = Task("one", tmp_path, 1.0), Task("two", tmp_path, 7.0)
    looking = tasks_of(timer, one, two)
    looking.set_timer()
    timer.now, one.seconds_left, two.seconds_left = 101.5, -0.5, 5.5
    looking.set_timer()  # the timer has run out for the first one, and may still have to write
    assert timer.to == (1.0, "one.log")
    timer.now, one.seconds_left, two.seconds_left = 102.0, -1.0, 5.0
    looking.set_timer()
    assert timer.to == (5.0, "two.log")
    one.identity, one.seconds_left = "its next", 2.0
    looking.set_timer()
    assert timer.to == (2.0, "one.log")


def test_a_log_that_cannot_be_opened_is_tolerated(timer, tmp_path):
    one = Task("one", tmp_path / "missing", 1.0)
    looking = tasks_of(timer, one)
    looking.set_timer()
    assert timer.to is None
    one.log = tmp_path / "one.log"
    looking.set_timer()
    assert timer.to == (1.0, "one.log")


def test_one_task_looks_at_the_tasks_of_all_workers(timer, tmp_path):
    begun = []

    class Steps(Tasks):
        def repeat(self, step, has_work, name):
            begun.append(step)

    timer.sleep = lambda seconds: None
    looking = clock.LateTasks(Machine(clock=timer, tasks=Steps()))
    for name, left in (("one", 5.0), ("two", 3.0)):
        looking.watch(Task(name, tmp_path, left))
    (step,) = begun
    assert step() and timer.to == (3.0, "two.log")


class Page(HandClock):
    """A page of heartbeats and its clock."""

    def __init__(self) -> None:
        self.began: float | None = None

    @property
    def task_seconds(self) -> float | None:
        return None if self.began is None else self.now - self.began

    def begin_task(self, grace: float) -> None:
        self.began = self.now + grace

    def postpone_task(self, seconds: float) -> None:
        if self.began is not None:
            self.began += seconds


def test_the_clock_of_a_unit_stops_while_it_waits_for_its_turn(tmp_path):
    page = Page()
    late = SimpleNamespace(watch=lambda task: None)
    beat = clock.BeatClock(page, page, late)
    beat.limit = 3.0
    assert beat.seconds_left is None  # it has no task
    beat.begin(tmp_path / "0.log")
    beat.note_built()
    before = beat.identity
    page.now += 1.0
    assert beat.seconds_left == pytest.approx(2.0)
    beat.wait_for_turn(True)
    page.now += 50.0
    assert beat.seconds_left is None
    assert page.task_seconds is not None and page.task_seconds < -1e5
    beat.wait_for_turn(False)
    assert beat.seconds_left == pytest.approx(2.0)
    page.now += 3.0
    assert beat.seconds_left == pytest.approx(-1.0)
    beat.end()
    assert beat.seconds_left is None  # although the page still shows the task
    beat.begin()
    assert beat.identity != before and beat.seconds_left == pytest.approx(3.0)

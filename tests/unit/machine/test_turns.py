"""Turns: who has one, who is alone, and when a thread says that it waits."""

from __future__ import annotations

import threading

import pytest

from cerebro.machine import turns
from cerebro.machine.turns import Turns

SECONDS = 30.0


class Notes:
    """The calls of one thread's `waits`, in order; `begun` is set when it begins to wait."""

    def __init__(self) -> None:
        self.heard: list[bool] = []
        self.begun = threading.Event()

    def __call__(self, begins: bool) -> None:
        self.heard.append(begins)
        if begins:
            self.begun.set()


def thread_of(shared: Turns, notes: Notes, work=lambda: None) -> threading.Thread:
    def run() -> None:
        with shared.take_turn(notes):
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_thread_reports_waiting_before_its_unit_begins():
    shared, first, second = Turns(()), Notes(), Notes()
    heard_inside: list[list[bool]] = []
    with shared.take_turn(first):
        thread = thread_of(shared, second, lambda: heard_inside.append(list(second.heard)))
        assert second.begun.wait(SECONDS)
        assert second.heard == [True]
    thread.join(SECONDS)
    assert heard_inside == [[True, False]]
    assert first.heard == []  # no other unit is in its way


def test_an_exclusive_unit_waits_for_running_units_and_blocks_new_ones():
    """As after a shortage of memory: units under way end, the next ones begin after it."""
    shared, notes = Turns(()), {name: Notes() for name in ("alone", "inside", "new")}
    order: list[str] = []
    inside_is_away, go_on = threading.Event(), threading.Event()

    def inside() -> None:
        turns.allow_giving_away(True)
        with turns.give_away():
            inside_is_away.set()
            assert go_on.wait(SECONDS)
        order.append("inside")

    def alone() -> None:
        assert turns.wait_until_alone()
        assert turns.wait_until_alone()  # again: it is alone already
        order.append("alone")

    threads = [thread_of(shared, notes["inside"], inside)]
    assert inside_is_away.wait(SECONDS)
    threads.append(thread_of(shared, notes["alone"], alone))
    assert notes["alone"].begun.wait(SECONDS)
    threads.append(thread_of(shared, notes["new"], lambda: order.append("new")))
    assert notes["new"].begun.wait(SECONDS)
    go_on.set()
    for thread in threads:
        thread.join(SECONDS)
    assert order == ["inside", "alone", "new"]
    assert notes["alone"].heard == notes["new"].heard == [True, False]


def test_two_exclusive_units_run_one_after_the_other():
    shared, notes = Turns(()), [Notes(), Notes()]
    inside: list[int] = []
    begun = [threading.Event(), threading.Event()]

    def work(number: int) -> None:
        turns.allow_giving_away(True)
        with turns.give_away():
            begun[number].set()
            assert begun[1 - number].wait(SECONDS)
        turns.wait_until_alone()
        inside.append(number)
        with turns.give_away():  # no other unit takes the turn
            assert inside == [*inside[:-1], number]
        inside.append(number)

    threads = [thread_of(shared, notes[n], lambda n=n: work(n)) for n in range(2)]
    for thread in threads:
        thread.join(SECONDS)
    assert sorted(inside) == [0, 0, 1, 1] and inside[0] == inside[1]


def test_a_unit_that_fails_gives_its_turn_back():
    shared = Turns(())
    with pytest.raises(ValueError, match="a unit"), shared.take_turn():
        turns.wait_until_alone()
        raise ValueError("a unit")
    notes = Notes()
    thread_of(shared, notes).join(SECONDS)
    assert notes.heard == []

"""What other threads tell the coordinator's: messages, and what follows from their work."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from cerebro.cluster.workers import Events
from cerebro.machine.wake_pipe import wait_for


class Calls:
    """Events with calls that note their names."""

    def __init__(self):
        self.events, self.made = Events(), []

    def is_awake(self):
        return self.events.fileno() in wait_for([self.events.fileno()], 0.0)

    def put(self, name):
        self.events.put(partial(self.made.append, name))

    def put_elsewhere(self, name):
        thread = threading.Thread(target=self.put, args=(name,))
        thread.start()
        thread.join()

    def make(self):
        self.made.clear()
        self.events.make_calls()
        return self.made


def test_calls_of_other_threads_wake_the_reader_until_it_makes_them():
    calls = Calls()
    assert calls.make() == []
    calls.put_elsewhere("a")
    calls.put_elsewhere("b")
    assert calls.is_awake()
    assert calls.make() == ["a", "b"]
    assert not calls.is_awake()
    calls.put_elsewhere("c")
    assert calls.is_awake()
    calls.events.close()
    calls.put_elsewhere("too late")


def test_the_reader_makes_its_own_calls_without_being_woken():
    calls = Calls()
    calls.put("before it is known who reads")
    assert calls.is_awake()
    assert calls.make() == ["before it is known who reads"]
    calls.put("own")
    assert not calls.is_awake()
    calls.put_elsewhere("other")
    assert calls.is_awake()
    calls.events.put(partial(calls.put, "of a call"))
    assert calls.make() == ["own", "other", "of a call"]
    calls.events.close()


def test_what_follows_from_finished_work_happens_in_the_coordinators_thread():
    events, followed = Events(), []
    job = events.fetch_pool.submit(lambda number: number + 1, 1)
    events.when_done(job, lambda *given: followed.append((threading.get_ident(), given)), "a")
    while not followed:
        wait_for([events.fileno()], 60.0)
        events.process()
    assert followed == [(threading.get_ident(), ("a", job))] and job.result() == 2
    events.fetch_pool.shutdown()
    events.close()


def test_later_events_are_taken_once_training_has_begun():
    events = Events()
    events.later.append("joined")
    events.process()
    assert events.take() == []
    events.is_training = True
    events.process()
    assert (events.take(), events.take()) == (["joined"], [])
    events.trouble = OSError("full")
    with pytest.raises(OSError, match="full"):
        events.process()
    events.process()
    events.close()

"""What other threads tell the coordinator's: messages, and what follows from their work."""

from __future__ import annotations

import threading

import pytest

from cerebro.cluster.workers import Events, Mailbox
from cerebro.machine.wake_pipe import wait_for


def is_awake(mailbox: Mailbox) -> bool:
    return mailbox.fileno() in wait_for([mailbox.fileno()], 0.0)


def put_elsewhere(mailbox: Mailbox, message: str) -> None:
    thread = threading.Thread(target=mailbox.put, args=(message,))
    thread.start()
    thread.join()


def test_messages_of_other_threads_wake_the_reader_until_it_takes_them():
    mailbox = Mailbox()
    assert mailbox.take() == []
    put_elsewhere(mailbox, "a")
    put_elsewhere(mailbox, "b")
    assert is_awake(mailbox)
    assert mailbox.take() == ["a", "b"]
    assert not is_awake(mailbox)
    put_elsewhere(mailbox, "c")
    assert is_awake(mailbox)
    mailbox.close()


def test_the_reader_takes_its_own_messages_without_being_woken():
    mailbox = Mailbox()
    mailbox.put("before it is known who reads")
    assert is_awake(mailbox)
    assert mailbox.take() == ["before it is known who reads"]
    mailbox.put("own")
    assert not is_awake(mailbox)
    put_elsewhere(mailbox, "other")
    assert is_awake(mailbox)
    assert mailbox.take() == ["own", "other"]
    mailbox.close()


def test_what_follows_from_finished_work_happens_in_the_coordinators_thread():
    events, followed = Events(), []
    job = events.fetch_pool.submit(lambda number: number + 1, 1)
    events.when_done(job, lambda *given: followed.append((threading.get_ident(), given)), "a")
    while not followed:
        wait_for([events.mailbox.fileno()], 60.0)
        events.process()
    assert followed == [(threading.get_ident(), ("a", job))] and job.result() == 2
    events.fetch_pool.shutdown()
    events.mailbox.close()


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
    events.mailbox.close()

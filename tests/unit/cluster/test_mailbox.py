"""The coordinator's mailbox."""

from __future__ import annotations

import threading

from cerebro.cluster.mailbox import Mailbox
from cerebro.machine.wake_pipe import wait_for


def is_awake(mailbox: Mailbox) -> bool:
    return mailbox.fileno() in wait_for([mailbox.fileno()], 0.0)


def put_elsewhere(mailbox: Mailbox, letter: str) -> None:
    thread = threading.Thread(target=mailbox.put, args=(letter,))
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

"""Sockets that several threads use."""

import threading
import time

import pytest

from cerebro.cluster.keys import Keys
from cerebro.cluster.wire import (
    LOOK_SECONDS,
    SharedSocket,
    dial,
    open_listener,
    start_authenticator,
)

zmq = pytest.importorskip("zmq")

PATIENCE = 30.0


class Peer:
    """An ordinary socket that a shared one is connected to, and what the shared one handles."""

    def __init__(self):
        keys = Keys.generate()
        self.context = zmq.Context()
        self.guard = start_authenticator(self.context, keys)
        socket, port = open_listener(self.context, keys, "127.0.0.1")
        self.handled = []
        self.events = []
        self.changed = threading.Condition()
        self.shared = SharedSocket(socket, zmq.EVENT_DISCONNECTED, self._handle, self._hear)
        self.address = f"127.0.0.1:{port}"
        self.keys = keys
        self.socket = dial(self.context, keys, self.address)
        self.is_closing = False
        self.background = threading.Thread(target=self._attend)
        self.background.start()
        self.socket.send(b"hello")
        self.wait_until(lambda: self.handled)
        self.name = self.handled.pop()[0][0]

    def _attend(self):
        while not self.is_closing:
            self.shared.wait_in_background(PATIENCE)

    def _handle(self, frames):
        with self.changed:
            values = [frame.bytes for frame in frames]
            self.handled.append((values, threading.current_thread(), len(self.events)))
            self.changed.notify_all()

    def _hear(self, event):
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def wait_until(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE)

    def close(self):
        self.is_closing = True
        self.shared.give_back()
        self.background.join()
        self.shared.close()
        self.guard.stop()
        self.context.destroy(linger=0)


@pytest.fixture
def peer():
    one = Peer()
    yield one
    one.close()


def test_the_background_thread_handles_messages(peer):
    peer.socket.send(b"1")
    peer.wait_until(lambda: peer.handled)
    assert peer.handled[0][1] is peer.background


def test_a_borrower_handles_messages_itself(peer):
    peer.shared.borrow()
    peer.shared.give_back()
    peer.shared.borrow()
    time.sleep(2 * LOOK_SECONDS)  # the background thread has seen that it is lent
    peer.socket.send(b"1")
    while not peer.handled:
        peer.shared.wait(PATIENCE, [])
    assert peer.handled[0][1] is threading.current_thread()


def test_the_background_thread_resumes_after_the_borrower_stops_waiting(peer):
    peer.shared.wait(0.0, [])
    peer.socket.send(b"1")
    peer.wait_until(lambda: peer.handled)
    peer.shared.borrow()
    peer.shared.give_back()
    peer.socket.send(b"2")
    peer.wait_until(lambda: len(peer.handled) == 2)
    assert {thread for _, thread, _ in peer.handled} == {peer.background}


def test_a_borrower_is_woken_by_its_own_descriptors(peer):
    from cerebro.machine.wake_pipe import WakePipe

    pipe = WakePipe()
    assert peer.shared.wait(0.0, [pipe.fileno()]).isdisjoint({pipe.fileno()})
    pipe.wake()
    assert pipe.fileno() in peer.shared.wait(PATIENCE, [pipe.fileno()])
    pipe.close()


@pytest.mark.parametrize("borrows", [False, True], ids=["background", "borrowed"])
def test_no_message_is_missed_during_concurrent_sends(peer, borrows):
    """Sending uses up signals of what has come."""
    count = 2000

    def send(mark):
        for number in range(count):
            peer.shared.send([peer.name, mark, b"%d" % number])

    def send_back():
        for number in range(count):
            socket.send(b"%d" % number)

    socket = peer.socket
    senders = [threading.Thread(target=send, args=[mark]) for mark in (b"a", b"b")]
    for thread in senders:
        thread.start()
    send_back()
    end = time.monotonic() + PATIENCE
    while borrows and len(peer.handled) < count and time.monotonic() < end:
        peer.shared.wait(PATIENCE, [])
    peer.wait_until(lambda: len(peer.handled) == count)
    assert [int(frames[1]) for frames, *_ in peer.handled] == list(range(count))
    for thread in senders:
        thread.join()
    received = {b"a": [], b"b": []}
    for _ in range(2 * count):
        assert socket.poll(1000 * PATIENCE)
        mark, number = socket.recv_multipart()
        received[mark].append(int(number))
    assert received == {b"a": list(range(count)), b"b": list(range(count))}


def test_events_are_handled_before_later_messages(peer):
    first = dial(peer.context, peer.keys, peer.address)
    first.send(b"1")
    peer.wait_until(lambda: peer.handled)
    first.close()
    peer.wait_until(lambda: peer.events)
    peer.socket.send(b"2")
    peer.wait_until(lambda: len(peer.handled) == 2)
    assert [events for *_, events in peer.handled] == [0, 1]


def test_sending_after_the_end_does_nothing(peer):
    peer.close()
    peer.shared.send([peer.name, b"1"])
    peer.close = lambda: None

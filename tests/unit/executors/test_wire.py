"""`cerebro.executors.wire.Channel`: whole messages over a socket, and never a wait."""

from __future__ import annotations

import socket
import struct
import threading
from multiprocessing.connection import Connection

import pytest

from cerebro.executors.wire import MAX_ANSWER, PIECE, BrokenMessage, Channel


@pytest.fixture
def ends():
    """A channel and the raw socket at its other end."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


def framed(message):
    return struct.pack("!i", len(message)) + message


def test_a_channel_exchanges_messages_with_a_connection(ends):
    channel, theirs = ends
    worker = Connection(theirs.detach())
    for message in (b"", b"a", b"b" * 16383, b"c" * 16384, b"d" * 100_000):
        channel.send(message)
        assert worker.recv_bytes() == message
        worker.send_bytes(message)
        assert channel.receive() == [message]
    assert channel.receive() == []
    worker.close()
    with pytest.raises(EOFError):
        channel.receive()


def test_messages_cut_anywhere_arrive_whole(ends):
    channel, theirs = ends
    wire = framed(b"first") + framed(b"") + framed(b"second")
    received = []
    for byte in wire:
        theirs.sendall(bytes([byte]))
        received += channel.receive()
    assert received == [b"first", b"", b"second"]
    theirs.sendall(wire + framed(b"third")[:-1])
    assert channel.receive() == [b"first", b"", b"second"]
    theirs.close()
    with pytest.raises(EOFError):
        channel.receive()


def test_messages_sent_before_the_end_are_received_first(ends):
    channel, theirs = ends
    theirs.sendall(framed(b"last words"))
    theirs.close()
    assert channel.receive() == [b"last words"]
    with pytest.raises(EOFError):
        channel.receive()


@pytest.mark.parametrize("length", [-1, -(2**31), MAX_ANSWER + 1, 2**31 - 1])
def test_an_invalid_message_length_is_refused(ends, length):
    channel, theirs = ends
    theirs.sendall(struct.pack("!i", length) + b"x")
    with pytest.raises(BrokenMessage, match=f"a message of {length} bytes"):
        channel.receive()


def test_sending_does_not_block_on_a_slow_reader(ends):
    channel, theirs = ends
    message = bytes(range(256)) * 40_000  # more than any socket takes
    channel.send(message)
    channel.send(b"next")
    assert channel.has_unsent
    worker = Connection(theirs.detach())
    received = bytearray()
    while channel.has_unsent or len(received) < len(message) + 12:
        channel.flush()
        received += worker._read(worker.fileno(), 1 << 20)
    assert bytes(received) == framed(message) + framed(b"next")
    worker.close()
    with pytest.raises(OSError, match=r".*"):
        for _ in range(3):
            channel.send(b"to nobody")


def test_a_message_that_needs_a_long_length(ends, monkeypatch):
    monkeypatch.setattr("cerebro.executors.wire.SHORT", 10)
    channel, theirs = ends
    worker = Connection(theirs.detach())
    channel.send(b"longer than ten bytes")
    assert worker.recv_bytes() == b"longer than ten bytes"
    worker.close()


@pytest.mark.parametrize("length", [PIECE - 5, PIECE - 4, PIECE - 3, 3 * PIECE - 4])
def test_a_message_as_long_as_the_read_buffer_is_received(ends, length):
    channel, theirs = ends
    worker = Connection(theirs.detach())
    message = bytes(length % 251 for _ in range(length))
    writer = threading.Thread(target=worker.send_bytes, args=(message,))
    writer.start()
    received = []
    while not received:
        received = channel.receive()
    writer.join()
    assert received == [message]
    assert channel.receive() == []
    worker.close()
    with pytest.raises(EOFError):
        channel.receive()

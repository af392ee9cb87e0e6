"""What a coordinator and its agents do with peers that lack the key, or break the protocol."""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import struct
import threading

import pytest

zmq = pytest.importorskip("zmq")
pytest.importorskip("zmq.utils.monitor")

from dialing import Apart, AtUnit, same, search  # noqa: E402

from cerebro.cluster import hub as module  # noqa: E402
from cerebro.cluster import wire  # noqa: E402
from cerebro.cluster.keys import Keys  # noqa: E402
from cerebro.cluster.messages import list_versions  # noqa: E402
from cerebro.cluster.states import (  # noqa: E402
    BlobServer,
    StateGone,
    fetch,
)
from cerebro.cluster.wire import (  # noqa: E402
    MAX_FRAME_BYTES,
    decode_message,
    dial,
    open_listener,
    split_frames,
    start_authenticator,
)
from cerebro.executors.wire import pickle_message  # noqa: E402

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""With which a connection of ZeroMQ begins."""
ANNOUNCED = b"\x02" + struct.pack(">Q", 4 << 30)
"""The beginning of a frame of 4 GB."""


class Payload:
    """A pickle that creates a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def hung_up(connection):
    """Whether the other end closes the connection, whatever it says before."""
    connection.settimeout(20)
    try:
        while connection.recv(1000):
            pass
    except ConnectionError:
        pass
    return True


def attack(port, keys, file, hangs_up):
    """Everything that can be tried without the key; return once all was refused."""
    begun = [b"GET / HTTP/1.1\r\n\r\n" * 10, GREETING + ANNOUNCED + bytes(1000)]
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in begun]
    for connection, first in zip(connections, begun, strict=True):
        connection.sendall(first)
    half = socket.create_connection(("127.0.0.1", port))
    half.sendall(GREETING + b"\x04\xc8\x05HELLO")
    half.close()
    wrong = Keys.generate()
    only_the_servers = Keys.generate()  # as one who has overheard which coordinator it is
    only_the_servers.server_public = keys.server_public
    for given in (None, wrong, only_the_servers):
        assert refuses(port, given, Payload(file))
    for connection in connections:
        assert not hangs_up or hung_up(connection)
        connection.close()
    assert not file.exists()


def refuses(port, keys, payload):
    """Whether a client with these keys is hung up on, without or with a handshake that failed."""
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    events = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    if keys is not None:
        peer.curve_serverkey = keys.server_public
        peer.curve_publickey, peer.curve_secretkey = keys.client_public, keys.client_secret
    peer.connect(f"tcp://127.0.0.1:{port}")
    hello = {
        "versions": list_versions(),
        "id": "x",
        "host": "x",
        "machine": "",
        "states": 1,
        "pid": 1,
    }
    with contextlib.suppress(zmq.Again):  # refused already: to wait for a connection is in vain
        peer.send_multipart([b"hello", json.dumps(hello).encode()], zmq.NOBLOCK)
        peer.send_multipart([b"answer", pickle.dumps(payload)], zmq.NOBLOCK)
    assert events.poll(20_000)
    event = zmq.utils.monitor.recv_monitor_message(events)["event"]
    context.destroy(linger=0)
    return event == zmq.EVENT_DISCONNECTED


def test_a_search_continues_among_hostile_peers(data, tmp_path, apart, monkeypatch):
    """Peers try the coordinator's port and that of an agent's states."""
    monkeypatch.setattr(module, "read_machine_id", lambda: "another one")
    monkeypatch.setenv("CEREBRO_CACHE", str(tmp_path / "coordinator"))
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 1)  # of the coordinator; agents wait longer
    executor = Apart(tmp_path, workers=2)
    met = []

    def meet():
        hub = executor._cluster
        agents = hub.nodes()
        ports = [hub.port, int(agents[0].states.address.rpartition(":")[2])]
        for port in ports:
            attack(port, hub.keys, tmp_path / "unpickled", hangs_up=port == hub.port)
        assert hub.nodes() == agents and not hub.refusals
        met.extend(ports)

    result = search(tmp_path / "run", data, executor, callbacks=[AtUnit(8, meet)])
    same(result, search(tmp_path / "here", data))
    assert len(met) == 2


@pytest.fixture
def pair():
    """A listener and a socket that has dialed in, with the same key."""
    keys, context = Keys.generate(), zmq.Context()
    guard = start_authenticator(context, keys)
    server, port = open_listener(context, keys, "127.0.0.1")
    yield server, port, keys, context
    guard.stop()
    context.destroy(linger=0)


def test_a_peer_that_exceeds_the_frame_limit_is_disconnected(pair):
    server, port, keys, context = pair
    greedy, modest = (dial(context, keys, f"127.0.0.1:{port}") for _ in range(2))
    greedy.send(bytes(MAX_FRAME_BYTES + 1))
    message = pickle_message({"array": bytes(3 * MAX_FRAME_BYTES)}, is_plain=True)
    modest.send_multipart(split_frames(message))
    _, *frames = server.recv_multipart(copy=False)
    assert decode_message(frames) == {"array": bytes(3 * MAX_FRAME_BYTES)}
    assert not server.poll(100)


def test_a_malformed_hello_is_refused_and_forgotten(pair, tmp_path):
    from cerebro.cluster.engine import Engine

    *_, keys, context = pair
    hub = module.Hub(keys, Engine(), "127.0.0.1")
    try:
        peer = dial(context, keys, f"127.0.0.1:{hub.port}")
        for hello in (b"[]", b"{", pickle.dumps(Payload(tmp_path / "x"))):
            peer.send_multipart([b"hello", hello])
            kind, text = peer.recv_multipart()
            assert (kind, text[:13]) == (b"refused", b"a wrong hello")
        # Without a hello, an answer is not read.
        peer.send_multipart([b"answer", pickle.dumps(Payload(tmp_path / "x"))])
        peer.send_multipart([b"hello", b"{"])
        peer.recv_multipart()
        assert not (tmp_path / "x").exists() and not hub.nodes()
    finally:
        hub.close()


def test_states_come_whole_or_not_at_all():
    keys, context = Keys.generate(), zmq.Context()
    guard = start_authenticator(context, keys)
    before = set(threading.enumerate())  # another test may have left such a thread
    server = BlobServer(context, keys, "127.0.0.1")
    large = bytes(range(256)) * 50_000
    server.blobs.update({1: large, 2: b"small"})
    address = f"127.0.0.1:{server.port}"
    socket = dial(context, keys, address)
    assert bytes(fetch(socket, 1, bool)) == large
    assert bytes(fetch(socket, 2, bool)) == b"small"
    for asked in (b"9" * 5_000, b"", b"x"):  # no number ends the thread
        socket.send(asked)
        assert socket.recv_multipart() == [b"", b""]
    del server.blobs[1]
    with pytest.raises(StateGone, match="no longer has it"):
        fetch(socket, 1, bool)
    socket.close()
    silent = dial(context, keys, "127.0.0.1:1")
    gone = threading.Event()
    threading.Timer(0.2, gone.set).start()
    with pytest.raises(StateGone, match="is gone"):
        fetch(silent, 1, gone.is_set)
    silent.close()
    server.close()
    late = dial(context, keys, address)
    with pytest.raises(StateGone):  # a thread that serves states at the end of Python fails
        new = set(threading.enumerate()) - before
        fetch(late, 2, lambda: "cerebro-states" not in {t.name for t in new if t.is_alive()})
    late.close()
    guard.stop()
    context.term()

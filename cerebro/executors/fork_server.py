"""Run the fork server: a process that has imported PyTorch and forks workers on request.

``python -m cerebro._worker serve SOCKET COORDINATOR MODULE...`` starts it. It has one thread, runs
no user code, and uses neither CUDA nor random numbers. `cerebro.executors.forked` is the
coordinator's side; `docs/design/startup.md` explains the design. A message consists of its length,
as four big-endian bytes, and JSON. Descriptors are sent with the length.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
from typing import Any

from cerebro.machine.generators import seed_anew
from cerebro.machine.imports import Sources, note_imported
from cerebro.machine.resources import end_with_parent, threads

LENGTH = struct.Struct("!I")
PASSED = 4  # descriptors in a request: standard output and error, socket, page of heartbeats
ALWAYS = ("numpy.random",)
WITH_TORCH = ("cerebro.torch",)  # also imported: every worker needs these modules sooner or later

imported: Sources = {}  # by this process as a fork server; empty in a worker started as a program
last_imported: str | None = None


def send(connection: socket.socket, message: dict[str, Any], files: tuple[int, ...] = ()) -> None:
    data = json.dumps(message).encode()
    if files:
        socket.send_fds(connection, [LENGTH.pack(len(data))], files)
    else:
        connection.sendall(LENGTH.pack(len(data)))
    connection.sendall(data)


def receive(connection: socket.socket, files: int = 0) -> tuple[dict[str, Any], list[int]]:
    """Receive a message with at most `files` descriptors; raise EOFError if the peer has closed."""
    head, passed, _, _ = socket.recv_fds(connection, LENGTH.size, files)
    if len(head) < LENGTH.size:
        raise EOFError
    (size,) = LENGTH.unpack(head)
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return json.loads(data), passed


def serve(arguments: list[str]) -> list[str]:
    """Fork workers on request, until the coordinator ends.

    Return only in the forked workers, with the arguments of `cerebro._worker.main`.
    """
    global last_imported
    end_with_parent()
    coordinator = int(arguments[1])
    if os.getppid() != coordinator:  # it ended before `end_with_parent`
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(arguments[0]))
    gc.disable()  # imports make many objects and hardly any garbage: collections take a tenth
    for module in (*arguments[2:], *ALWAYS, *(WITH_TORCH if "torch" in arguments else ())):
        with contextlib.suppress(Exception):  # a worker's own import will report it
            importlib.import_module(module)
    note_imported(imported)
    last_imported = next(reversed(sys.modules))
    # OpenBLAS starts its threads when NumPy is imported. It ends them before a fork, and restarts
    # them when they are needed.
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    gc.freeze()  # a collection in a worker would copy the shared pages
    try:
        send(
            connection,
            {
                "threads": threads(),
                "sources": [[*key, time] for key, time in imported.items()],
                "files": {
                    name: getattr(sys.modules.get(name), "__file__", None) for name in arguments[2:]
                },
            },
        )
        while True:
            request, files = receive(connection, PASSED)
            if threads() > 1:
                os._exit(1)
            worker = _fork(coordinator)
            if worker == 0:
                connection.close()
                return _become_worker(request, files)
            for file in files:
                os.close(file)
            send(connection, {"worker": worker})
    except (EOFError, OSError):  # the coordinator closed the socket, or a resource is missing
        os._exit(0)


def _fork(coordinator: int) -> int:
    """Fork a child of the coordinator; return its process id, and 0 in the child.

    An intermediate process forks it and ends at once, so that the coordinator adopts the child.
    """
    is_adopted, adopt = os.pipe()
    read_end, write_end = os.pipe()
    between = os.fork()
    if between == 0:
        worker = os.fork()
        if worker > 0:
            os.write(write_end, b"%d" % worker)
            os._exit(0)
        for end in (adopt, read_end, write_end):
            os.close(end)
        # Nothing arrives if the server dies before the child is adopted.
        if os.read(is_adopted, 1) != b"1" or os.getppid() != coordinator:
            os._exit(0)
        os.close(is_adopted)
        return 0
    os.close(is_adopted)
    os.close(write_end)
    answer = os.read(read_end, 32)
    os.close(read_end)
    os.waitpid(between, 0)
    if not answer:
        raise OSError("the second fork failed")
    os.write(adopt, b"1")
    os.close(adopt)
    return int(answer)


def _become_worker(request: dict[str, Any], files: list[int]) -> list[str]:
    """Set up a fork's environment as in a started program."""
    output, error, connection, beat = files
    os.setsid()
    os.dup2(output, 1)
    os.dup2(error, 2)
    os.close(output)
    os.close(error)
    for file in (connection, beat):
        os.set_inheritable(file, False)
    with contextlib.suppress(OSError):  # deleted meanwhile; the run sets its own folder
        os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["variables"])
    gc.enable()
    seed_anew()
    arguments = [str(connection), str(beat)]
    del sys.orig_argv[-len(sys.argv) + 1 :]
    sys.orig_argv += arguments
    sys.argv[1:] = arguments
    return arguments

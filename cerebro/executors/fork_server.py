"""Fork workers from a process that has imported PyTorch, instead of starting them as programs.

``python -m cerebro._worker serve SOCKET COORDINATOR MODULE...`` starts the fork server, which runs
`serve`. It has one thread, runs no user code, and uses neither CUDA nor random numbers. A message
consists of its length, as four big-endian bytes, and JSON. Descriptors are sent with the length.

`ForkServer` and `ForkServers` are the coordinator's side. The new worker becomes a child of the
coordinator, like a started one. So it is monitored, killed and reaped in the same way, and does not
depend on its server. If anything fails here, the worker is started as a program.
`docs/design/startup.md` explains the design.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

from cerebro.arguments import read_switch
from cerebro.machine.generators import seed_anew
from cerebro.machine.imports import Sources, are_current, import_early, note_imported
from cerebro.machine.resources import (
    adopt_orphans,
    end_with_parent,
    is_stopped,
    read_inherited_attributes,
    threads,
)

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
    import_early([*arguments[2:], *ALWAYS, *(WITH_TORCH if "torch" in arguments else ())])
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


# --- the coordinator's side ----------------------------------------------------

PROGRAM = """
import sys
sys.path[:] = filter(None, sys.path)
import runpy
try:
    runpy.run_module("cerebro._worker", run_name="__main__", alter_sys=True)
except ImportError as error:
    sys.exit(f"cerebro: a worker process cannot start: {error}")
"""
"""Runs ``python -m cerebro._worker``, but without the working directory first on the path:
otherwise a file there with the name of a library would be imported instead of the library.
"""


def start_program(
    arguments: Iterable[str], variables: Mapping[str, str], files: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start the program in a new session with the open descriptors `files`, or raise OSError."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=files,
        start_new_session=True,
        env=variables,
    )


VARIABLE = "CEREBRO_FORK"  # if 0, every worker is started as a program; forking works only on Linux
PRELOADED = ("torch",)  # imported by a fork server, if the coordinator has imported them
MOST_SERVERS = 2
START_SECONDS = 120.0  # for a server to start: Python may start from a slow disk
FORK_SECONDS = 5.0  # a server that does not answer within this time is no longer used
UNREAD = ("COLUMNS", "LINES", "MLFLOW_", "PYTEST_CURRENT_TEST", "WANDB_")
"""Prefixes of the names of variables that workers do not read."""
HANDED_OVER = (*UNREAD, "AWS_")
"""Prefixes of the names of variables that change while a program runs and that no library reads
when it is imported. All other variables must have the same values in the server as in its workers.
"""

Conditions = tuple[Any, ...]
"""Everything that a started program would inherit and that a fork inherits from its server."""


def forks_workers() -> bool:
    """Return whether workers without a GPU are forked; raise InputError for a bad variable."""
    enabled = read_switch(VARIABLE, default=True)
    # A process that ignores SIGCHLD cannot wait for a child, nor can its fork server.
    ignores = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    return enabled and sys.platform == "linux" and not ignores


class Child:
    """A child process, with those methods of `subprocess.Popen` that are used for workers."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Reap the process if it has ended; return its exit status, negative for a signal."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # reaped elsewhere: the status is lost
                self.returncode = 0
            else:
                if pid != 0:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait until the process has ended; raise subprocess.TimeoutExpired on a timeout."""
        end = time.monotonic() + timeout
        delay = 0.0005
        while (code := self.poll()) is None:
            seconds = end - time.monotonic()
            if seconds <= 0:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(min(delay, seconds))
            delay = min(2 * delay, 0.05)
        return code


class Unusable(Exception):
    """Raised if the server cannot fork, and a new server could not either."""


class ForkServer:
    """A fork server with its socket and the conditions under which it was started."""

    def __init__(
        self, conditions: Conditions, variables: Mapping[str, str], modules: Sequence[str]
    ) -> None:
        self.conditions = conditions
        self.modules = frozenset(modules)
        self.sources: Sources = {}
        self.files: dict[str, str | None] = {}
        self.is_ready = False
        self.connection, theirs = socket.socketpair()
        try:
            arguments = ["serve", str(theirs.fileno()), str(os.getpid()), *modules]
            self.process = start_program(arguments, variables, [theirs.fileno()])
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()
        self.connection.settimeout(FORK_SECONDS)

    def prepare(self, *, wait: bool) -> bool:
        """Return whether the server can fork; raise Unusable if it never can, or OSError."""
        if not self.is_ready:
            end = time.monotonic() + START_SECONDS
            while not wait_for([self.connection], 0.5 if wait else 0.0):
                if not wait:
                    return False
                if time.monotonic() > end or is_stopped(self.process.pid):
                    raise TimeoutError
            try:
                report, _ = receive(self.connection)
            except EOFError:
                raise Unusable from None
            self.sources = {(name, file): changed for name, file, changed in report["sources"]}
            self.files = report["files"]
            if report["threads"] > 1:
                raise Unusable
            self.is_ready = True
        if any(not _is_ours(name, file) for name, file in self.files.items()):
            raise Unusable
        if is_stopped(self.process.pid):
            raise TimeoutError
        return True

    def fork(self, variables: Mapping[str, str], files: tuple[int, int]) -> Child:
        """Return a new worker with the socket and page `files`, or raise EOFError or OSError."""
        request = {"directory": os.getcwd(), "variables": dict(variables)}  # noqa: PTH109
        with adopt_orphans():
            send(self.connection, request, (1, 2, *files))
            answer, _ = receive(self.connection)
        os.waitid(
            os.P_PID, answer["worker"], os.WEXITED | os.WNOHANG | os.WNOWAIT
        )  # checks it is ours
        return Child(answer["worker"])

    def stop(self) -> None:
        """Kill the server. Its workers continue."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


class ForkServers:
    """The fork servers of this process, one per set of conditions."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._servers: list[ForkServer] = []  # the last was used most recently
        self._unusable: set[Conditions] = set()
        self._of_parent: list[ForkServer] = []
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def start(self, variables: Mapping[str, str], modules: Sequence[str]) -> None:
        """Start the fork server for workers with these variables, unless it is already running."""
        with self._lock, contextlib.suppress(OSError):
            self._find_server(variables, modules)

    def fork(
        self, variables: Mapping[str, str], files: tuple[int, int], *, wait: bool
    ) -> Child | None:
        """Return a new worker; None if it must be started as a program.

        `files` are the descriptors of its socket and of its page of heartbeats. Without `wait`, a
        server that is not ready is started for later workers.
        """
        with self._lock:
            server = None
            try:
                server = self._find_server(variables, [])
                if server is None or not server.prepare(wait=wait):
                    return None
                return server.fork(variables, files)
            except BaseException as error:
                if server is not None:  # stop it even on Ctrl-C: an answer may still arrive
                    self._stop(server)
                    if isinstance(error, Unusable):
                        self._unusable.add(server.conditions)
                if isinstance(error, (EOFError, OSError, Unusable)):
                    return None
                raise

    def close(self) -> None:
        """Stop all servers; called when the interpreter exits."""
        with self._lock:
            while self._servers:
                self._stop(self._servers[0])
            self._unusable.clear()

    def processes(self) -> list[int]:
        return [server.process.pid for server in self._servers]

    def _find_server(
        self, variables: Mapping[str, str], modules: Sequence[str]
    ) -> ForkServer | None:
        """Return the server for workers with these variables, started if necessary."""
        conditions = _determine_conditions(variables)
        needed = dict.fromkeys([*modules, *(name for name in PRELOADED if name in sys.modules)])
        for server in self._servers:
            if server.conditions == conditions:
                # A program that is started now must import the same files.
                is_current = server.process.poll() is None and are_current(server.sources)
                if is_current and server.modules >= needed.keys():
                    self._servers.remove(server)
                    self._servers.append(server)
                    return server
                self._stop(server)
                break
        if conditions in self._unusable:
            return None
        while len(self._servers) >= MOST_SERVERS:
            self._stop(self._servers[0])
        self._servers.append(ForkServer(conditions, variables, list(needed)))
        return self._servers[-1]

    def _stop(self, server: ForkServer) -> None:
        self._servers.remove(server)
        server.stop()

    def _leave_to_parent(self) -> None:
        """In a fork, close the copied sockets: a server ends when the last copy is closed."""
        self._lock = threading.RLock()
        for server in self._servers:
            with contextlib.suppress(OSError):
                server.connection.close()
        self._of_parent += self._servers
        self._servers = []


def _determine_conditions(variables: Mapping[str, str]) -> Conditions:
    """Return what a server and its workers must have in common, or raise OSError."""
    fixed = {name: value for name, value in variables.items() if not name.startswith(HANDED_OVER)}
    return sys.executable, tuple(sorted(fixed.items())), read_inherited_attributes()


def _is_ours(module: str, file: str | None) -> bool:
    """Return whether the server and this process imported a module from one file, if both did."""
    here = getattr(sys.modules.get(module), "__file__", None)
    return None in (here, file) or Path(str(here)).resolve() == Path(str(file)).resolve()

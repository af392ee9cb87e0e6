"""A way between an agent and its coordinator that can be interrupted."""

from __future__ import annotations

import contextlib
import socket
import threading


class Way:
    """Passes connections on to another port of this machine; `port` is its own."""

    def __init__(self, target):
        self._target = target
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self._ends = []
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self):
        """End the connections; new ones can be made."""
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        """End the connections, and refuse others."""
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self.cut()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._door.accept()
                try:
                    there = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    here.close()
                    continue
                self._ends += [here, there]
                for ends in ((here, there), (there, here)):
                    threading.Thread(target=_pass_on, args=ends, daemon=True).start()


def _pass_on(source, target):
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            target.sendall(piece)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

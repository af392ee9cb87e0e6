"""Serve the page of runs to this machine's browser, and to nobody else.

The server listens on 127.0.0.1 only. Every request must name this server as its host (else another
name could be pointed at it), and, if it says from which page it comes, this page. What it asks for
runs needs the token, which is in the part of the page's address that a browser does not send.
There are no cookies, so a page from elsewhere has nothing to ride on, and no header that would let
it read an answer. Static files have no data and need no token.
"""

from __future__ import annotations

import gzip
import hmac
import io
import json
import re
import secrets
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePath
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cerebro.errors import CerebroError, text_of
from cerebro.watch import page
from cerebro.watch.actions import REFUSED, Prover, Rate, TooMany, perform
from cerebro.watch.runs import WatchedRun, WatchedRuns

MAX_CONNECTIONS = 32
SECONDS = 10.0
"""How long a request may take to arrive, and its answer to be taken."""

MAX_BODY = 64 << 10
MAX_PINS = 50
GZIP_FROM = 1024  # bytes
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

HEADERS = {
    "Content-Security-Policy": page.SERVED_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}

ROUTE = re.compile(r"/api/run/(\d{1,6})(?:/(action|about|trial/(\d{1,10})))?", re.ASCII)


class Refused(Exception):
    """A request is refused: with a status and, as JSON, the reason."""

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class Server(ThreadingHTTPServer):
    """Serves the runs in a folder, or one run, until it is closed.

    Raises OSError if the port cannot be used.
    """

    daemon_threads = True
    allow_reuse_address = False
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, runs: WatchedRuns, *, port: int = 0, read_only: bool = False) -> None:
        self.runs = runs
        self.read_only = read_only
        self.token = secrets.token_urlsafe(24)
        self.prover = Prover()
        self.rate = Rate()
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(("127.0.0.1", port), Handler)
        self.hosts = {f"{name}:{self.port}" for name in ("127.0.0.1", "localhost", "[::1]")}

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """The page's address, with the token in its fragment."""
        return f"http://127.0.0.1:{self.port}/#token={self.token}"

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except Exception:  # no thread; after Ctrl-C it may run already, and release it itself
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a browser that leaves is no error of this process."""

    def server_close(self) -> None:
        self.prover.close()
        super().server_close()


class _Incoming(io.RawIOBase):
    """What a connection receives, all of it before a deadline; else TimeoutError."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + SECONDS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server
    server_version = "cerebro"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = SECONDS

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Incoming(self.connection))

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing; an address in a log would be one more place for names of runs."""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a malformed request, or another method; without Python's page."""
        self._send(int(code), b"", "text/plain")

    def _answer(self, handle: Any) -> None:
        self.close_connection = True
        try:
            status, body, kind = handle()
        except Refused as refused:
            status, kind = refused.status, "application/json"
            body = json.dumps({"error": refused.text}).encode() if refused.text else b""
        except (TimeoutError, ConnectionError):
            return
        except (CerebroError, OSError) as error:
            status, kind = 503, "application/json"
            body = json.dumps({"error": text_of(error)}).encode()
        self._send(status, body, kind)

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.close_connection = True
        zipped = "gzip" in self.headers.get("Accept-Encoding", "") if self.headers else False
        if zipped and len(body) >= GZIP_FROM:
            body = gzip.compress(body, 5)
        else:
            zipped = False
        self.connection.settimeout(SECONDS)
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if zipped:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(body)

    # --- who asks ----------------------------------------------------------

    def _check_sender(self) -> None:
        """Refuse requests that name another host, or that come from another page."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0] not in self.server.hosts:
            raise Refused(421)
        origins = self.headers.get_all("Origin") or []
        if any(origin != f"http://{hosts[0]}" for origin in origins):
            raise Refused(403)

    def _check_token(self) -> None:
        given = self.headers.get_all("Authorization") or [""]
        wanted = f"Bearer {self.server.token}"
        if len(given) != 1 or not hmac.compare_digest(given[0].encode(), wanted.encode()):
            raise Refused(401)

    # --- what is asked -----------------------------------------------------

    def _get(self) -> tuple[int, bytes, str]:
        self._check_sender()
        path, query = self._split_path()
        if path == "/":
            return 200, page.make_served().encode(), TYPES[".html"]
        if path == "/page.css" or path.removeprefix("/") in page.SCRIPTS:
            name = path.removeprefix("/")
            return 200, page.read_file(name).encode(), TYPES[PurePath(name).suffix]
        self._check_token()
        if path == "/api/runs":
            return self._json({"runs": self.server.runs.describe(), "read_only": self._read_only()})
        run, what, trial = self._find_run(path)
        if what == "action":
            raise Refused(405)
        if what == "about":
            return self._json(run.about())
        if trial is not None:
            return self._json(run.describe_trial(trial))
        pins = [int(n) for n in query.get("pins", "").split(",") if n.isdecimal() and len(n) < 10]
        number = query.get("page", "0")
        shown = int(number) if number.isdecimal() and len(number) < 7 else 0
        proofs = self.server.prover.outcomes(run.folder)
        body = run.answer(query.get("after", ""), shown, tuple(pins[:MAX_PINS]), proofs)
        return 200, body, "application/json"

    def _post(self) -> tuple[int, bytes, str]:
        self._check_sender()
        site = self.headers.get("Sec-Fetch-Site", "same-origin")
        if self.headers.get("Origin") is None or site != "same-origin":
            raise Refused(403)
        self._check_token()
        if self.headers.get_content_type() != "application/json":
            raise Refused(415)
        run, what, _ = self._find_run(self._split_path()[0])
        if what != "action":
            raise Refused(405)
        request = self._read_body()
        if self.server.read_only:
            raise Refused(403, "this page only shows: it was started with --read-only")
        try:
            self.server.rate.count()
            told = perform(run.folder, request, self.server.prover)
        except TooMany:
            raise Refused(429, "too many actions in a second: wait a moment") from None
        except REFUSED as error:
            raise Refused(409, text_of(error)) from error
        return self._json(told)

    def _split_path(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        if parts.scheme or parts.netloc:
            raise Refused(404)
        try:
            query = parse_qs(parts.query, max_num_fields=8)
        except ValueError:
            raise Refused(400) from None
        return parts.path, {name: values[0] for name, values in query.items()}

    def _find_run(self, path: str) -> tuple[WatchedRun, str | None, int | None]:
        match = ROUTE.fullmatch(path)
        run = None if match is None else self.server.runs.get(int(match[1]))
        if match is None or run is None:
            raise Refused(404)
        return run, match[2], None if match[3] is None else int(match[3])

    def _read_body(self) -> dict[str, Any]:
        length = self.headers.get_all("Content-Length") or []
        if self.headers.get("Transfer-Encoding") is not None or len(length) != 1:
            raise Refused(411)
        if not length[0].isdecimal() or len(length[0]) > 9:
            raise Refused(400)
        if int(length[0]) > MAX_BODY:
            raise Refused(413)
        try:
            body = json.loads(self.rfile.read(int(length[0])))
        except (ValueError, RecursionError):
            raise Refused(400, "the body is not JSON") from None
        if not isinstance(body, dict):
            raise Refused(400, "the body is not an object")
        return body

    def _read_only(self) -> bool:
        return self.server.read_only

    @staticmethod
    def _json(value: Any) -> tuple[int, bytes, str]:
        return 200, json.dumps(value, separators=(",", ":")).encode(), "application/json"

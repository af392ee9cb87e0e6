"""A headless Chromium for tests of pages, driven by its DevTools protocol over two pipes.

Needs the program alone: Debian's package `chromium`, or any Chrome or Chromium on the path.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 20.0


def find_chromium() -> str | None:
    """Return the browser's path, or None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._buffer = b""
        self._count = 0
        self._session: str | None = None
        self.said: list[str] = []
        """Errors and warnings on the console, and uncaught exceptions."""
        self.requests: list[str] = []
        """The addresses that were asked for."""

    def open(self, url: str, width: int = 1280, height: int = 900) -> None:
        """Open an address, and wait until it has loaded."""
        if self._session is None:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        self.resize(width, height)
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def use_look(self, look: str) -> None:
        """Make the system's look ``light`` or ``dark``."""
        feature = {"name": "prefers-color-scheme", "value": look}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def run(self, script: str) -> Any:
        """Evaluate JavaScript, also a promise, and return its value."""
        told = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in told:
            raise AssertionError(f"{script}: {told['exceptionDetails']}")
        return told["result"].get("value")

    def wait(self, condition: str, seconds: float = SECONDS) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"not true within {seconds} s: {condition}"
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Click an element with the mouse, where it is once the mouse is over it."""
        chosen = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{chosen}.scrollIntoView({{block: 'center'}})")
        self._move_mouse(chosen, "mouseMoved")  # rows stand still under it
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._move_mouse(chosen, kind)

    def _move_mouse(self, chosen: str, kind: str) -> None:
        box = f"(b => [b.x + b.width / 2, b.y + b.height / 2])({chosen}.getBoundingClientRect())"
        x, y = self.run(box)
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def type(self, text: str) -> None:
        """Type text in place of what the focused field holds."""
        self.run("document.activeElement.select()")
        self.call("Input.insertText", text=text)

    def draw(self, file: Path, *, whole: bool = True) -> None:
        """Write a picture of the page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None and not method.startswith("Target."):
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            told = self._read()
            if told.get("id") == self._count:
                assert "error" not in told, f"{method}: {told['error']}"
                result: dict[str, Any] = told["result"]
                return result
            self._note(told)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._reading, 1 << 20)
            assert read, "the browser has ended"
            self._buffer += read
        line, self._buffer = self._buffer.split(b"\0", 1)
        told: dict[str, Any] = json.loads(line)
        return told

    def _note(self, told: dict[str, Any]) -> None:
        params = told.get("params", {})
        if told["method"] == "Runtime.exceptionThrown":
            self.said.append(json.dumps(params["exceptionDetails"]))
        elif told["method"] == "Runtime.consoleAPICalled":
            self.said.append(f"{params['type']}: {params['args']}")
        elif told["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.said.append(params["entry"]["text"])
        elif told["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextlib.contextmanager
def start_chromium(folder: Path) -> Iterator[Page]:
    """Start a browser with its own profile in a folder, and end it after the block."""
    program = find_chromium()
    assert program is not None
    to_browser, writing = os.pipe()
    reading, from_browser = os.pipe()

    def give_pipes() -> None:  # the browser reads from descriptor 3 and writes to descriptor 4
        first, second = os.dup(to_browser), os.dup(from_browser)
        os.dup2(first, 3)
        os.dup2(second, 4)

    process = subprocess.Popen(
        [
            program, "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
            "--no-first-run", "--disable-dev-shm-usage", "--disable-background-networking",
            "--disable-component-update", "--hide-scrollbars", f"--user-data-dir={folder}",
        ],
        close_fds=False, preexec_fn=give_pipes, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(reading, writing)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(reading)
        os.close(writing)

"""A small search in a process of its own, which can be watched and steered while it trains."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = """
import sys
import time
import numpy as np
import cerebro

SECONDS = float(sys.argv[2])


class Line:
    framework = "numpy"

    def __init__(self, lr, width):
        self.lr = lr
        self.w = np.random.normal(size=3) * width

    def train_batch(self, batch):
        time.sleep(SECONDS)
        error = np.asarray(batch["x"]) @ self.w - np.asarray(batch["y"])
        self.w = self.w - self.lr * (np.asarray(batch["x"]) * error[:, None]).mean(0)
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch):
        error = np.asarray(batch["x"]) @ self.w - np.asarray(batch["y"])
        return {"loss": float((error**2).mean())}

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])


def build(config):
    print("a rate of", config["lr"])
    if config["lr"] > 100:
        raise ValueError("too fast")
    return Line(config["lr"], config["width"])


SPACE = {"lr": cerebro.loguniform(0.001, 0.3), "width": [1, 2, 3]}

if __name__ == "__main__":
    rows = np.random.default_rng(0).normal(size=(64, 3))
    data = {"x": rows, "y": rows @ [1.0, 2.0, 3.0]}
    cerebro.search(build, SPACE, data, run=sys.argv[1], epochs=int(sys.argv[3]),
                   n_trials=int(sys.argv[4]), batch_size=8, workers=2, validation=0.25,
                   progress=False, seed=3, keep="all")
"""


def start_search(
    folder: Path, *, seconds: float = 0.0, epochs: int = 4, trials: int = 6
) -> subprocess.Popen[bytes]:
    """Start a search whose run is ``folder/run``; each training batch sleeps for some seconds."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    words = map(str, (folder / "run", seconds, epochs, trials))
    return subprocess.Popen([sys.executable, str(program), *words], cwd=folder)


def ask(
    server: Any, path: str, *, method: str = "GET", body: bytes | None = None, **headers: str | None
) -> tuple[int, dict[str, str], bytes]:
    """Ask a server as its own page does, but for the given headers; None leaves one out."""
    given: dict[str, str | None] = {
        "Host": f"127.0.0.1:{server.port}",
        "Authorization": f"Bearer {server.token}",
    }
    if body is not None:
        given |= {"Origin": f"http://127.0.0.1:{server.port}", "Content-Type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        if body is not None and "Content-Length" not in given:
            given["Content-Length"] = str(len(body))
        for name, value in given.items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def read(server: Any, path: str) -> Any:
    status, _, body = ask(server, path)
    assert status == 200, (status, body)
    return json.loads(body)


def order(server: Any, **request: Any) -> tuple[int, Any]:
    """Ask for an action."""
    body = json.dumps(request).encode()
    status, _, told = ask(server, "/api/run/0/action", method="POST", body=body)
    return status, json.loads(told) if told else None


class Reader:
    """Merges answers as the page does."""

    def __init__(self) -> None:
        self.cursor = ""
        self.trials: dict[int, dict[str, Any]] = {}
        self.units: list[Any] = []
        self.events: list[Any] = []
        self.answers = 0

    def take(self, answer: dict[str, Any]) -> None:
        if answer.get("same"):
            return
        self.answers += 1
        if answer["full"]:
            self.trials, self.units, self.events = {}, [], []
        self.cursor = answer["cursor"]
        self.run = answer["run"]
        for row in answer["trials"]:
            before = self.trials.get(row["n"], {"curves": {}, "times": []})
            begin = row["from"] - (row["after"] or 0)
            row["times"] = before["times"][:begin] + row["times"]
            row["curves"] = {
                name: before["curves"].get(name, [])[:begin] + values
                for name, values in row["curves"].items()
            }
            self.trials[row["n"]] = row
        assert set(answer["shown"]) == set(self.trials)
        self.units += answer["units"]
        self.events += answer["events"]

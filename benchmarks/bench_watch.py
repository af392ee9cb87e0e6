"""The cost of the page: ``python -m benchmarks.bench_watch``.

- A poll with nothing new, over HTTP: processor time of the server, milliseconds. Bar: 2 ms.
- 10,000 trials of nine epochs: the first answer, and the next one after one more epoch, in
  milliseconds of processor time; bytes of the first answer, compressed.
- A search with a page that polls it, over the same search without: the ratio of their makespans,
  in pairs.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import itertools
import json
import random
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import cerebro
from benchmarks.harness import Bench, parser
from cerebro.watch.runs import WatchedRuns
from cerebro.watch.server import Server
from cerebro.watch.view import View

TRIALS, EPOCHS, METRICS = 10_000, 9, ("train_loss", "val_loss", "loss")
NAMES = itertools.count()


class Idle:
    """Trains nothing, for a while."""

    framework = "numpy"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def train_batch(self, batch: Any) -> dict[str, float]:
        time.sleep(self.seconds)
        return {"loss": 1.0}

    def eval_batch(self, batch: Any) -> dict[str, float]:
        return {"loss": 1.0}

    def state_dict(self) -> dict[str, Any]:
        return {"w": np.zeros(8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def build(config: dict[str, Any]) -> Idle:
    return Idle(0.001 + 0 * config["lr"])


def search(folder: Path, trials: int = 16, epochs: int = 10) -> Path:
    data = {"x": np.zeros((64, 2), np.float32)}
    run = folder / f"run{next(NAMES)}"
    cerebro.search(
        build, {"lr": cerebro.uniform(0.0, 1.0)}, data, run=run, epochs=epochs, n_trials=trials,
        workers=2, validation=0.25, batch_size=8, progress=False,
    )  # fmt: skip
    return run


def serve(place: Path) -> Server:
    server = Server(WatchedRuns(place))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def ask(server: Server, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", path, headers={"Authorization": f"Bearer {server.token}"})
    body = connection.getresponse().read()
    connection.close()
    return json.loads(body)


def fill(run: Path) -> None:
    """Give a run 10,000 trials that have ended."""
    draw = random.Random(0)
    with sqlite3.connect(run / "run.sqlite") as store:
        store.execute("DELETE FROM metrics")
        store.execute("DELETE FROM trials")
        store.executemany(
            "INSERT INTO trials (number, config, status, epochs) VALUES (?, ?, 'finished', ?)",
            ((n, json.dumps({"lr": draw.random(), "width": n % 7}), EPOCHS) for n in range(TRIALS)),
        )
        store.executemany(
            "INSERT INTO metrics VALUES (?, ?, ?, ?)",
            ((n, e, m, draw.random()) for n in range(TRIALS) for e in range(EPOCHS)
             for m in METRICS),
        )  # fmt: skip


def cpu(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.process_time()
    value = call()
    return 1e3 * (time.process_time() - begin), value


@contextlib.contextmanager
def watch(folder: Path) -> Iterator[None]:
    """Serve a folder from a separate process, and poll its newest run as a page does."""
    command = [sys.executable, "-m", "cerebro", "watch", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url, token = process.stdout.readline().split()[-1].split("/#token=")
        end = threading.Event()
        thread = threading.Thread(target=poll, args=(url, token, end))
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()
            process.terminate()


def poll(url: str, token: str, end: threading.Event) -> None:
    cursor = ""

    def read(path: str) -> Any:
        headers = {"Authorization": f"Bearer {token}"}
        with urllib.request.urlopen(urllib.request.Request(url + path, headers=headers)) as answer:
            return json.load(answer)

    while not end.wait(1.0):
        newest = max(read("/api/runs")["runs"], key=lambda run: run.get("started") or 0.0)
        with contextlib.suppress(urllib.error.HTTPError):  # the store is being made
            cursor = read(f"/api/run/{newest['id']}?after={cursor}")["cursor"]


def measure(folder: Path) -> float:
    begin = time.perf_counter()
    search(folder, epochs=40)
    return time.perf_counter() - begin


def main() -> int:
    arguments = parser(__doc__ or "").parse_args()
    bench = Bench("The page of a run", arguments.json)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = search(folder, trials=4, epochs=2)
        server = serve(run)
        cursor = ask(server, "/api/run/0")["cursor"]
        polls = 20 if arguments.quick else 200
        told, spent = server.runs.get(0), []
        assert told is not None
        for _ in range(polls):
            time.sleep(0.02)
            milliseconds, body = cpu(lambda: told.answer(cursor, 0, (), {}))
            assert b'"same":true' in body
            spent.append(milliseconds)
        bench.add("a poll with nothing new", sorted(spent)[polls // 2], "ms", bar="<= 2")
        milliseconds, _ = cpu(lambda: [ask(server, f"/api/run/0?after={cursor}") for _ in spent])
        bench.add("the same with its request, client and server", milliseconds / polls, "ms")
        server.shutdown()
        server.server_close()
        shutil.copytree(run, folder / "many")
        fill(folder / "many")
        view = View(folder / "many")
        milliseconds, _ = cpu(lambda: view.refresh(now=0.0))
        bench.add("10,000 trials: the first reading", milliseconds, "ms")
        milliseconds, answer = cpu(view.answer)
        bench.add("10,000 trials: the first answer", milliseconds, "ms")
        body = json.dumps(answer, separators=(",", ":")).encode()
        bench.add(
            "10,000 trials: bytes of the first answer, gzip", len(gzip.compress(body, 5)), "B"
        )
        with sqlite3.connect(folder / "many" / "run.sqlite") as store:
            store.execute("INSERT INTO metrics VALUES (5, 9, 'loss', 0.5)")
        milliseconds, _ = cpu(lambda: (view.refresh(now=9.0), view.answer(answer["cursor"])))
        bench.add("10,000 trials: one more epoch", milliseconds, "ms")
        rounds = 1 if arguments.quick else arguments.rounds
        ratios, seconds = [], []
        for _ in range(rounds):
            with watch(folder):
                time.sleep(2.0)
                seconds.append(measure(folder))
            ratios.append(seconds[-1] / measure(folder))
        ratio, ours = statistics.median(ratios), statistics.median(seconds)
        bench.add("a search that is watched", ours, "s", reference="alone", ratio=ratio)
        bench.report()
    return 0


if __name__ == "__main__":
    sys.exit(main())

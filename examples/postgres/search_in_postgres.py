"""A search whose workers are sessions of a PostgreSQL server, one each.

    psql -v python=/opt/cerebro/bin/python -f examples/postgres/cerebro_worker.sql -d clicks
    python examples/postgres/search_in_postgres.py --uri postgresql:///clicks --sessions 8

Read the dangers in cerebro_worker.sql first. It needs adbc-driver-postgresql here, and Cerebro with
its `cluster` extra here and on the server's machine.
"""

from __future__ import annotations

import _thread
import argparse
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import adbc_driver_postgresql.dbapi as postgres
import torch
from sklearn.datasets import load_digits
from torch import nn

import cerebro
from cerebro.cluster import Executor


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(dim=1) == target).float().mean()


def build(config: dict) -> cerebro.torch.Model:
    hidden = config["hidden"]
    net = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    return cerebro.torch.Model(
        net,
        optimizer=torch.optim.Adam(net.parameters(), lr=config["lr"]),
        loss=nn.functional.cross_entropy,
        metrics={"accuracy": accuracy},
        inputs="x",
        target="y",
    )


def make_data(folder: str) -> cerebro.Dataset:
    digits = load_digits()
    arrays = {"x": (digits.data / 16).astype("float32"), "y": digits.target.astype("int64")}
    return cerebro.shard(arrays, folder, shards=8, exist_ok=True, progress=False)


class Session:
    """A session of the server that is one worker, called from a thread.

    `failed` is called if it ends before the search does.
    """

    def __init__(self, uri: str, hub: str, key: str, failed: Callable[[], None]) -> None:
        self._failed = failed
        self._connection = postgres.connect(uri)
        self._cursor = self._connection.cursor()
        self._thread = threading.Thread(target=self._call, args=(hub, key))
        self._thread.start()

    def _call(self, hub: str, key: str) -> None:
        try:
            self._cursor.execute("select cerebro_worker($1, $2)", (hub, key))
            status = self._cursor.fetchone()[0]
            print(f"a session has returned {status}\n", end="", flush=True)
            has_failed = not status.startswith("0:")
        except postgres.Error as error:
            print(f"a session has failed: {str(error).splitlines()[0]}\n", end="", flush=True)
            has_failed = True
        if has_failed:
            self._failed()

    def end(self) -> None:
        """Wait for its end, which comes with the search's; cancel it if it does not come."""
        self._thread.join(30)
        if self._thread.is_alive():
            self._cursor.adbc_cancel()
            self._thread.join()
        self._cursor.close()
        self._connection.close()


@contextmanager
def sessions(count: int, uri: str, hub: str, key: str) -> Iterator[None]:
    """Keep some sessions working in the block, which is interrupted when all have failed."""
    started: list[Session] = []
    failures, lock = [0], threading.Lock()

    def failed() -> None:
        with lock:
            failures[0] += 1
            if failures[0] == count:
                _thread.interrupt_main()  # it would wait for agents that never come

    try:
        for _ in range(count):
            started.append(Session(uri, hub, key, failed))
        yield
    except KeyboardInterrupt:
        if failures[0] == count:
            raise SystemExit("all sessions have failed, as said above") from None
        raise
    finally:
        for session in started:
            session.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uri", default="postgresql:///postgres")
    parser.add_argument("--sessions", type=int, default=2)
    parser.add_argument("--listen", default="127.0.0.1:7070", help="where the search listens")
    parser.add_argument("--hub", help="the same, as the server's machine reaches it")
    parser.add_argument("--key", default="cluster.key")
    parser.add_argument("--data", default="data/digits-flat")
    parser.add_argument("--run", default="runs/in-postgres")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--trials", type=int, default=8)
    options = parser.parse_args()

    train, valid = make_data(options.data).split(0.75, 0.25, stratify="y")
    executor = None
    if options.sessions:
        executor = Executor(options.sessions, listen=options.listen, key=options.key)
        if not Path(options.key).exists():
            raise SystemExit(f"make a key: (umask 077; openssl rand -hex 32 > {options.key})")
    key = Path(options.key).read_text().strip() if options.sessions else ""
    with sessions(options.sessions, options.uri, options.hub or options.listen, key):
        result = cerebro.search(
            build,
            {"lr": cerebro.loguniform(1e-4, 1e-1), "hidden": [16, 32, 64]},
            train,
            epochs=options.epochs,
            n_trials=options.trials,
            validation=valid,
            metric="accuracy",
            batch_size=64,
            run=options.run,
            executor=executor,
            workers=None if options.sessions else 0,
        )
    print(result.summary())


if __name__ == "__main__":
    main()

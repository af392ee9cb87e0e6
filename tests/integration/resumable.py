"""A search that is struck at a chosen unit; as a program, it is the victim.

python resumable.py FOLDER DATA '{"at": 9, "signal": 9, ...}'
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

import cerebro
from cerebro.run.store.writing import Transaction

EPOCHS = 3
TRIALS = 4
SHARDS = 4
UNITS = TRIALS * EPOCHS * (SHARDS + 1)


class Model:
    """Least squares with its own noise, so that its generators matter; may depend on `info`."""

    framework = "numpy"

    def __init__(self, config, info):
        self.lr = config["lr"] / info.epochs if config.get("told") else config["lr"]
        self.w = np.random.normal(size=3)
        self.batches = 0

    def train_batch(self, batch):
        error = batch["x"] @ self.w - batch["y"]
        self.w = self.w - self.lr * batch["x"].T @ error / len(error)
        self.w += 1e-3 * np.random.normal(size=3)
        self.batches += 1
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch):
        return {"loss": float(((batch["x"] @ self.w - batch["y"]) ** 2).mean())}

    def state_dict(self):
        return {"w": self.w, "batches": self.batches}

    def load_state_dict(self, state):
        self.w, self.batches = np.array(state["w"]), state["batches"]


def build(config, info):
    return Model(config, info)


def build_some_fail(config, info):
    if info.trial == 1 and os.environ.get("HEALTHY") is None:
        raise ValueError("this one cannot be built")
    return Model(config, info)


class Strike:
    """Sends this process a signal after a number of units."""

    def __init__(self, at, number=signal.SIGKILL):
        self.left = at
        self.number = number

    def on_unit_end(self, trial, metrics):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)


class StrikeAll(Strike):
    """Kills the workers, which are the process's only children, then the process."""

    def on_unit_end(self, trial, metrics):
        if self.left == 1:
            children = Path(f"/proc/self/task/{os.getpid()}/children")
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)
        super().on_unit_end(trial, metrics)


def search(folder, data, *, callbacks=(), workers=None, **settings):
    """The search with which tests compare undisturbed, struck and resumed runs."""
    defaults = {
        "epochs": EPOCHS,
        "n_trials": TRIALS,
        "validation": 0.2,
        "batch_size": 16,
        "seed": 3,
        "progress": False,
    }
    settings = defaults | settings
    if workers is None and settings.get("executor") is None:
        workers = 0
    if "folds" in settings:
        settings["validation"] = cerebro.KFold(
            settings.pop("folds"), seed=settings.pop("folds_seed", 0)
        )
    space = settings.pop("space", {"lr": cerebro.loguniform(1e-2, 1e-1)})
    function = settings.pop("build", build)
    return cerebro.search(
        function,
        space,
        cerebro.Dataset(data),
        run=folder,
        workers=workers,
        callbacks=callbacks,
        **settings,
    )


def hashes(result):
    return [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]


def struck(folder, data, *, at, number=signal.SIGKILL, **options):
    """Run the search in a separate process that is struck; return the ended process."""
    options = {"at": at, "signal": int(number), **options}
    environment = dict(os.environ)
    return subprocess.run(
        [sys.executable, __file__, str(folder), str(data), json.dumps(options)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )


def block_rows(epoch):
    """Block the store's thread forever before it records that epoch of any trial."""
    write = Transaction.write_rows

    def blocked(batch, connection):
        if any(number == epoch for _, number in batch._epochs):
            threading.Event().wait()
        write(batch, connection)

    Transaction.write_rows = blocked


def main(folder, data, options):
    at, number = options.pop("at"), options.pop("signal")
    if "block_rows" in options:
        block_rows(options.pop("block_rows"))
    strike = StrikeAll if options.pop("all", False) else Strike
    resume = options.pop("resume", False)
    callbacks = [strike(at, number)]
    if resume:
        cerebro.resume(folder, build, callbacks=callbacks, progress=False, **options)
    else:
        space = options.pop("space", {"lr": cerebro.loguniform(1e-2, 1e-1)})
        search(folder, data, callbacks=callbacks, space=space, **options)


if __name__ == "__main__":
    import resumable  # under its module name, so that `build` can be found again

    resumable.main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))

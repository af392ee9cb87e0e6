"""Models with states too large for messages; as a program, a search that is killed.

python ballast.py FOLDER DATA ADDRESS UNIT
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import resumable

import cerebro

BALLAST = 40_000  # float64
SLOW_NODE = "node-2"
SLOW_SECONDS = 0.03
"""Extra seconds per batch on the slow node: a hundred times the usual time."""


class Model(resumable.Model):
    def __init__(self, config, info):
        super().__init__(config, info)
        self.ballast = np.arange(BALLAST) * self.w[0]
        self.gate = config.get("gate")

    def begin_epoch(self, epoch):
        """Wait before the third epoch until the test opens the gate; the hop check begins two."""
        if self.gate and epoch == 2:
            for _ in range(1200):
                if Path(self.gate).exists():
                    return
                time.sleep(0.1)
            raise TimeoutError("the gate was not opened")

    def train_batch(self, batch):
        self.ballast += self.w[1]
        return super().train_batch(batch)

    def state_dict(self):
        return {**super().state_dict(), "ballast": self.ballast}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.ballast = np.array(state["ballast"])


def build(config, info):
    print(f"a model for trial {info.trial}")
    return Model(config, info)


class SlowModel(Model):
    """Slow on one of the nodes, like an older machine."""

    def train_batch(self, batch):
        if os.environ.get("NODE") == SLOW_NODE:
            time.sleep(SLOW_SECONDS)
        return super().train_batch(batch)


def build_slow(config, info):
    return SlowModel(config, info)


class Strike:
    """Kills this process after a number of units, and reports its actors."""

    def __init__(self, left):
        self.left = left

    def on_unit_end(self, trial, metrics):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    import ballast  # under its module name, so that `build` can be found again

    folder, data, address, unit = sys.argv[1:]
    resumable.search(
        folder,
        data,
        build=ballast.build,
        executor=cerebro.ray.Executor(address=address),
        callbacks=[ballast.Strike(int(unit))],
        epochs=4,
    )

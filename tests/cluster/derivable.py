"""Functions of batches that do something to the workers that call them.

As a program, a derive whose process is killed: python derivable.py DATA TARGET FLAG
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import cerebro

BATCH = 16
ROWS = 607
OPTIONS = {"reads": ["x"], "key": "norms", "batch_size": BATCH}


def norms(batch):
    x = batch["x"]
    return {"norm": np.sqrt((x * x).sum(axis=1)), "parts": np.abs(x).astype("float32")}


def on_a_node():
    """Whether a worker of `dialing.Apart` calls, not the coordinator."""
    return "NODE" in os.environ


class Once:
    """`norms`; in one batch of a shard, which begins with a row, it does something once.

    Parameters
    ----------
    first
        The value of ``x[0, 0]`` in the shard's first row.
    what
        ``"agent"``, ``"worker"`` or ``"coordinator"``: what is killed.
    flag
        A file that exists when it has been done.
    after
        A file for which it waits, as a pattern in the flag's folder.
    """

    def __init__(self, first, what, flag, after=None):
        self.first, self.what, self.flag, self.after = first, what, Path(flag), after

    def __call__(self, batch):
        if on_a_node() and batch["x"][0, 0] == self.first and not self.flag.exists():
            while self.after and not any(self.flag.parent.glob(self.after)):
                time.sleep(0.01)
            self.flag.touch()
            agent = os.getppid()
            coordinator = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
            victims = {"agent": agent, "worker": os.getpid(), "coordinator": coordinator}
            os.kill(victims[self.what], signal.SIGKILL)
            time.sleep(600)  # this process ends with its agent, and the agent with its coordinator
        return norms(batch)


class Failing:
    """`norms`, except in the batch that begins with a row: there it raises an exception."""

    def __init__(self, first):
        self.first = first

    def __call__(self, batch):
        if on_a_node() and batch["x"][0, 0] == self.first:
            raise LookupError("no such word")
        return norms(batch)


class Narrow:
    """`norms`, except in the batch that begins with a row: there a column has another shape."""

    def __init__(self, first):
        self.first = first

    def __call__(self, batch):
        made = norms(batch)
        if batch["x"][0, 0] == self.first:
            made["parts"] = made["parts"][:, :2]
        return made


def of_the_machine(batch):
    """Compute something else in a worker than here."""
    return {"norm": norms(batch)["norm"] + on_a_node()}


def first_of(data, shard):
    return float(data.shard(shard)["x"][0, 0])


if __name__ == "__main__":
    import derivable  # under its module name, so that workers find it
    from dialing import Apart

    path, target, flag = sys.argv[1:]
    source = cerebro.Dataset(path)
    after = ".made.part-*/shard-00002.json"  # until then, shard 2 may not be recorded
    function = derivable.Once(first_of(source, 3), "coordinator", flag, after)
    executor = Apart(Path(flag).parent, 1)
    source.derive(target, function, executor=executor, **OPTIONS)

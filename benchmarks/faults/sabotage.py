"""Corrupts a finished run on purpose: a campaign that does not detect it proves nothing."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import time
from pathlib import Path

from benchmarks.faults import processes

CAUGHT_AS = {
    "wrong hash": "wrong",
    "wrong metric": "wrong",
    "lost epoch": "lost",
    "lost trial": "lost",
    "repeated unit": "repeated",
    "unfinished run": "unfinished",
    "damaged state": "wrong",
    "missing state": "lost",
    "extra state": "wrong",
    "stray file": "stray",
    "orphan": "orphans",
    "damaged store": "lost",
}
"""The kinds of corruption, and the word with which the campaign must report each."""


def spoil(what: str, run: Path, mark: str) -> None:
    """Corrupt a finished run in one of the ways of `CAUGHT_AS`."""
    if what == "orphan":
        orphan = subprocess.Popen(
            ["sleep", "60"], env={**os.environ, processes.MARK: mark}, start_new_session=True
        )
        # Popen returns when the descriptors are closed, before the new program's environment shows.
        while not processes.has_mark(orphan.pid, mark) and orphan.poll() is None:
            time.sleep(0.001)
        return
    if what == "stray file":
        (run / "states" / "0.a").write_bytes(b"left")
        return
    if what == "damaged store":
        (run / "run.sqlite").write_bytes(b"\0" * 4096)
        return
    states = sorted((run / "states").glob("*.safetensors"))
    if what == "damaged state":
        data = bytearray(states[0].read_bytes())
        data[-1] ^= 1
        states[0].write_bytes(data)
        return
    if what == "missing state":
        states[0].unlink()
        return
    with contextlib.closing(sqlite3.connect(run / "run.sqlite")) as store, store:
        store.execute(STATEMENTS[what])


STATEMENTS = {
    "wrong hash": "UPDATE epochs SET state_hash = replace(state_hash, substr(state_hash, 1, 1), "
    "CASE substr(state_hash, 1, 1) WHEN '0' THEN '1' ELSE '0' END) WHERE trial = 0 AND epoch = 0",
    "wrong metric": "UPDATE metrics SET value = value * 1.0000000000000002 + 1e-300 "
    "WHERE trial = 0 AND epoch = 0 AND name = 'loss'",
    "lost epoch": "DELETE FROM epochs WHERE trial = 1 AND epoch = 0",
    "lost trial": "DELETE FROM trials WHERE number = 1",
    "repeated unit": "INSERT INTO units SELECT NULL, trial, epoch, step, part, worker, attempt, "
    "started, seconds, rows, batches, hopped, state_bytes FROM units LIMIT 1",
    "unfinished run": "UPDATE meta SET value = '\"running\"' WHERE key = 'status'",
    "extra state": "UPDATE epochs SET state_file = '0-epoch-0.safetensors' "
    "WHERE trial = 0 AND epoch = 0",
}

"""What reaches the disk, in which order, and what becomes of a store when a disk fails.

A small library between the process and its disk (tests/shims/disk.c) writes the
calls down, or fails them.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap

import pytest
from stored_run import read_run

from cerebro.run.store import FILE

BEGIN = """
import os, sys
from pathlib import Path
from cerebro.run.records import EpochRecord, TrialRecord
from cerebro.run.store import Store
folder = Path(sys.argv[1])
states = folder / "states"
states.mkdir(exist_ok=True)

def state(trial, epoch):
    final = states / f"{trial}-epoch-{epoch}.safetensors"
    return final.with_name(final.name + ".new"), final

def add(store, trial, epoch):
    temporary, final = state(trial, epoch)
    temporary.write_bytes(b"state %d %d" % (trial, epoch))
    record = EpochRecord(epoch, {"loss": 0.5}, 1.0, "hash", final.name)
    store.add_epoch(trial, record, (temporary, final))

def arm():
    (folder / "armed").touch()

def failing(call):
    try:
        call()
    except OSError as error:
        print(error)
    else:
        print("no error")
"""


def run(disk_shim, folder, program, **variables):
    """Run a program behind the shim; return what it printed and the calls, by file name."""
    trace = folder / "trace"
    environment = {
        **os.environ,
        "LD_PRELOAD": str(disk_shim),
        "DISK_TRACE": str(trace),
        "DISK_ARM": str(folder / "armed"),
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(program), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    calls = [line.split(" ", 1) for line in trace.read_text().splitlines()]
    inside = [(name, path[len(str(folder)) + 1 :]) for name, path in calls if str(folder) in path]
    return done.stdout, inside


def test_a_row_is_committed_after_its_state_is_durable(disk_shim, tmp_path):
    program = """
    store = Store.create(folder, {})
    store.add_trial(TrialRecord(0, {}, "running", 3))
    store.flush()
    for epoch in range(3):
        os.write(os.open(folder / f"epoch-{epoch}", os.O_CREAT | os.O_WRONLY), b"x")
        with store.group():
            add(store, 0, epoch)
            if epoch:
                store.retire_state(0, epoch - 1, state(0, epoch - 1)[1])
        store.flush()
    os.write(os.open(folder / "end", os.O_CREAT | os.O_WRONLY), b"x")
    store.close()
    """
    _, calls = run(disk_shim, tmp_path, program)
    wal = FILE + "-wal"
    for epoch in range(3):
        begin = calls.index(("write", f"epoch-{epoch}"))
        end = calls.index(("write", f"epoch-{epoch + 1}" if epoch < 2 else "end"))
        during = calls[begin + 1 : end]
        temporary = f"states/0-epoch-{epoch}.safetensors.new"
        synced = during.index(("fsync", temporary))
        renamed = during.index(("rename", temporary))
        folder_synced = during.index(("fsync", "states"))
        first_row = during.index(("write", wal))
        committed = len(during) - 1 - during[::-1].index(("fsync", wal))
        assert ("write", temporary) not in during[synced:]
        assert synced < renamed < folder_synced < first_row < committed
        assert ("write", wal) not in during[committed:]
        if epoch:
            assert during.index(("unlink", f"states/0-epoch-{epoch - 1}.safetensors")) > committed


def test_many_states_of_one_commit_are_all_durable_before_it(disk_shim, tmp_path):
    program = """
    store = Store.create(folder, {})
    store.flush()
    os.write(os.open(folder / "begin", os.O_CREAT | os.O_WRONLY), b"x")
    with store.group():
        for trial in range(200):
            add(store, trial, 0)
    store.close()
    """
    _, calls = run(disk_shim, tmp_path, program)
    calls = calls[calls.index(("write", "begin")) :]
    first_row = calls.index(("write", FILE + "-wal"))
    names = [f"states/{trial}-epoch-0.safetensors.new" for trial in range(200)]
    for call in ("fsync", "rename"):
        assert sorted(n for c, n in calls[:first_row] if c == call and n in names) == sorted(names)
    synced = [i for i, c in enumerate(calls) if c[0] == "fsync" and c[1] in names]
    renamed = [i for i, c in enumerate(calls) if c[0] == "rename" and c[1] in names]
    assert max(synced) < min(renamed)
    assert max(renamed) < calls.index(("fsync", "states")) < first_row


FAILURES = [
    # call, path, errno, what the message names
    ("fsync", "0-epoch-1.safetensors.new", errno.EIO, "0-epoch-1.safetensors.new"),
    ("rename", "0-epoch-1.safetensors.new", errno.EROFS, "0-epoch-1.safetensors.new"),
    ("fsync", "states", errno.EIO, "states"),
    ("fsync", FILE + "-wal", errno.EIO, FILE),
    ("write", FILE + "-wal", errno.ENOSPC, FILE),
    ("write", FILE + "-wal", errno.EIO, FILE),
]


@pytest.mark.parametrize(("call", "path", "code", "named"), FAILURES)
def test_a_failing_disk_stops_writing_and_leaves_a_consistent_store(
    disk_shim, tmp_path, call, path, code, named
):
    program = """
    store = Store.create(folder, {"status": "running"})
    store.add_trial(TrialRecord(0, {}, "running", 3))
    add(store, 0, 0)
    store.flush()
    arm()
    with store.group():
        add(store, 0, 1)
        store.retire_state(0, 0, state(0, 0)[1])
    failing(store.flush)
    failing(lambda: store.set_meta("status", "finished"))
    failing(store.close)
    """
    output, calls = run(disk_shim, tmp_path, program, DISK_FAIL=f"{call}:{path}:1:{code}")
    messages = output.splitlines()
    assert len(messages) == 3
    assert len(set(messages)) == 1
    assert named in messages[0]
    assert "cannot write" in messages[0]
    failed = next(i for i, (name, _) in enumerate(calls) if name == "failed")
    # The old state stays, for its row does.
    assert [c for c in calls[failed:] if c[0] in ("unlink", "rename") and "states/" in c[1]] == []
    stored = read_run(tmp_path)
    assert stored.meta["status"] == "running"
    rows = [(e.epoch, e.state_file) for e in stored.trials[0].epochs]
    before = [(0, "0-epoch-0.safetensors")]
    # A commit whose last step failed may have reached the disk: then all of it has.
    after = [(0, None), (1, "0-epoch-1.safetensors")]
    assert rows == before or (path == FILE + "-wal" and rows == after)
    for epoch, file in rows:
        if file is not None:
            assert (tmp_path / "states" / file).read_bytes() == b"state 0 %d" % epoch

"""The lock that makes one process the owner of a run."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from cerebro.errors import InputError
from cerebro.run import owner as owners
from cerebro.run.owner import FILE, Owner, Process, owner_of

HOLD = """
import sys
from pathlib import Path
from cerebro.run.owner import Owner
owner = Owner.take(Path(sys.argv[1]))
print("taken", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that owns the run."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "taken\n"
    yield process
    process.kill()
    process.communicate()


def test_taking_records_the_owner_and_releasing_clears_it(tmp_path):
    assert owner_of(tmp_path) is None
    with Owner.take(tmp_path) as owner:
        assert owner.process == Process.current() == owner_of(tmp_path)
        found = json.loads((tmp_path / FILE).read_text())
        assert (found["pid"], found["host"]) == (os.getpid(), os.uname().nodename)
    assert owner_of(tmp_path) is None
    assert (tmp_path / FILE).read_text() == ""
    owner.release()
    Owner.take(tmp_path).release()


def test_a_second_process_is_refused_with_the_firsts_name(tmp_path, holder):
    text = f"is being trained by process {holder.pid} on {os.uname().nodename}"
    for _ in range(2):
        with pytest.raises(InputError, match=text):
            Owner.take(tmp_path)
    assert owner_of(tmp_path) == Process(holder.pid, os.uname().nodename)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_process_is_not_the_owner(tmp_path, holder, number):
    holder.send_signal(number)
    holder.wait()
    assert json.loads((tmp_path / FILE).read_text())["pid"] == holder.pid
    assert owner_of(tmp_path) is None
    with Owner.take(tmp_path) as owner:
        assert owner_of(tmp_path) == owner.process


def test_a_reused_process_id_is_not_the_owner(tmp_path):
    """The lock decides, not the number: this process has it, and holds no lock."""
    (tmp_path / FILE).write_text(json.dumps({"pid": os.getppid(), "host": os.uname().nodename}))
    assert owner_of(tmp_path) is None
    Owner.take(tmp_path).release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x", "host": 3}', "\0" * 100])
def test_the_file_content_is_ignored_without_a_lock(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert owner_of(tmp_path) is None
    Owner.take(tmp_path).release()


def test_taking_a_run_twice_in_one_process_is_refused(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "link").symlink_to(run)
    with Owner.take(run):
        for path in (run, tmp_path / "link"):
            with pytest.raises(InputError, match="is being trained by this process"):
                Owner.take(path)


def test_asking_in_the_owners_process_does_not_lose_the_lock(tmp_path):
    """Closing any descriptor of the file would."""
    code = "import sys; from pathlib import Path; from cerebro.run.owner import owner_of\n"
    code += "print(owner_of(Path(sys.argv[1])))"
    with Owner.take(tmp_path) as owner:
        for _ in range(3):
            assert owner_of(tmp_path) is not None
        thread = threading.Thread(target=owner_of, args=(tmp_path,))
        thread.start()
        thread.join()
        out = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
        assert out.stdout.strip() == str(owner.process)


def test_a_fork_is_not_the_owner(tmp_path):
    with Owner.take(tmp_path) as owner:
        child = os.fork()
        if child == 0:
            owner.release()
            asked = owner_of(tmp_path)
            try:
                Owner.take(tmp_path)
                os._exit(1)
            except InputError:
                os._exit(0 if asked == owner.process else 2)
        assert os.waitpid(child, 0)[1] == 0
        assert owner_of(tmp_path) == owner.process


def test_the_owner_is_found_from_a_read_only_file(tmp_path, holder):
    (tmp_path / FILE).chmod(0o444)
    assert owner_of(tmp_path) == Process(holder.pid, os.uname().nodename)


def test_a_remote_owner_counts_as_alive_while_it_renews_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(owners, "is_network_file_system", lambda folder: True)
    file = tmp_path / FILE
    file.write_text(json.dumps({"pid": 7, "host": "elsewhere"}))
    assert owner_of(tmp_path) == Process(7, "elsewhere")
    with pytest.raises(InputError, match="process 7 on elsewhere"):
        Owner.take(tmp_path)
    now = file.stat().st_mtime
    os.utime(file, (now, now - owners.STALE_SECONDS - 1))
    assert owner_of(tmp_path) is None
    Owner.take(tmp_path).release()


def test_on_a_network_the_owner_renews_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(owners, "is_network_file_system", lambda folder: True)
    monkeypatch.setattr(owners, "RENEW_SECONDS", 0.001)
    renewed = threading.Event()
    monkeypatch.setattr(owners.os, "utime", lambda fd: renewed.set())
    with Owner.take(tmp_path):
        assert renewed.wait(60)


@pytest.mark.skipif(sys.platform != "linux", reason="needs abstract sockets")
def test_an_owner_whose_file_is_deleted_is_still_found(tmp_path, holder):
    (tmp_path / FILE).unlink()
    for _ in range(100):  # nobody answers meanwhile
        assert owner_of(tmp_path) == Process(holder.pid, os.uname().nodename)
    with pytest.raises(InputError, match=f"being trained by process {holder.pid} on"):
        Owner.take(tmp_path)
    assert not (tmp_path / FILE).exists()
    holder.kill()
    holder.wait()
    assert owner_of(tmp_path) is None
    Owner.take(tmp_path).release()


def test_the_owner_recreates_its_missing_file(tmp_path):
    with Owner.take(tmp_path) as owner:
        for spoil in ((tmp_path / FILE).unlink, lambda: (tmp_path / FILE).rename(tmp_path / "x")):
            spoil()
            owner.keep()
            code = "import sys, fcntl; f = open(sys.argv[1], 'r+'); print(f.read())\n"
            code += "fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)"
            asked = [sys.executable, "-c", code, tmp_path / FILE]  # reading it here ends the lock
            found = subprocess.run(asked, capture_output=True, text=True)
            assert json.loads(found.stdout)["pid"] == os.getpid()
            assert "BlockingIOError" in found.stderr
    owner.keep()
    assert (tmp_path / FILE).read_text() == ""


def test_the_owner_writes_nothing_after_its_folder_was_moved(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with Owner.take(run) as owner:
        run.rename(tmp_path / "elsewhere")
        owner.keep()
        run.mkdir()
        owner.keep()
        assert list(run.iterdir()) == []
        Owner.take(run).release()


def test_a_fork_does_not_keep_a_dead_owner_alive(tmp_path):
    # The fork lives until the test closes its standard input.
    code = HOLD.replace("sys.stdin.read()", "import os\nos.fork() or sys.stdin.read()")
    with subprocess.Popen(
        [sys.executable, "-c", code + "\nos._exit(0)", tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "taken\n"
        assert process.wait(60) == 0
        assert owner_of(tmp_path) is None
        Owner.take(tmp_path).release()
        process.stdin.close()
        assert process.stdout.read() == ""  # until the fork has ended


def test_a_zombie_process_is_not_the_owner(tmp_path, holder):
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    assert owner_of(tmp_path) is None
    Owner.take(tmp_path).release()


def test_an_owner_keeps_its_run_after_losing_the_file_lock(tmp_path):
    """Closing any descriptor of the file, as a copy of the folder does, ends the lock."""
    code = HOLD.replace("print", "open(sys.argv[1] + '/owner.lock').close()\nprint")
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "taken\n"
        assert owner_of(tmp_path) == Process(process.pid, os.uname().nodename)
        with pytest.raises(InputError, match=f"process {process.pid} on"):
            Owner.take(tmp_path)
        process.stdin.close()


ASK = """
import sys
from pathlib import Path
from cerebro.run.owner import Owner, owner_of
print(owner_of(Path(sys.argv[1])))
try:
    Owner.take(Path(sys.argv[1]))
except Exception as error:
    print(error)
"""


def behind(shim, locks, code, folder, **options):
    variables = dict(os.environ, LD_PRELOAD=str(shim), LOCKS=locks)
    return subprocess.Popen(
        [sys.executable, "-c", code, folder],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.mark.parametrize("has_file", [True, False])
def test_without_effective_locks_a_second_process_is_refused(tmp_path, locks_shim, has_file):
    with behind(locks_shim, "granted", HOLD, tmp_path) as first:
        assert first.stdout.readline() == "taken\n"
        if not has_file:
            (tmp_path / FILE).unlink()
        with behind(locks_shim, "granted", ASK, tmp_path) as second:
            asked, refused = second.stdout.read().splitlines()
        assert asked == f"process {first.pid} on {os.uname().nodename}"
        assert f"is being trained by {asked}" in refused
        first.stdin.close()
    with behind(locks_shim, "granted", ASK, tmp_path) as third:
        assert third.stdout.read() == "None\n"


def test_without_effective_locks_a_reused_process_id_is_not_the_owner(tmp_path, locks_shim):
    text = json.dumps({"pid": os.getpid(), "host": os.uname().nodename, "start": "an hour ago"})
    (tmp_path / FILE).write_text(text)
    with behind(locks_shim, "granted", ASK, tmp_path) as process:
        assert process.stdout.read() == "None\n"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_refused(tmp_path, locks_shim, code):
    with behind(locks_shim, str(code), ASK, tmp_path) as process:
        asked, refused = process.stdout.read().splitlines()
    assert asked == "None"
    assert f"the file system of {tmp_path} has no locks" in refused
    assert "local disk" in refused

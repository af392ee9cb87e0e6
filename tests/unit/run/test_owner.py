"""The lock that makes one process the owner of a run."""

from __future__ import annotations

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


def test_taking_says_who_it_is_and_releasing_says_that_it_is_over(tmp_path):
    assert owner_of(tmp_path) is None
    with Owner.take(tmp_path) as owner:
        assert owner.process == Process.current() == owner_of(tmp_path)
        assert json.loads((tmp_path / FILE).read_text()) == {
            "pid": os.getpid(),
            "host": os.uname().nodename,
        }
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
def test_a_dead_owner_is_none(tmp_path, holder, number):
    holder.send_signal(number)
    holder.wait()
    assert json.loads((tmp_path / FILE).read_text())["pid"] == holder.pid
    assert owner_of(tmp_path) is None
    with Owner.take(tmp_path) as owner:
        assert owner_of(tmp_path) == owner.process


def test_a_number_that_is_used_again_is_no_owner(tmp_path):
    """The lock decides, not the number: this process has it, and holds no lock."""
    (tmp_path / FILE).write_text(json.dumps({"pid": os.getppid(), "host": os.uname().nodename}))
    assert owner_of(tmp_path) is None
    Owner.take(tmp_path).release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x", "host": 3}', "\0" * 100])
def test_what_stands_in_the_file_does_not_matter_without_a_lock(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert owner_of(tmp_path) is None
    Owner.take(tmp_path).release()


def test_twice_in_one_process_is_refused_also_by_another_name(tmp_path):
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


def test_a_folder_that_cannot_be_written_still_tells_its_owner(tmp_path, holder):
    (tmp_path / FILE).chmod(0o444)
    assert owner_of(tmp_path) == Process(holder.pid, os.uname().nodename)


def test_on_a_network_an_owner_on_another_host_lives_while_it_renews_the_file(
    tmp_path, monkeypatch
):
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


def test_without_locks_the_process_itself_is_looked_for(tmp_path, monkeypatch):
    def no_locks(*arguments):
        raise OSError(owners.errno.ENOLCK, "no locks")

    monkeypatch.setattr(owners.fcntl, "lockf", no_locks)
    monkeypatch.setattr(owners.fcntl, "fcntl", no_locks)
    file = tmp_path / FILE
    file.write_text(json.dumps({"pid": os.getppid(), "host": os.uname().nodename}))
    assert owner_of(tmp_path) == Process(os.getppid(), os.uname().nodename)
    with pytest.raises(InputError, match=f"process {os.getppid()}"):
        Owner.take(tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    file.write_text(json.dumps({"pid": dead.pid, "host": os.uname().nodename}))
    assert owner_of(tmp_path) is None
    Owner.take(tmp_path).release()

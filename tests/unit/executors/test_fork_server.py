"""Workers that are forked: like those that are started, and independent of their fork server."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import psutil
import pytest

from cerebro.errors import InputError
from cerebro.executors.fork_server import Child, forks_workers
from cerebro.executors.process import (
    WorkerKind,
    WorkerProcess,
    describe_exit,
    fork_servers,
    warm_workers,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks workers")

PROBE = """
import gc, json, os, pathlib, random, resource, signal, sys
import numpy as np

def target(file):
    try:
        return os.readlink(f"/proc/self/fd/{file}").partition(":")[0]
    except OSError:
        return None  # the folder itself

status = dict(line.split(":", 1) for line in open("/proc/self/status"))
found = dict(
    argv=[pathlib.Path(sys.argv[0]).name, len(sys.argv)],
    orig_argv=[sys.orig_argv[:-2], sys.orig_argv[-2:] == sys.argv[1:]],
    main=sys.modules["__main__"].__spec__.name,
    environ=dict(os.environ),
    directory=os.getcwd(),
    files=sorted(filter(None, map(target, os.listdir("/proc/self/fd")))),
    inherited=[file for file in map(int, os.listdir("/proc/self/fd"))
               if file > 2 and target(file) and os.get_inheritable(file)],
    leads=os.getsid(0) == os.getpgid(0) == os.getpid(),
    parent=os.getppid(),
    limits=[resource.getrlimit(number) for number in range(16)],
    status=[status[name] for name in ("Umask", "Uid", "SigBlk", "SigIgn", "SigCgt", "Threads")],
    collects=gc.isenabled(),
    flags=repr(sys.flags),
    streams=[sys.stdout.fileno(), sys.stderr.fileno(), sys.stdout.encoding],
)
torch = sys.modules.get("torch")
drawn = [random.random(), np.random.random(), torch and torch.initial_seed()]
file = pathlib.Path(__file__).with_name(f"{os.getpid()}.json")
file.with_suffix(".new").write_text(json.dumps([found, drawn]))
file.with_suffix(".new").rename(file)
"""


@pytest.fixture(autouse=True)
def no_servers():
    """Each test begins and ends without idle workers and servers."""
    warm_workers.close()
    fork_servers.close()
    yield
    warm_workers.close()
    fork_servers.close()


@contextlib.contextmanager
def spawned(*, fork=True, wait=True):
    worker = WorkerProcess.spawn(WorkerKind(1), fork=fork, wait=wait)
    try:
        yield worker
    finally:
        worker.stop(kill=True)


def probed(worker, folder):
    """What a worker's process is like, and the numbers that it draws."""
    (folder / "probe.py").write_text(PROBE)
    worker.send(("preload", [str(folder), *sys.path], ["probe"]))
    return json.loads(awaited(folder / f"{worker.process.pid}.json"))


def awaited(file):
    end = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    return file.read_text()


def the_server():
    (server,) = fork_servers._servers
    return server


def test_a_forked_worker_is_like_a_started_one(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_NAME", "before")
    with spawned() as first:
        assert isinstance(first.process, Child)
    monkeypatch.setenv("WANDB_NAME", "set later")
    monkeypatch.chdir(tmp_path)
    with spawned() as forked, spawned(fork=False) as started:
        assert isinstance(forked.process, Child)
        assert isinstance(started.process, subprocess.Popen)
        (one, _), (other, _) = probed(forked, tmp_path), probed(started, tmp_path)
    assert one["environ"]["WANDB_NAME"] == "set later"
    assert one["leads"] and one["parent"] == os.getpid()
    assert one.pop("inherited") == []  # a started worker has to inherit two
    assert len(other.pop("inherited")) == 2
    assert one == other


def test_forked_workers_draw_different_numbers(tmp_path):
    with spawned() as one, spawned() as other:
        drawn = [probed(worker, tmp_path)[1] for worker in (one, other)]
    drawn += [[random.random(), np.random.random(), None]]
    for numbers in zip(*drawn, strict=True):
        numbers = [number for number in numbers if number is not None]
        assert len(set(numbers)) == len(numbers)


def test_a_forked_worker_uses_the_coordinators_current_stdout(tmp_path, capfd):
    """Its server was started when standard output was a different file."""
    with spawned():
        pass
    file = tmp_path / "output"
    kept = os.dup(1)
    with file.open("w") as output:
        os.dup2(output.fileno(), 1)
    try:
        (tmp_path / "says.py").write_text("print('here', flush=True)")
        with spawned() as worker:
            worker.send(("preload", [str(tmp_path), *sys.path], ["says", "probe"]))
            probed(worker, tmp_path)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    assert file.read_text() == "here\n"


def test_the_exit_status_of_a_forked_worker_is_known():
    worker = WorkerProcess.spawn(WorkerKind(1), fork=True)
    assert isinstance(worker.process, Child) and worker.process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        worker.process.wait(0.01)
    os.kill(worker.process.pid, signal.SIGKILL)
    assert worker.process.wait(20) == -9
    assert describe_exit(worker.process.poll()) == "the worker process was ended by SIGKILL"
    worker.stop(kill=True)


def test_orphans_are_not_adopted_between_forks():
    """Only a worker that is being forked becomes a child of this process."""
    with spawned():
        code = "import os, time; print(os.fork() or (time.sleep(60) or 0), flush=True)"
        made = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert made.stdout is not None
        orphan = psutil.Process(int(made.stdout.readline()))
        made.wait()
        try:
            assert orphan.ppid() != os.getpid()
        finally:
            orphan.kill()
            made.stdout.close()


# --- one server for each set of conditions -----------------------------------


def test_a_server_forks_only_workers_with_its_own_environment(monkeypatch):
    with spawned():
        first = the_server().process.pid
    with spawned():
        assert the_server().process.pid == first
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "changes while a program runs")
    with spawned():
        assert the_server().process.pid == first
    monkeypatch.setenv("MKL_DYNAMIC", "FALSE")
    with spawned():
        assert len(fork_servers.processes()) == 2
    monkeypatch.delenv("MKL_DYNAMIC")
    mask = os.umask(0o077)
    try:
        with spawned():
            assert len(fork_servers.processes()) == 2  # the one used longest ago has gone
            assert first not in fork_servers.processes()
    finally:
        os.umask(mask)


def test_a_server_with_a_file_that_was_edited_is_replaced(tmp_path):
    file = tmp_path / "file.py"
    file.touch()
    with spawned():
        first = the_server()
    first.sources["file", str(file)] = file.stat().st_mtime_ns
    with spawned():
        assert the_server() is first
    os.utime(file, ns=(1, 1))
    with spawned():
        assert the_server() is not first


def test_a_server_with_another_pytorch_is_not_used(tmp_path):
    with spawned():
        the_server().files["json"] = json.__file__
    with spawned() as worker:
        assert isinstance(worker.process, Child)
        the_server().files["json"] = str(tmp_path / "another" / "json.py")
    with spawned() as worker:
        assert isinstance(worker.process, subprocess.Popen)


def test_a_server_with_threads_does_not_fork(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    for _ in range(2):
        with spawned() as worker:
            assert isinstance(worker.process, subprocess.Popen)
    assert fork_servers.processes() == []


def test_workers_are_not_forked_while_sigchld_is_ignored():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert not forks_workers()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert forks_workers()


def test_the_cerebro_fork_variable_turns_forking_off(monkeypatch):
    monkeypatch.setenv("CEREBRO_FORK", "0")
    with spawned() as worker:
        assert isinstance(worker.process, subprocess.Popen)
    monkeypatch.setenv("CEREBRO_FORK", "no")
    with pytest.raises(InputError, match="the variable CEREBRO_FORK is 'no': set it to 0 or 1"):
        WorkerProcess.spawn(WorkerKind(1), fork=True)


# --- servers that fail -------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_fails_is_replaced_and_its_workers_stay(tmp_path, number):
    with spawned() as before:
        server = the_server()
        os.kill(server.process.pid, number)
        if number == signal.SIGKILL:
            os.waitid(os.P_PID, server.process.pid, os.WEXITED | os.WNOWAIT)
        with spawned(wait=False) as meanwhile:
            assert isinstance(meanwhile.process, subprocess.Popen)
        with spawned() as after:
            assert isinstance(after.process, Child)
            assert the_server() is not server
            probed(after, tmp_path)
        assert server.process.returncode == -signal.SIGKILL
        (found, _) = probed(before, tmp_path)
        assert found["parent"] == os.getpid()


def test_workers_survive_the_end_of_the_thread_that_started_the_server(tmp_path):
    workers = []
    thread = threading.Thread(
        target=lambda: workers.append(WorkerProcess.spawn(WorkerKind(1), fork=True))
    )
    thread.start()
    thread.join()
    server = the_server()
    server.process.wait(20)
    (worker,) = workers
    with spawned() as another:
        assert isinstance(another.process, Child)
        probed(worker, tmp_path)
    worker.stop(kill=True)


def test_a_fork_of_the_coordinator_leaves_the_server_alone():
    with spawned():
        pass
    child = os.fork()
    if child == 0:
        fork_servers.close()
        os._exit(len(fork_servers.processes()))
    assert os.waitpid(child, 0)[1] == 0
    with spawned() as worker:
        assert isinstance(worker.process, Child)


def test_the_server_ends_with_its_last_worker():
    process = psutil.Process()
    before = process.num_fds(), len(process.children())
    with spawned(), spawned():
        pass
    fork_servers.close()
    assert (process.num_fds(), len(process.children())) == before


@pytest.mark.parametrize("stopped", [False, True])
def test_servers_and_their_workers_end_with_the_coordinator(tmp_path, stopped):
    code = """
        import os, sys, time
        from cerebro.executors.process import WorkerKind, WorkerProcess, fork_servers
        workers = [WorkerProcess.spawn(WorkerKind(1), fork=True) for _ in range(2)]
        while any(worker.beat.beats == 0 for worker in workers):
            time.sleep(0.01)
        print(*fork_servers.processes(), *(w.process.pid for w in workers), flush=True)
        time.sleep(60)
        """
    made = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert made.stdout is not None
    family = [psutil.Process(int(pid)) for pid in made.stdout.readline().split()]
    try:
        assert len(family) == 3
        if stopped:
            for process in family:
                process.suspend()
            while any(process.status() != psutil.STATUS_STOPPED for process in family):
                time.sleep(0.01)
    finally:
        made.kill()
        made.wait()
        made.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_workers_of_an_interrupted_fork_end(monkeypatch):
    """Ctrl-C arrives while the server forks."""
    others = psutil.Process().children()  # of joblib, if other tests have used it
    with spawned():
        server = the_server()

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("cerebro.executors.fork_server.receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        WorkerProcess.spawn(WorkerKind(1), fork=True)
    assert fork_servers.processes() == []
    # It is killed, unless it has ended before because its connection was closed.
    assert server.process.returncode in (0, -signal.SIGKILL)
    # It has forked one by then, or has not.
    forked = [child for child in psutil.Process().children() if child not in others]
    assert psutil.wait_procs(forked, timeout=60)[1] == []

"""Workers that die, stall, are late or grow: real processes and real signals.

A fault happens once, at a unit that the test names; a file marks that it has.
Whatever it was, the run goes on, nobody is left behind, and every state hash is
what the undisturbed run gives.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import cerebro
from cerebro._core import BeatPage
from cerebro.errors import InputError, RunError, WorkerError
from cerebro.executors.local import LocalExecutor
from cerebro.executors.process import WorkerKind, WorkerProcess, warm_workers
from cerebro.executors.wire import Channel
from cerebro.run.recipe import import_file

SILENCE = 2.0

PROGRAM = '''
import ctypes, logging, os, signal, subprocess, sys, time, warnings
import numpy as np
import cerebro

HERE = os.path.dirname(os.path.abspath(__file__))

def once(name="hit"):
    """Whether nobody was here before, in any process."""
    try:
        os.close(os.open(os.path.join(HERE, name), os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

def say(text):
    with open(os.path.join(HERE, "said"), "a") as file:
        file.write(f"{text}\\n")

class Model:
    framework = "numpy"

    def __init__(self, config, info):
        self.w, self.lr, self.trial = np.zeros(3), config["lr"], info.trial
        self.epoch = self.batches = 0
        self.checked = not os.path.exists(os.path.join(HERE, "run", "run.sqlite"))

    def begin_epoch(self, epoch):
        self.epoch, self.batches = epoch, 0

    def train_batch(self, batch):
        self.batches += 1
        if self.trial == 1 and self.epoch == 1:
            fault(self)
        error = batch["x"] @ self.w - batch["y"]
        self.w = self.w - self.lr * batch["x"].T @ error / len(error)
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch):
        return {"loss": float(((batch["x"] @ self.w - batch["y"]) ** 2).mean())}

    def state_dict(self):
        return {"w": self.w, "epoch": self.epoch, "batches": self.batches}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])
        self.epoch, self.batches = state["epoch"], state["batches"]

def fault(model):
    pass

def build(config, info):
    return Model(config, info)

space = {"lr": cerebro.loguniform(1e-3, 1e-1)}
data = DATA
settings = dict(epochs=3, n_trials=3, batch_size=16, validation=0.2, seed=1)
'''


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3)).astype(np.float32)
    y = (x @ [1.0, -2.0, 0.5] + rng.normal(size=400)).astype(np.float32)
    folder = tmp_path_factory.mktemp("data") / "set"
    return cerebro.shard({"x": x, "y": y}, folder, shards=4, progress=False)


@pytest.fixture(scope="module")
def calm(data, tmp_path_factory):
    """The state hashes of the undisturbed run, per trial and epoch."""
    folder = tmp_path_factory.mktemp("calm")
    return hashes(search(program(folder, data), workers=0))


def program(folder, data, extra=""):
    file = folder / "program.py"
    text = PROGRAM.replace("DATA", repr(str(data.path)))
    file.write_text(text + textwrap.dedent(extra), encoding="utf-8")
    return file


def search(file, *, workers=2, executor=None, **changed):
    module = import_file(file)
    settings = {**module.settings, "run": file.parent / "run", "progress": False, **changed}
    if executor is None:
        settings["workers"] = workers
    return cerebro.search(module.build, module.space, module.data, executor=executor, **settings)


def local(workers=2, **options):
    return LocalExecutor(workers, 1, fresh=True, silence=SILENCE, **options)


def hashes(result):
    return [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]


def rows_of(run, sql):
    store = f"{(run / 'run.sqlite').as_uri()}?mode=rw"  # a run that is being made has none yet
    with contextlib.closing(sqlite3.connect(store, uri=True)) as connection:
        return connection.execute(sql).fetchall()


def events(run):
    return rows_of(run, "SELECT kind, text FROM events")


def said(folder):
    return (folder / "said").read_text().split()


def assert_gone(*pids):
    """Processes have ended; whoever inherits them as orphans may not have reaped them."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(int(pid)))
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


FAULTS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
    "exits": ("os._exit(7)", "exited with status 7"),
    "crashes": ("ctypes.string_at(0)", "was ended by SIGSEGV"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "was stopped: it sent no heartbeat"),
    "cut socket": ("os.close(int(sys.orig_argv[-2])); time.sleep(1000)", "was ended by SIGKILL"),
    "garbage": (
        "os.write(int(sys.orig_argv[-2]), b'hello, world')",
        "sent a message of 1751477356 bytes",
    ),
    "no pickle": (
        r"os.write(int(sys.orig_argv[-2]), b'\0\0\0\3abc')",
        "sent an unreadable message",
    ),
    "truncated": (
        r"os.write(int(sys.orig_argv[-2]), b'\0\0\0\77abc'); os._exit(3)",
        "exited with status 3",
    ),
    "stopped while it answers": (
        r"os.write(int(sys.orig_argv[-2]), b'\0\0\0\77abc'); os.kill(os.getpid(), signal.SIGSTOP)",
        "was stopped",
    ),
}


@pytest.mark.parametrize("fork", [True, False])
@pytest.mark.parametrize("name", FAULTS)
def test_a_worker_that_fails_once_changes_nothing(data, calm, tmp_path, name, fork):
    code, reason = FAULTS[name]
    file = program(tmp_path, data, f"def fault(model):\n    if once():\n        {code}")
    result = search(file, executor=local(fork=fork))
    assert result.status == "finished"
    assert hashes(result) == calm
    ((kind, text),) = events(result.path)
    assert kind == "worker lost"
    assert reason in text
    assert "in trial 1, epoch 1, unit 0, attempt 0" in text
    (event,) = result.events()
    assert event == {"time": event["time"], "kind": kind, "trial": 1, "text": text}
    assert 0 < event["time"] < max(unit["end"] for unit in result.units())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_worker_that_dies_around_its_commit_changes_nothing(data, calm, tmp_path, when):
    """Before: half of the state is in the slot. After: nobody heard of the commit."""
    extra = f"""
        class Dying(Model):
            def state_dict(self):
                if self.trial == 1 and self.epoch == 1 and self.batches > 4 and once():
                    if {when == "before"}:
                        os._exit(1)
                    from cerebro.worker import models
                    # What a unit does last.
                    models.LiveModels.drop_least_used = lambda self, current: os._exit(1)
                return super().state_dict()

        def build(config, info):
            return Dying(config, info)
        """
    result = search(program(tmp_path, data, extra), executor=local())
    assert hashes(result) == calm
    assert [kind for kind, _ in events(result.path)] == ["worker lost"]


def test_successive_deaths_after_commits_change_nothing(data, calm, tmp_path):
    """The unit is done again from the state before, also when that is struck in turn."""
    extra = """
        struck = []
        def fault(model):
            if struck:
                return
            struck.append(True)
            if once("first") or once("second"):
                from cerebro.worker import models
                models.LiveModels.drop_least_used = lambda self, current: os._exit(1)
            elif once("third"):
                os.kill(os.getpid(), signal.SIGKILL)
        """
    result = search(program(tmp_path, data, extra), executor=local())
    assert hashes(result) == calm
    assert [kind for kind, _ in events(result.path)] == ["worker lost"] * 3


def test_a_healthy_worker_in_a_long_call_is_left_alone(data, calm, tmp_path):
    """It holds the GIL for longer than a worker may be silent: its C thread beats on."""
    extra = f"""
        def fault(model):
            if once():
                ctypes.PyDLL(None).usleep({int(2 * SILENCE * 1e6)})
        """
    result = search(program(tmp_path, data, extra), executor=local())
    assert hashes(result) == calm
    assert events(result.path) == []


def test_a_coordinator_that_was_suspended_kills_no_worker(data, calm, tmp_path):
    """For longer than the workers may be silent, and they were stopped as well."""
    extra = f"""
        def fault(model):
            if once():
                helper = "import os, signal, sys, time; a, b = map(int, sys.argv[1:]); " \\
                    "[os.kill(p, signal.SIGSTOP) for p in (a, b)]; time.sleep({2 * SILENCE}); " \\
                    "[os.kill(p, signal.SIGCONT) for p in (a, b)]"
                pids = [str(os.getppid()), str(os.getpid())]
                subprocess.Popen(
                    [sys.executable, "-c", helper, *pids], start_new_session=True
                ).wait()
        """
    result = search(program(tmp_path, data, extra), executor=local(1))
    assert hashes(result) == calm
    assert events(result.path) == []


# --- unit_timeout ------------------------------------------------------------


@pytest.mark.parametrize("code", ["time.sleep(1000)", "ctypes.PyDLL(None).sleep(1000)"])
def test_a_unit_that_times_out_once_runs_again(data, calm, tmp_path, code):
    file = program(tmp_path, data, f"def fault(model):\n    if once():\n        {code}")
    result = search(file, unit_timeout=1.5)
    assert hashes(result) == calm
    ((_, text),) = events(result.path)
    assert "the unit took longer than unit_timeout=1.5 seconds in trial 1, epoch 1" in text
    log = (result.path / "trials" / "1.log").read_text()
    assert "Timeout" in log and "in fault" in log


def test_a_unit_that_always_takes_too_long_fails_its_trial(data, calm, tmp_path):
    file = program(tmp_path, data, "def fault(model): time.sleep(1000)")
    result = search(file, unit_timeout=0.5, max_retries=1)
    trial = result.trials[1]
    assert trial.status == "failed"
    assert trial.error == (
        "the unit took longer than unit_timeout=0.5 seconds in epoch 1, unit 0, 2 times "
        "(where it was: trials/1.log)"
    )
    assert [hashes(result)[n] for n in (0, 2)] == [calm[n] for n in (0, 2)]
    assert result.status == "finished"


def test_a_slow_first_build_does_not_count_toward_unit_timeout(data, calm, tmp_path):
    """A slow first build is forgiven in every process, also in one that replaces another."""
    extra = """
        def fault(model):
            if once():
                os._exit(1)
        slow = []
        def build(config, info):
            if not slow:
                slow.append(time.sleep(2))
            return Model(config, info)
        """
    result = search(program(tmp_path, data, extra), unit_timeout=1, max_retries=0, n_trials=1)
    assert hashes(result) == calm[:1]
    assert events(result.path) == []


def test_a_first_configuration_that_times_out_ends_the_run(data, tmp_path, monkeypatch):
    monkeypatch.setattr("cerebro.executors.local.CHECK_SECONDS", 0.25)
    extra = """
        class Slow(Model):
            def train_batch(self, batch):
                time.sleep(1000)
        def build(config, info):
            return Slow(config, info)
        """
    with pytest.raises(RunError, match=r"first 3 trials failed in the same way.*unit_timeout=0.1"):
        search(program(tmp_path, data, extra), workers=1, unit_timeout=0.1, max_retries=0)


def test_unit_timeout_needs_a_process(data, tmp_path):
    with pytest.raises(InputError, match="give workers=1 or more"):
        search(program(tmp_path, data), workers=0, unit_timeout=5)
    with pytest.raises(InputError, match="unit_timeout must be above 0"):
        search(program(tmp_path, data), workers=1, unit_timeout=0)


# --- trials and places that are given up -------------------------------------


def test_a_unit_that_kills_every_worker_fails_its_trial(data, calm, tmp_path):
    file = program(tmp_path, data, "def fault(model): ctypes.string_at(0)")
    result = search(file, max_retries=2)
    trial = result.trials[1]
    assert trial.status == "failed"
    assert trial.error == (
        "the worker process was ended by SIGSEGV in epoch 1, unit 0, 3 times "
        "(where it was: trials/1.log)"
    )
    lost = [text for _, text in events(result.path)]
    assert [text[-9:] for text in lost] == ["attempt 0", "attempt 1", "attempt 2"]
    assert "in fault" in trial.log and "Segmentation fault" in trial.log
    assert [hashes(result)[n] for n in (0, 2)] == [calm[n] for n in (0, 2)]


START_FAILS = """
    def build(config, info):
        open(os.path.join(HERE, f"built-{os.getpid()}"), "w").close()
        return Model(config, info)

    def fault(model):
        while sum(name.startswith("built-") for name in os.listdir(HERE)) < WORKERS:
            time.sleep(0.01)  # until all workers have started
        if once():
            # From here on no worker gets as far as its first task.
            open(os.path.join(HERE, "broken"), "w").close()
            os._exit(1)
        while not os.path.exists(os.path.join(HERE, "missing")):
            time.sleep(0.01)
"""


def broken_starts(module, folder):
    """A search whose context cannot be unpacked once a file says so."""
    settings = {**module.settings, "run": folder / "run", "progress": False}
    return cerebro.search(
        Unpacked(module.build, str(folder / "broken")), module.space, module.data, **settings
    )


class Unpacked:
    """A build that ends whoever unpacks it, as a library that crashes on import would."""

    def __init__(self, build, path):
        self.build, self.path = build, path

    def __call__(self, config, info):
        return self.build(config, info)

    def __setstate__(self, state):
        self.__dict__.update(state)
        if os.path.exists(self.path):  # noqa: PTH110
            with open(self.path, "a") as file:  # noqa: PTH123
                file.write("x")
            os._exit(9)


def test_workers_that_die_as_they_start_end_the_run(data, tmp_path):
    module = import_file(program(tmp_path, data, START_FAILS.replace("WORKERS", "1")))
    module.settings["workers"] = 1
    with pytest.raises(WorkerError, match=r"no worker process is left.*status 9"):
        broken_starts(module, tmp_path)
    texts = [text for _, text in events(tmp_path / "run")]
    assert len(texts) == 4
    assert all(text.endswith("status 9, without a unit") for text in texts[1:])
    result = cerebro.open(tmp_path / "run")
    assert result.status == "failed"
    assert "failed" not in {trial.status for trial in result.trials}  # none is to blame


def kinds_so_far(run):
    try:
        return [kind for kind, _ in events(run)]
    except (OSError, sqlite3.Error):
        return []  # it has not begun


def test_a_worker_whose_replacements_all_die_is_not_replaced_again(data, calm, tmp_path):
    module = import_file(program(tmp_path, data, START_FAILS.replace("WORKERS", "2")))
    module.settings["workers"] = 2

    def say_when_it_is_missing():
        while "worker not replaced" not in kinds_so_far(tmp_path / "run"):
            time.sleep(0.02)
        (tmp_path / "missing").touch()

    watcher = threading.Thread(target=say_when_it_is_missing, daemon=True)
    watcher.start()  # the other worker does not finish before
    with pytest.warns(UserWarning, match="a worker process is missing from now on"):
        result = broken_starts(module, tmp_path)
    watcher.join()
    assert hashes(result) == calm
    kinds = [kind for kind, _ in events(result.path)]
    assert kinds == ["worker lost"] * 4 + ["worker not replaced"]


def test_a_run_continues_if_a_replacement_cannot_be_started(data, calm, tmp_path, monkeypatch):
    """The run goes on with those that it has."""
    file = program(tmp_path, data, "def fault(model):\n    if once():\n        os._exit(1)")

    class Breaks:
        def on_trial_start(self, trial):
            monkeypatch.setattr(sys, "executable", "/no/such/python")

    with pytest.warns(UserWarning, match=r"is missing from now on: cannot start a worker process"):
        result = search(file, executor=local(), callbacks=[Breaks()])
    assert hashes(result) == calm
    assert [kind for kind, _ in events(result.path)] == ["worker lost", "worker not replaced"]


def test_spawning_a_worker_without_free_descriptors_leaks_nothing():
    """Whatever step fails, nothing stays open and no process behind."""
    process = psutil.Process()
    before = process.num_fds(), len(process.children())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    failed = 0
    filled = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] + 50, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                filled.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(20):
            try:
                worker = WorkerProcess.spawn(WorkerKind(1))
            except WorkerError as error:
                assert "Too many open files" in str(error)
                failed += 1
                os.close(filled.pop())
            else:
                worker.stop(kill=True)
                break
    finally:
        for file in filled:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert failed >= 4
    del worker
    assert (process.num_fds(), len(process.children())) == before


def test_a_worker_that_has_no_process_group_yet_is_killed():
    """As a fork that is stopped in its first instructions."""
    process = subprocess.Popen(["sleep", "600"])
    ours, theirs = socket.socketpair()
    worker = WorkerProcess(process, Channel(ours), BeatPage(), WorkerKind(1))
    os.kill(process.pid, signal.SIGSTOP)
    worker.stop(kill=True)
    theirs.close()
    assert process.returncode == -signal.SIGKILL


def test_a_trial_that_leaks_open_files_fails_and_its_worker_is_replaced(data, tmp_path):
    """It fails as every user error does; the worker has none left and is replaced."""
    extra = """
        import resource
        kept = []
        def fault(model):
            resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
            while True:
                kept.append(open(os.devnull))
        """
    result = search(program(tmp_path, data, extra), workers=1, max_retries=1)
    assert [trial.status for trial in result.trials] == ["finished", "failed", "finished"]
    assert "Too many open files" in result.trials[1].error
    assert "out of file descriptors" in events(result.path)[0][1]


def test_a_warm_worker_that_is_stopped_is_replaced(data, calm, tmp_path):
    """Between two searches: it is found out when it is given something to do."""
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    warm_workers.close()
    search(program(one, data), workers=1)
    worker = warm_workers._idle[-1].process.pid
    os.kill(worker, signal.SIGSTOP)
    executor = LocalExecutor(1, 1, silence=SILENCE)
    result = search(program(two, data), executor=executor)
    assert hashes(result) == calm
    assert_gone(worker)


# --- the coordinator's end ---------------------------------------------------

STAYS = {
    "waits": "time.sleep(1000)",
    "holds the GIL": "ctypes.PyDLL(None).sleep(1000)",
    "is stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "ignores all signals": (
        "[signal.signal(s, signal.SIG_IGN) for s in range(1, 32) if s not in (9, 19)]; "
        "time.sleep(1000)"
    ),
}


@pytest.mark.parametrize(
    ("name", "thread", "fork"),
    [
        *((name, thread, "1") for name in STAYS for thread in (False, True)),
        *(("is stopped", thread, "0") for thread in (False, True)),
    ],
)
def test_workers_and_their_children_end_with_the_coordinator(
    data, tmp_path, monkeypatch, name, thread, fork
):
    monkeypatch.setenv("CEREBRO_FORK", fork)
    # Once: who is woken by the coordinator's end must not stop itself again before it ends.
    extra = f"""
        def fault(model):
            if not once():
                return
            child = subprocess.Popen(["sleep", "1000"])
            say(f"{{os.getpid()}} {{child.pid}}")
            open(os.path.join(HERE, "ready"), "w").close()
            {STAYS[name]}
        """
    file = program(tmp_path, data, extra)
    code = textwrap.dedent(
        """
        import sys, threading
        import cerebro
        from cerebro.run.recipe import import_file
        module = import_file(sys.argv[1])
        def run():
            cerebro.search(module.build, module.space, module.data, run="run", workers=1,
                           progress=False, **module.settings)
        def starts_another():
            # The thread that starts the workers ends long before the process does.
            from cerebro.executors.process import WorkerKind, WorkerProcess, warm_workers
            warm_workers.give(WorkerProcess.spawn(WorkerKind(1), fork=True))
        if sys.argv[2] == "True":
            thread = threading.Thread(target=starts_another)
            thread.start()
            thread.join()
        run()
        """
    )
    process = subprocess.Popen([sys.executable, "-c", code, file, str(thread)], cwd=tmp_path)
    try:
        wait_for(tmp_path / "ready", process)
        worker, child = said(tmp_path)
        if name == "is stopped":
            wait_until_stopped(int(worker))
    finally:
        process.kill()
        process.wait()
    assert_gone(worker, child)


def wait_for(path, process):
    """Wait until a file is there, as long as the process lives."""
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.01)


def wait_until_stopped(pid):
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def test_a_dead_worker_is_noticed_although_its_child_holds_the_socket(data, calm, tmp_path):
    """A fork of the worker keeps a copy of its socket open after its death."""
    extra = """
        def fault(model):
            if once():
                child = os.fork()
                if child == 0:
                    os.setsid()  # not killed with the worker's group
                    time.sleep(1000)
                while os.getpgid(child) != child:
                    time.sleep(0.001)
                say(child)
                os.kill(os.getpid(), signal.SIGKILL)
        """
    result = search(program(tmp_path, data, extra), executor=local())
    (child,) = said(tmp_path)
    os.kill(int(child), signal.SIGKILL)
    assert hashes(result) == calm
    ((_, text),) = events(result.path)
    assert "was ended by SIGKILL in trial 1" in text


# --- memory ------------------------------------------------------------------

GROUPS = {
    1: ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    2: ("/sys/fs/cgroup", "memory.max", "memory.swap.max"),
}
ROOM = 500 << 20


@pytest.fixture
def memory_group():
    """A control group with little memory: its folder. Skips where none can be made."""
    for version, (root, limit, swap) in GROUPS.items():
        group = Path(root, f"cerebro-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(ROOM))
        except OSError:
            group.rmdir()
            continue
        with contextlib.suppress(OSError):
            (group / swap).write_text(str(ROOM if version == 1 else 0))
        yield group
        for pid in (group / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        assert_gone()
        wait_until_empty(group)
        group.rmdir()
        return
    pytest.skip("no control group for memory can be made here: not root, or no such groups")


def wait_until_empty(group):
    while (group / "cgroup.procs").read_text().split():
        time.sleep(0.01)


def test_a_worker_killed_by_the_kernel_for_memory_is_reported_as_such(
    data, calm, tmp_path, memory_group
):
    extra = """
        def fault(model):
            if once():
                np.ones(1 << 28)  # 2 GB
        """
    file = program(tmp_path, data, extra)
    code = """
import os, sys
from cerebro.run.recipe import import_file
with open(os.path.join(sys.argv[2], "cgroup.procs"), "w") as file:
    file.write(str(os.getpid()))
module = import_file(sys.argv[1])
import cerebro
# One worker, which has done a unit before: its memory is known.
cerebro.search(module.build, module.space, module.data, run="run", workers=1, progress=False,
               **module.settings)
"""
    subprocess.run([sys.executable, "-c", code, file, memory_group], cwd=tmp_path, check=True)
    assert hashes(cerebro.open(tmp_path / "run")) == calm
    ((_, text),) = events(tmp_path / "run")
    assert text.startswith(
        "the worker process was ended by SIGKILL, probably out of memory (the kernel's "
        "out-of-memory killer struck; it held "
    )


def test_sigkill_is_not_called_out_of_memory_without_a_reason(data, tmp_path):
    extra = "def fault(model):\n    if once():\n        os.kill(os.getpid(), signal.SIGKILL)"
    result = search(program(tmp_path, data, extra), workers=1)
    ((_, text),) = events(result.path)
    assert text.startswith("the worker process was ended by SIGKILL in trial 1")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_memory_error_fails_its_trial(data, calm, tmp_path, workers):
    file = program(tmp_path, data, "def fault(model): np.ones(1 << 55)")
    result = search(file, workers=workers)
    assert [trial.status for trial in result.trials] == ["finished", "failed", "finished"]
    assert "MemoryError" in result.trials[1].error
    assert [hashes(result)[n] for n in (0, 2)] == [calm[n] for n in (0, 2)]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_trial_whose_memory_grows_is_named(data, tmp_path, workers):
    extra = """
        kept = []
        class Grows(Model):
            def end_epoch(self, epoch, metrics):
                if self.trial == 1:
                    kept.append(np.ones(4_000_000))  # 32 MB
        def build(config, info):
            return Grows(config, info)
        """
    file = program(tmp_path, data, extra)
    with pytest.warns(UserWarning, match=r"trial 1 keeps about 3\d MB more memory") as caught:
        result = search(file, workers=workers, epochs=8)
    assert len([w for w in caught if "more memory" in str(w.message)]) == 1
    ((trial, kind, text),) = rows_of(result.path, "SELECT trial, kind, text FROM events")
    assert (trial, kind) == (1, "memory grows")
    # With two workers, the growth of the trial is divided between two processes.
    assert re.search("after epoch 3" if workers == 0 else "after epoch [3-8]", text)


def test_trials_that_keep_no_memory_are_not_named(data, tmp_path, recwarn):
    """They take and free much, and their states are large."""
    extra = """
        class Large(Model):
            def __init__(self, config, info):
                super().__init__(config, info)
                self.big = np.zeros(3_000_000)
            def train_batch(self, batch):
                self.scratch = [np.ones(1_000_000) for _ in range(10)]
                return super().train_batch(batch)
            def state_dict(self):
                return {**super().state_dict(), "big": self.big}
            def load_state_dict(self, state):
                super().load_state_dict(state)
                self.big = np.array(state["big"])
        def build(config, info):
            return Large(config, info)
        """
    result = search(program(tmp_path, data, extra), epochs=8, live_models=1)
    assert events(result.path) == []


# --- warm workers ------------------------------------------------------------


def test_a_warm_worker_is_not_taken_for_another_file_of_the_same_name(data, tmp_path, monkeypatch):
    losses, workers = [], []
    for n, loss in enumerate(["1.0", "1.0", "22.0"]):
        folder = tmp_path / ("one" if n < 2 else "two")
        folder.mkdir(exist_ok=True)
        extra = f"""
            class Constant(Model):
                def eval_batch(self, batch):
                    return {{"loss": {loss}}}
            def build(config, info):
                return Constant(config, info)
            """
        if n != 1:
            program(folder, data, extra).rename(folder / "shadowed.py")
            monkeypatch.syspath_prepend(folder)
            monkeypatch.delitem(sys.modules, "shadowed", raising=False)
        module = importlib.import_module("shadowed")
        executor = LocalExecutor(1, threads=4)  # of no other test
        seen = Workers(executor)
        settings = {**module.settings, "n_trials": 1, "progress": False, "run": folder / f"{n}"}
        result = cerebro.search(
            *(module.build, module.space, module.data),
            executor=executor,
            callbacks=[seen],
            **settings,
        )
        losses.append(result.best.metrics["loss"])
        workers.append(seen.pids)
    assert losses == [1.0, 1.0, 22.0]
    assert workers[0] == workers[1] != workers[2]


class Workers:
    """Notes the process ids of a run's workers."""

    def __init__(self, executor):
        self.executor = executor

    def on_run_start(self, result):
        self.pids = sorted(self.executor.processes().values())

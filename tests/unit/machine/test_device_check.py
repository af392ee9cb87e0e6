"""Verdicts on GPUs: kept, read again, and done without where they cannot be."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cerebro.data import depots
from cerebro.errors import InputError
from cerebro.executors.process import WorkerKind, WorkerProcess
from cerebro.machine import cuda
from cerebro.machine.devices import Device
from cerebro.machine.imports import PACKAGE
from cerebro.machine.local import LOCAL
from cerebro.worker import runner as worker
from cerebro.worker.clock import IMPORT_SECONDS, BeatClock, TaskClock


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU by name only; what its check says, and how often it was asked."""
    has = SimpleNamespace(
        said=("", True), tried=0, folder=tmp_path / "cache", about={"name": "GPU A", "uuid": "1"}
    )

    def attempt(name):
        has.tried += 1
        return has.said

    runtime = {"path": "", "version": 12080, "driver": 13000}
    monkeypatch.setenv(cuda.CACHE_FOLDER, str(has.folder))
    monkeypatch.setattr(cuda, "open_runtime", lambda: runtime)
    monkeypatch.setattr(cuda, "describe_devices", lambda: [has.about])
    monkeypatch.setattr(cuda, "_run_check", attempt)
    has.runtime = runtime
    return has


def kept(gpu):
    return sorted(path for path in gpu.folder.iterdir() if path.suffix != ".lock")


@pytest.mark.parametrize("problem", ["", "cuda:0: a kernel gives wrong bytes"])
def test_a_verdict_is_kept(gpu, problem):
    gpu.said = (problem, True)
    assert [cuda.find_problem("cuda:0") for _ in range(3)] == [problem] * 3
    assert (gpu.tried, len(kept(gpu))) == (1, 1)


def test_doctor_checks_again_and_keeps_the_new_verdict(gpu):
    gpu.said = ("broken", True)
    assert cuda.find_problem("cuda:0") == "broken"
    gpu.said = ("", True)
    assert cuda.find_problem("cuda:0") == "broken"
    assert cuda.find_problem("cuda:0", anew=True) == ""
    assert cuda.find_problem("cuda:0") == ""
    assert (gpu.tried, len(kept(gpu))) == (2, 1)


def test_a_transient_problem_is_not_kept(gpu):
    gpu.said = ("out of memory", False)
    assert cuda.find_problem("cuda:0") == "out of memory"
    gpu.said = ("", True)
    assert cuda.find_problem("cuda:0") == ""
    assert gpu.tried == 2


@pytest.mark.parametrize("changed", ["gpu", "driver", "runtime", "torch", "cerebro"])
def test_a_verdict_depends_on_gpu_driver_and_library_versions(gpu, monkeypatch, changed):
    cuda.find_problem("cuda:0")
    if changed == "gpu":
        gpu.about["uuid"] = "2"
    elif changed in ("driver", "runtime"):
        gpu.runtime["driver" if changed == "driver" else "version"] += 10
    else:
        name = "package_version" if changed == "torch" else "version"
        monkeypatch.setattr(cuda, name, lambda *_: "another")
    cuda.find_problem("cuda:0")
    assert (gpu.tried, len(kept(gpu))) == (2, 2)


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b"\xff\x00", b'{"of": {}, "problem": ""}', b"[" * 50_000, b"9" * 200_000],
    ids=range(7),
)
def test_a_damaged_verdict_file_is_replaced(gpu, damage):
    gpu.said = ("broken", True)
    cuda.find_problem("cuda:0")
    kept(gpu)[0].write_bytes(damage)
    assert cuda.find_problem("cuda:0") == "broken"
    assert gpu.tried == 2
    assert json.loads(kept(gpu)[0].read_bytes())["problem"] == "broken"


def test_a_verdict_that_is_not_text_is_replaced(gpu):
    cuda.find_problem("cuda:0")
    file = kept(gpu)[0]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"problem": 3}))
    assert cuda.find_problem("cuda:0") == ""
    assert gpu.tried == 2


@pytest.mark.parametrize("place", ["file", "pipe", "missing home"])
def test_without_a_usable_folder_the_gpu_is_checked_each_time(gpu, monkeypatch, place):
    if place == "file":
        gpu.folder.write_text("not a folder")
    elif place == "pipe":
        gpu.folder.mkdir()
        cuda.find_problem("cuda:0")
        file = kept(gpu)[0]
        file.unlink()
        os.mkfifo(file)
        monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError()))
        gpu.tried = 0
    else:
        monkeypatch.delenv(cuda.CACHE_FOLDER)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

        def no_home():
            raise RuntimeError

        monkeypatch.setattr(Path, "home", no_home)
    assert [cuda.find_problem("cuda:0") for _ in range(2)] == ["", ""]
    assert gpu.tried == 2
    if place == "pipe":
        assert len(kept(gpu)) == 1  # nothing half written is left


def test_concurrent_checks_keep_one_verdict(gpu):
    gpu.said = ("broken", True)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(cuda.find_problem, ["cuda:0"] * 64))
    assert found == ["broken"] * 64
    assert (gpu.tried, len(kept(gpu))) == (1, 1)


def test_a_check_that_does_not_end_is_not_waited_for_forever(gpu, monkeypatch):
    monkeypatch.setattr(cuda, "CHECK_SECONDS", 0.1)
    cuda.find_problem("cuda:0")
    kept(gpu)[0].unlink()
    (lock,) = gpu.folder.glob("*.lock")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert cuda.find_problem("cuda:0") == ""
    assert gpu.tried == 2


# --- the check while a worker starts -----------------------------------------------


@pytest.fixture
def early(monkeypatch, tmp_path, cudart_standin):
    """The early checks of this test, over the stand-in for CUDA."""
    monkeypatch.setenv(cuda.CACHE_FOLDER, str(tmp_path / "cache"))
    monkeypatch.setenv(cuda.OVERRIDE, str(cudart_standin))
    monkeypatch.setattr(cuda, "_checked_early", set())
    monkeypatch.setattr(cuda, "_early", [])
    yield cuda._early
    for process in cuda._early:
        process.wait()


ASK = """
from cerebro.machine import cuda
cuda._run_check = lambda name: ("checked again", False)
print(cuda.find_problem("cuda:0"))
"""


def test_a_check_that_has_ended_is_reaped(early):
    cuda.check_early(os.environ)
    while any(child.pid == early[0].pid for child in psutil.Process().children()):
        time.sleep(0.01)
    assert early[0].wait() == 0


def ask_in_another_process():
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, check=True
    )  # fmt: skip
    return done.stdout.strip()


def test_a_worker_that_starts_finds_the_verdict(early):
    """And it is checked once for a GPU, and not again once it is stored."""
    worker = WorkerProcess.spawn(WorkerKind(1, Device("cuda:0", visible="0")))
    WorkerProcess.spawn(WorkerKind(1, Device("cuda:0", visible="0"))).stop(kill=True)
    worker.stop(kill=True)
    (process,) = early
    assert process.wait() == 0
    assert ask_in_another_process() == ""
    cuda._checked_early.clear()
    cuda.check_early(os.environ)
    assert early == []


HELD = """
from pathlib import Path
def wait(name):
    Path(sys.argv[3]).touch()
    while Path(sys.argv[3]).exists():
        time.sleep(0.01)
    return "broken", True
import time; cuda._run_check = wait; cuda.find_problem(sys.argv[2])
"""


def test_a_verdict_that_is_being_found_is_waited_for(early, tmp_path, monkeypatch):
    begun = tmp_path / "begun"
    program = HELD.replace("sys.argv[3]", repr(str(begun)))
    monkeypatch.setattr(cuda, "EARLY_PROGRAM", cuda._IMPORT + program)
    cuda.check_early(os.environ)
    while not begun.exists():
        assert early[0].poll() is None
        time.sleep(0.01)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask_in_another_process)
        while not (locked_by_two := count_openers(tmp_path / "cache") == 2) and not asked.done():
            time.sleep(0.01)
        assert locked_by_two
        begun.unlink()
        assert asked.result() == "broken"


def count_openers(folder):
    """Return how many processes have the lock of a verdict open."""
    (lock,) = folder.glob("*.lock")
    number = 0
    for files in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            number += any(file.readlink() == lock for file in files.iterdir())
    return number


def test_no_check_starts_for_the_cpu_or_without_a_folder(early, monkeypatch):
    WorkerProcess.spawn(WorkerKind(1)).stop(kill=True)
    assert early == []
    monkeypatch.setattr(cuda, "find_folder", lambda: None)  # the verdict could not be handed over
    cuda.check_early(os.environ)
    assert early == []


@pytest.mark.parametrize("changed", ["version", "package_version", "_kernel_module"])
def test_other_software_is_checked_early_again(early, monkeypatch, changed):
    cuda.check_early(os.environ)
    assert early[0].wait() == 0
    cuda._checked_early.clear()
    monkeypatch.setattr(cuda, changed, lambda *_: "another")
    cuda.check_early(os.environ)
    assert len(early) == 1


def test_a_missing_gpu_is_refused(gpu):
    with pytest.raises(InputError, match="cuda:3: there are 1 CUDA devices, counted from 0"):
        cuda.find_problem("cuda:3")


def test_verdicts_are_kept_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(cuda.CACHE_FOLDER)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cuda.find_folder() == tmp_path / ".cache" / "cerebro"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cuda.find_folder() == tmp_path / "x" / "cerebro"


IN_THE_WORKING_DIRECTORY = """
import os, sys
sys.path[:] = [p for p in sys.path if not os.path.isdir(os.path.join(p, "cerebro"))]
sys.path.append("")  # as `python -m cerebro` does
from cerebro.machine import cuda
cuda.open_runtime = lambda: {"path": "nothing.so"}
print(cuda._run_check("cuda:0")[0])
"""


def test_the_check_finds_a_cerebro_that_is_not_installed(tmp_path):
    """It starts, and says what is wrong with the runtime."""
    if (PACKAGE.parent / "numpy").exists():
        pytest.skip("Cerebro is installed in the folder of its dependencies")
    shutil.copytree(PACKAGE.parent / "cerebro", tmp_path / "cerebro")
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_WORKING_DIRECTORY],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("nothing.so")


@pytest.mark.parametrize(
    ("work", "lasting"),
    [("sys.exit(3)", False), ("os.kill(os.getpid(), 9)", False), ("os.abort()", True)],
)
def test_only_a_crash_is_kept(monkeypatch, work, lasting):
    """An error of Python's may be mended, and the system kills where memory is short."""
    monkeypatch.setattr(cuda, "open_runtime", lambda: {"path": ""})
    monkeypatch.setattr(cuda, "CHECK_PROGRAM", f"import os, sys; {work}")
    found, is_lasting = cuda._run_check("cuda:0")
    assert found.startswith("cuda:0: its check ended by ") and is_lasting is lasting


# --- the unit's time -------------------------------------------------------------


class Beat:
    def __init__(self):
        self.graces = []

    def begin_task(self, grace):
        self.graces.append(grace)


def test_the_first_gpu_check_does_not_count_as_unit_time(monkeypatch):
    beat = Beat()
    clock = BeatClock(beat, LOCAL.clock)
    runner = SimpleNamespace(_clock=clock, _tried=False)
    monkeypatch.setattr(depots, "find_problem", lambda name: beat.graces.append(name) or "")
    clock.begin()
    clock.note_built()
    worker.UnitRunner._try_device(runner, "cuda:0")
    assert beat.graces == [IMPORT_SECONDS, 0.0, worker.TRY_SECONDS, "cuda:0", 0.0]
    assert runner._tried


def test_a_gpu_without_memory_is_tried_again(monkeypatch):
    def short(name):
        raise MemoryError

    runner = SimpleNamespace(_clock=TaskClock(), _tried=False)
    monkeypatch.setattr(depots, "find_problem", short)
    with contextlib.nullcontext():
        worker.UnitRunner._try_device(runner, "cuda:0")
    assert not runner._tried

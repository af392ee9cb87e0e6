"""The fault campaign: its tools do what they say, and a few of its runs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

if not sys.platform.startswith("linux"):
    pytest.skip("the fault campaign needs Linux", allow_module_level=True)

from benchmarks.faults import models, power, processes
from benchmarks.faults.plan import ALL, PAUSES, WORKER_FAULTS, Fault, Leg, Moment, draw
from benchmarks.faults.running import Death, Progress, Report, Running
from benchmarks.faults.sabotage import CAUGHT_AS
from benchmarks.faults.shim import CLASSES, CannotCompile, Shim, compile_shim

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return compile_shim(tmp_path_factory.mktemp("shim"))
    except CannotCompile as error:
        pytest.skip(f"the shim cannot be compiled: {error}")


class Stage:
    """A folder under the shim, and programs that write into it."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.root = folder / "disk"
        self.root.mkdir()
        events = folder / "events"
        os.mkfifo(events)
        self.pipe = os.open(events, os.O_RDWR | os.O_NONBLOCK)
        self.shim = Shim(library, folder, self.root, events)

    def start(self, program: str) -> subprocess.Popen[str]:
        code = "import os, sqlite3\n" + textwrap.dedent(program)
        return subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=self.root,
            env={**os.environ, **self.shim.environment()},
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, program: str) -> str:
        process = self.start(program)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        return out

    def lose_power(self, mix: random.Random | None = None) -> dict[str, bytes]:
        power.lose_power(self.root, self.shim.shadow, mix)
        assert self.shim.trouble == 0
        files = [file for file in self.root.rglob("*") if file.is_file()]
        return {str(file.relative_to(self.root)): file.read_bytes() for file in files}

    def keep(self) -> None:
        power.begin_shadow(self.root, self.shim.shadow)
        self.shim.keep_shadow()


@pytest.fixture
def stage(library: Path, tmp_path: Path) -> Stage:
    return Stage(library, tmp_path)


SYNC_FOLDER = """
def sync_folder(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
def put(path, data, sync):
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())
"""


def test_a_loss_of_power_leaves_what_was_synced_and_no_more(stage: Stage) -> None:
    (stage.root / "before").write_bytes(b"before")
    stage.keep()
    stage.run(
        SYNC_FOLDER
        + """
        os.mkdir("in"); os.mkdir("lost")
        put("in/synced", b"synced", True)
        put("in/longer", b"synced", True)
        put("in/unsynced", b"unsynced", False)
        put("in/new", b"new", True)
        put("in/old", b"old", True)
        sync_folder("in"); sync_folder(".")
        put("lost/a", b"a", True); sync_folder("lost")  # its own name is not lost: "." was synced
        with open("in/longer", "ab") as file: file.write(b", not this")
        put("in/nameless", b"nobody knows it", True)
        os.rename("in/new", "in/old")
        os.unlink("before")
        os.mkdir("later"); put("later/a", b"a", True); sync_folder("later")
        """.replace("\n        ", "\n")
    )
    assert stage.lose_power() == {
        "before": b"before",
        "in/synced": b"synced",
        "in/longer": b"synced",
        "in/unsynced": b"",
        "in/new": b"new",
        "in/old": b"old",
        "lost/a": b"a",
    }
    # What is there after the power is back is there for good.
    assert stage.lose_power()["in/longer"] == b"synced"


def test_an_inode_used_again_is_another_file(stage: Stage) -> None:
    stage.keep()
    stage.run(
        SYNC_FOLDER
        + """
        put("a", b"first", True); sync_folder(".")
        for n in range(50):
            os.unlink("a"); put("a", b"%d" % n, True)
        """.replace("\n        ", "\n")
    )
    assert stage.lose_power() == {"a": b"first"}


@pytest.mark.parametrize("seed", range(8))
def test_sqlite_commits_outlive_any_loss_of_power(stage: Stage, seed: int) -> None:
    """The shim sees all that SQLite does, and SQLite stands what mixes make of it."""
    stage.keep()
    said = stage.run(
        SYNC_FOLDER
        + """
        db = sqlite3.connect("new.sqlite")
        db.execute("CREATE TABLE t (n)"); db.commit(); db.close()
        os.rename("new.sqlite", "db.sqlite"); sync_folder(".")
        db = sqlite3.connect("db.sqlite")
        db.execute("PRAGMA journal_mode = WAL"); db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA wal_autocheckpoint = 5")
        for n in range(40):
            db.execute("INSERT INTO t VALUES (?)", (n,))
            if n % 3 == 2:
                db.commit()
        print(db.execute("SELECT count(*) FROM t").fetchone()[0], flush=True)
        os._exit(0)
        """.replace("\n        ", "\n")
    )
    assert said == "40\n"
    stage.lose_power(random.Random(seed) if seed else None)
    count = stage.run(
        'print(sqlite3.connect("db.sqlite").execute("SELECT max(n) FROM t").fetchone())'
    )
    assert count == "(38,)\n"


def test_a_disk_that_lies_about_its_syncs_loses_what_was_synced(stage: Stage) -> None:
    program = SYNC_FOLDER + 'put("a", b"a", True); sync_folder(".")'
    stage.keep()
    stage.shim.strike("lie", after=1, classes=CLASSES["sync"])
    stage.run(program)
    assert stage.lose_power() == {}
    stage.shim.calm()
    stage.run(program)
    assert stage.lose_power() == {"a": b"a"}


@pytest.mark.parametrize(
    ("action", "after", "said"),
    [("fail once", 3, "2 F 4 5"), ("fail", 3, "2 F F F"), ("fail once", 9, "2 3 4 5")],
)
def test_the_shim_fails_the_requested_operation(
    stage: Stage, action: str, after: int, said: str
) -> None:
    stage.shim.strike(action, after=after, classes=CLASSES["sync"], error=5)
    assert said == stage.run(
        """
        fd = os.open("a", os.O_CREAT | os.O_WRONLY)
        os.fsync(fd)
        out = []
        for n in range(2, 6):
            try:
                os.fsync(fd)
                out.append(str(n))
            except OSError as error:
                assert error.errno == 5
                out.append("F")
        print(*out, end="")
        """
    )


def test_the_shim_simulates_short_writes_and_a_full_disk(stage: Stage) -> None:
    program = """
        fd = os.open("a", os.O_CREAT | os.O_WRONLY)
        try:
            print(os.write(fd, bytes(100)), end=" ")
            os.posix_fallocate(fd, 0, 1000)
            print(os.write(fd, bytes(100)), end="")
        except OSError as error:
            print(error.errno, end="")
        """
    stage.shim.strike("short", after=1, classes=CLASSES["write"])
    assert stage.run(program) == "50 100"
    stage.shim.calm()
    (stage.root / "a").unlink()
    stage.shim.set_room(130)
    assert stage.run(program) == "100 28"
    assert stage.run('open("/dev/null", "wb").write(b"elsewhere")') == ""


def test_the_shim_halts_a_process_before_an_operation(stage: Stage) -> None:
    stage.shim.strike("halt", after=2, classes=CLASSES["rename"])
    process = stage.start(
        """
        open("a", "w").close()
        os.rename("a", "b")
        os.rename("b", "c")
        """
    )
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert os.read(stage.pipe, 1000) == f"halt {process.pid} rename /c\n".encode()
    assert [file.name for file in stage.root.iterdir()] == ["b"]
    process.send_signal(signal.SIGCONT)
    assert process.wait() == 0


def test_a_mark_finds_processes_and_their_children() -> None:
    mark = f"test-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", "import subprocess; subprocess.run(['cat'])"],
        stdin=subprocess.PIPE,
        env={**os.environ, processes.MARK: mark},
    ) as process:
        while len(processes.marked(mark)) < 2:
            assert process.poll() is None
        assert process.pid in processes.marked(mark)
        processes.kill_all(mark)
        assert processes.marked(mark) == []


def test_plans_are_drawn_from_their_seed_alone() -> None:
    assert draw(7) == draw(7)
    kinds = {fault.kind for seed in range(300) for leg in draw(seed).legs for fault in leg.faults}
    assert kinds == set(ALL)
    some = frozenset(WORKER_FAULTS.keys() | PAUSES.keys())
    kinds = {f.kind for seed in range(50) for leg in draw(seed, some).legs for f in leg.faults}
    assert kinds <= some


class Nowhere:
    """A place where nothing happens: lines are given to `Running.hear` by hand."""

    mark = "nowhere"
    run = deafen = Path("/nonexistent")
    clones = False
    units_per_epoch = 5
    shim = None
    disk = None

    def lines(self, timeout: float, child: int | None = None) -> list[str]:
        return []


@pytest.mark.parametrize(
    ("lines", "killed", "found"),
    [
        (["start 1 0 4", "done 0", "start 2 0 5", "start 1 1 6"], None, []),
        (["start 1 0 3"], None, ["lost", "repeated"]),
        (["start 1 0 6"], None, ["wrong"]),
        (["start 1 2 1"], None, ["wrong"]),
        (["start 1 1 5"], None, []),
        (["start 1 0 4", "start 2 0 4"], None, ["repeated"]),
        (["start 1 0 4", "start 2 0 6"], None, ["wrong"]),
        (["start 1 0 4", "start 2 1 6", "start 3 0 4"], 1, []),
        (["start 1 0 4", "start 2 1 6", "start 3 1 6"], 1, ["repeated"]),
        (["start 1 0 4", "start 3 0 4", "start 3 0 4"], 1, ["repeated"]),
        (["start 2 0 4", "start 1 0 5", "start 3 0 4"], 1, ["repeated"]),
    ],
)
def test_lost_repeated_and_wrong_units_are_reported(
    lines: list[str], killed: int | None, found: list[str]
) -> None:
    """Trial 0 had begun unit 4, of which 4 were committed; trial 1 unit 5, and all 6 are."""
    with subprocess.Popen(["true"]) as process:
        before = Progress(highest={0: 4, 1: 5}, floor={0: 4, 1: 5})
        running = Running(Nowhere(), Leg("resume", 2, ()), process, before, Report(0))
        if killed is not None:
            running.deaths.append(Death("worker killed", killed, 0))
            running._running[killed] = -1
        for line in lines:
            running.hear(line + " 1000" if line.startswith("start") else line)
        assert [text.split(":")[0] for text in running._report.problems] == found


def test_a_unit_is_done_although_the_next_one_began_first() -> None:
    """A worker begins a queued unit before the coordinator hears of the one before it."""
    with subprocess.Popen(["true"]) as process:
        before = Progress(highest={0: 4, 1: 5}, floor={0: 4, 1: 5})
        running = Running(Nowhere(), Leg("resume", 2, ()), process, before, Report(0))
        for line in ["start 1 0 4 1", "start 1 0 5 2", "done 0"]:
            running.hear(line)
        assert running.done == {0: 5}
        running.hear("done 0")
        assert running.done == {0: 6}


class InTwoBreaths(Nowhere):
    """What is told while a strike listens comes after what was told before it."""

    def __init__(self, folder: Path) -> None:
        self.deafen = folder / "deafen"
        self.breaths = [["start 1 0 0 1", "start 1 0 1 2"], ["start 1 0 2 3", "deaf 1"]]

    def lines(self, timeout: float, child: int | None = None) -> list[str]:
        return self.breaths.pop(0) if self.breaths else []


def test_event_lines_are_processed_in_order(tmp_path: Path) -> None:
    fault = Fault("coordinator killed, worker deaf", Moment("unit", 1), 0)
    with subprocess.Popen(["sleep", "1000"]) as process:
        place, leg = InTwoBreaths(tmp_path), Leg("resume", 1, (fault,))
        running = Running(place, leg, process, Progress(), Report(0))
        assert running.watch() == -signal.SIGKILL
    assert running.highest == {0: 2}
    assert running._report.problems == []


def campaign(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_campaign_detects_every_corruption() -> None:
    done = campaign("--self-test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CAUGHT_AS)} ways to corrupt a run, 0 not detected" in done.stdout


def test_a_worker_does_not_wait_for_an_ended_campaign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "events")
    monkeypatch.setenv(models.EVENTS, str(tmp_path / "events"))
    monkeypatch.setattr(models, "_pipe", [])
    with pytest.raises(OSError, match="No such device or address"):
        models.tell("start 1 0 0 0")

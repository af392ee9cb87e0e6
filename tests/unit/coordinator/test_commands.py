"""Commands to a run, without a run: how they are written, found, refused and obeyed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cerebro.cli as cli
import cerebro.control as control
from cerebro.control import Command
from cerebro.coordinator.user import MAX_BYTES, MAX_NOTES, STOP_SECONDS, Commands, Inbox
from cerebro.errors import InputError
from cerebro.machine.disk import Disk
from cerebro.machine.local import LOCAL, Clock, Machine
from cerebro.run.owner import Owner
from cerebro.run.records import TrialRecord
from cerebro.run.store import Store

# --- the files --------------------------------------------------------------------


@pytest.mark.parametrize("command", [Command("stop"), Command("pause", 0), Command("continue", 7)])
def test_a_command_is_read_as_it_was_written(command: Command) -> None:
    assert Command.from_json(command.to_json()) == command


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "not JSON"),
        ("stop", "not JSON"),
        ("\ud800", "not JSON"),
        ("[" * 4000, "not JSON"),
        ('{"command": "stop"} {}', "not JSON"),
        ("[]", "not a command"),
        ("{}", "not one of stop, pause, unpause"),
        ('{"command": ["stop"]}', "not one of"),
        ('{"command": "Stop"}', "not one of"),
        ('{"command": "stop", "trail": 3}', "not a command"),
        ('{"command": "stop", "trial": true}', "its trial must be a number from 0"),
        ('{"command": "stop", "trial": -1}', "its trial must be a number from 0"),
        ('{"command": "stop", "trial": 1.0}', "its trial must be a number from 0"),
        ('{"command": "stop", "trial": "1"}', "its trial must be a number from 0"),
        ('{"command": "stop", "trial": 99999999999}', "its trial must be a number from 0"),
    ],
)
def test_an_invalid_command_is_refused(text: str, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        Command.from_json(text)


def test_a_binary_file_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON"):
        Command.from_json(b"\xff\xfe\xff")


def drain(inbox: Inbox) -> list[Command | str]:
    return list(inbox.take())


def test_commands_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path, LOCAL)
    sent = [Command("pause", n) for n in range(20)]
    for command in sent:
        control.put(tmp_path, command)
    assert drain(inbox) == sent
    assert drain(inbox) == []
    assert list(tmp_path.iterdir()) == []


def test_a_command_is_removed_when_it_took_effect(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path, LOCAL)
    first, second = control.put(tmp_path, Command("pause")), control.put(tmp_path, Command("stop"))
    commands = inbox.take()
    assert next(commands) == Command("pause") and first.exists()
    assert next(commands) == Command("stop") and not first.exists() and second.exists()
    assert next(commands, None) is None and not second.exists()


def test_commands_left_at_start_and_end_are_discarded(tmp_path: Path) -> None:
    control.put(tmp_path, Command("stop"))
    (tmp_path / ".half").touch()
    (tmp_path / "folder").mkdir()
    inbox = Inbox(tmp_path, LOCAL)
    assert list(tmp_path.iterdir()) == []
    assert drain(inbox) == []
    control.put(tmp_path, Command("stop"))
    inbox.close()
    assert list(tmp_path.iterdir()) == []


def test_the_inbox_folder_is_created_and_may_be_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "control"
    inbox = Inbox(folder, LOCAL)
    folder.rmdir()
    assert drain(inbox) == []
    inbox.close()


def test_a_folder_in_place_of_the_inbox_is_left_alone(tmp_path: Path) -> None:
    folder, other = tmp_path / "control", tmp_path / "other"
    inbox = Inbox(folder, LOCAL)
    other.mkdir()
    control.put(other, Command("stop"))
    folder.rename(tmp_path / "moved")
    folder.symlink_to(other)
    control.put(tmp_path / "moved", Command("pause"))
    assert drain(inbox) == [Command("pause")]
    inbox.close()
    assert len(list(other.iterdir())) == 1


def test_an_inbox_closes_its_descriptors(tmp_path: Path) -> None:
    def count() -> int:
        return len(list(Path("/dev/fd").iterdir()))

    before = count()
    inbox = Inbox(tmp_path, LOCAL)
    assert count() > before
    inbox.close()
    inbox.close()
    assert count() == before
    inbox = Inbox(tmp_path, LOCAL)
    del inbox
    assert count() == before


def garbage(folder: Path, outside: Path) -> dict[str, str]:
    """Fill a folder with entries that are not commands; return names and parts of the notes."""
    (folder / "a-dir.json").mkdir()
    (folder / "a-dir.json" / "inner").write_text("x")
    (folder / "a-dir.json" / "deeper").mkdir()
    (folder / "a-dir.json" / "deeper" / "file").touch()
    (folder / "a-dir.json" / "out").symlink_to(outside)
    (folder / "b-link.json").symlink_to(outside / "target.json")
    (folder / "c-dangling.json").symlink_to(outside / "nowhere")
    (folder / "d-link-to-dir.json").symlink_to(outside)
    os.mkfifo(folder / "e-fifo.json")
    (folder / "f-large.json").write_text('{"command": "stop"}' + " " * MAX_BYTES)
    (folder / "g-garbage.json").write_bytes(b"\x80\x04\x95pickle")
    (folder / "h-empty.json").touch()
    (folder / "i-nested.json").write_text("[" * MAX_BYTES)
    (folder / "j-name.txt").write_text('{"command": "stop"}')
    (folder / "k-unknown.json").write_text('{"command": "dance"}')
    (folder / os.fsdecode(b"l-\xff.json")).write_text("{")
    (folder / ("m" + "x" * 240 + ".json")).write_text("{")
    return {
        "a-dir": "regular file", "b-link": "symbolic link", "c-dangling": "symbolic link",
        "d-link": "symbolic link", "e-fifo": "regular file", "f-large": str(MAX_BYTES),
        "g-garbage": "JSON", "h-empty": "JSON", "i-nested": "JSON", "j-name": "not a command",
        "k-unknown": "not one of", "l-": "JSON", "mxxx": "JSON",
    }  # fmt: skip


def test_invalid_files_are_removed_and_reported_and_hide_no_command(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "control"
    outside.mkdir()
    (outside / "target.json").write_text('{"command": "stop"}')
    inbox = Inbox(folder, LOCAL)
    expected = garbage(folder, outside)
    (folder / "z.json").write_text('{"command": "pause"}')
    *told, last = drain(inbox)
    assert last == Command("pause")
    assert len(told) == len(expected)
    for line, (name, cause) in zip(told, expected.items(), strict=True):
        assert isinstance(line, str) and line.startswith(name) and cause in line, line
        assert line.isprintable() and len(line) < 300
    assert list(folder.iterdir()) == []
    assert (outside / "target.json").read_text() == '{"command": "stop"}'


def test_a_file_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path, LOCAL)
    (tmp_path / ".00-half.json").write_text('{"comm')
    control.put(tmp_path, Command("pause"))
    assert drain(inbox) == [Command("pause")]
    assert [path.name for path in tmp_path.iterdir()] == [".00-half.json"]


def test_a_file_that_cannot_be_removed_is_obeyed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = Inbox(tmp_path, LOCAL)

    def refuse(name: str, *, dir_fd: int) -> None:
        raise PermissionError(13, "Permission denied")

    control.put(tmp_path, Command("pause", 1))
    monkeypatch.setattr(os, "unlink", refuse)
    assert drain(inbox) == [Command("pause", 1)]
    control.put(tmp_path, Command("pause", 2))
    assert drain(inbox) == [Command("pause", 2)]


class NetworkDisk(Disk):
    def is_remote(self, path: object) -> bool:
        return True


def test_on_a_network_disk_the_inbox_is_polled_once_a_second(tmp_path: Path) -> None:
    clock = SimpleNamespace(now=100.0)
    inbox = Inbox(tmp_path, Machine(HandClock(lambda: clock.now), NetworkDisk()))
    assert drain(inbox) == []
    control.put(tmp_path, Command("pause"))
    clock.now += 0.5
    assert drain(inbox) == []
    clock.now += 0.5
    assert drain(inbox) == [Command("pause")]
    inbox.close()


def test_concurrent_writers_lose_no_commands(tmp_path: Path) -> None:
    """Threads and processes write while somebody reads: each sender's commands, in its order."""
    inbox = Inbox(tmp_path, LOCAL)
    code = (
        "import sys; from pathlib import Path; from cerebro.control import *\n"
        "for n in range(100): put(Path(sys.argv[1]), Command('pause', int(sys.argv[2]) + n))"
    )

    def write(first: int) -> None:
        for n in range(100):
            control.put(tmp_path, Command("pause", first + n))

    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(first)])
        for first in (1000, 2000)
    ]
    threads = [threading.Thread(target=write, args=(first,)) for first in (3000, 4000)]
    for thread in threads:
        thread.start()
    found: list[Command | str] = []
    while any(process.poll() is None for process in processes):
        found += drain(inbox)
    for thread in threads:
        thread.join()
    found += drain(inbox)
    assert [process.returncode for process in processes] == [0, 0]
    numbers = [c.trial for c in found if isinstance(c, Command) and c.trial is not None]
    assert len(found) == len(numbers) == 400
    for first in (1000, 2000, 3000, 4000):
        own = [n for n in numbers if first <= n < first + 1000]
        assert own == list(range(first, first + 100))


# --- sending --------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run that this process owns, with trials 0 (running), 1 (finished) and 2 (paused)."""
    folder = tmp_path / "run"
    make_run(folder)
    with Owner.take(folder):
        yield folder


def make_run(folder: Path) -> None:
    folder.mkdir()
    store = Store.create(folder, {"status": "running", "owner": {"pid": 4711, "host": "here"}})
    for number, status in enumerate(["running", "finished", "paused"]):
        store.add_trial(TrialRecord(number, {"lr": 0.1}, status, 3))
    store.close()


def set_meta(folder: Path, key: str, value: Any) -> None:
    store = Store(folder)
    store.set_meta(key, value)
    store.close()


def commands_in(folder: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted((folder / "control").iterdir())]


def test_functions_write_one_file_each(run: Path) -> None:
    control.pause(run, 0)
    control.unpause(run, trial=2)
    control.stop(str(run))
    assert commands_in(run) == [
        {"command": "pause", "trial": 0},
        {"command": "unpause", "trial": 2},
        {"command": "stop"},
    ]


@pytest.mark.parametrize("status", ["finished", "stopped", "failed"])
def test_a_run_that_is_over_takes_no_commands(run: Path, status: str) -> None:
    set_meta(run, "status", status)
    with pytest.raises(InputError, match=f"is {status}: the run is not in progress"):
        control.stop(run)
    assert not (run / "control").exists()


def test_a_run_whose_owner_died_accepts_no_commands(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder)
    Owner.take(folder).release()
    with pytest.raises(InputError, match=r"4711 on here.* is gone.*cerebro resume"):
        control.pause(folder)
    assert not (folder / "control").exists()


@pytest.mark.parametrize(
    ("trial", "cause"),
    [(3, "no trial 3 yet; it has trials 0 to 2"), (-1, "no trial -1"), (1, "1 is finished")],
)
def test_commands_to_invalid_trials_are_refused(run: Path, trial: int, cause: str) -> None:
    with pytest.raises(InputError, match=cause):
        control.stop(run, trial)


def test_only_the_owner_of_a_run_controls_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    said = f"cannot write to {run}/control: only the run's owner can control it"
    with pytest.raises(PermissionError, match=said):
        control.stop(run)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a run"):
        control.stop(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_cli_commands_are_written_to_the_inbox(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["pause", str(run)]) == 0
    assert f"python -m cerebro continue {run}" in capsys.readouterr().out
    assert cli.main(["pause", str(run), "--trial", "0"]) == 0
    assert f"python -m cerebro continue {run} --trial 0" in capsys.readouterr().out
    assert cli.main(["continue", str(run)]) == 0
    assert cli.main(["stop", str(run), "--trial", "2"]) == 0
    assert [c["command"] for c in commands_in(run)] == ["pause", "pause", "unpause", "stop"]
    assert cli.main(["stop", str(run), "--trial", "1"]) == 1
    assert "trial 1 is finished already" in capsys.readouterr().err


# --- obeying --------------------------------------------------------------------


class FakeRun:
    """Records what it is told."""

    def __init__(self, **trials: str) -> None:
        self.trials: Any = {
            int(number[1:]): SimpleNamespace(
                record=SimpleNamespace(status=status), held=status == "held"
            )
            for number, status in trials.items()
        }
        self.told: list[Any] = []

    def status_of(self, number: int) -> Any:
        return self.trials[number].record.status if number in self.trials else None

    def cancel_units(self) -> None:
        self.told.append("cancel")

    def stop_trial(self, number: int) -> None:
        self.told.append(("stop", number))

    def pause_trial(self, number: int) -> None:
        self.told.append(("pause", number))

    def continue_trial(self, number: int) -> None:
        self.told.append(("unpause", number))


class HandClock(Clock):
    def __init__(self, now: Callable[[], float]) -> None:
        self.monotonic = now  # type: ignore[assignment]


class Obeyed:
    def __init__(self, folder: Path, **trials: str) -> None:
        self.folder = folder
        self.now = 50.0
        self.notes: list[str] = []
        self.remote = Commands(folder, self.notes.append, Machine(HandClock(lambda: self.now)))
        self.run = FakeRun(**trials)

    def send(self, *commands: Command) -> None:
        for command in commands:
            control.put(self.folder, command)
        self.remote.carry_out(self.run)


def test_a_run_is_paused_and_continued(tmp_path: Path) -> None:
    it = Obeyed(tmp_path)
    it.send(Command("pause"))
    assert it.remote.paused
    it.send(Command("pause"))
    assert it.remote.paused
    it.send(Command("continue"))
    assert not it.remote.paused and not it.remote.stopping
    it.send(Command("pause"), Command("continue"))
    assert not it.remote.paused
    assert it.notes == ["pause", "pause", "unpause", "pause", "unpause"]
    assert it.run.told == []


def test_a_stop_cancels_once_and_gives_up_in_time(tmp_path: Path) -> None:
    it = Obeyed(tmp_path)
    assert it.remote.wait_seconds(None) == 1.0 and it.remote.wait_seconds(0.5) == 0.5
    it.send(Command("pause"), Command("stop"))
    assert it.remote.stopping and it.run.told == ["cancel"]
    assert it.remote.wait_seconds(None) == 1.0 and it.remote.wait_seconds(0.5) == 0.5
    it.now += STOP_SECONDS - 0.5
    it.send(Command("stop"), Command("continue"))
    assert it.run.told == ["cancel"] and not it.remote.gave_up
    assert it.remote.stopping and it.remote.wait_seconds(None) == 0.5
    it.now += 0.5
    assert it.remote.gave_up and it.remote.wait_seconds(None) == 0.0


def test_commands_to_trials(tmp_path: Path) -> None:
    it = Obeyed(tmp_path, t0="running", t1="finished", t2="held", t3="paused")
    it.send(*(Command(verb, n) for n in range(5) for verb in control.VERBS))
    assert it.run.told == [
        *[("stop", 0), ("pause", 0)],
        *[("stop", 2), ("pause", 2), ("unpause", 2)],
        *[("stop", 3), ("pause", 3)],
    ]
    ignored = [note for note in it.notes if "ignored" in note]
    assert ignored == [
        "unpause trial 0: ignored, no command has paused it",
        *[f"{verb} trial 1: ignored, it is finished" for verb in control.VERBS],
        "unpause trial 3: ignored, no command has paused it",
        *[f"{verb} trial 4: ignored, there is no such trial" for verb in control.VERBS],
    ]
    assert not it.remote.paused and not it.remote.stopping


def test_the_number_of_notes_about_invalid_files_is_limited(tmp_path: Path) -> None:
    it = Obeyed(tmp_path)
    for n in range(MAX_NOTES + 5):
        (tmp_path / f"{n}.json").touch()
    it.send(Command("pause"))
    assert len(it.notes) == MAX_NOTES
    assert it.remote.paused
    assert list(tmp_path.iterdir()) == []

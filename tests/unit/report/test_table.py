"""The table of a search in terminals of all sizes, and in ones that are resized meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import signal
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from cerebro.coordinator.overview import KEPT_ROWS
from cerebro.report import table
from cerebro.report.progress import Snapshot, TrialRow


def row(number: int, epoch: int = 2, value: float = 0.5, **changes: Any) -> TrialRow:
    metrics = {"train_loss": 0.5, "val_loss": 0.25, "val_accuracy": value}
    fields: dict[str, Any] = {
        "number": number,
        "config": {"lr": 0.1, "hidden": 64},
        "status": "running",
        "epoch": epoch,
        "epochs": 20,
        "metrics": metrics,
        "last": {**metrics, "val_accuracy": value - 0.125},
        "best_at": 1,
        "rows_per_second": 12345.0,
    }
    return TrialRow(**{**fields, **changes})


def snapshot(rows: list[TrialRow], **changes: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "trials": rows, "share_done": 0.25, "seconds": 100.0, "seconds_left": 300.0, "busy": 0.9,
        "workers": 2, "best": 3, "metric": "accuracy", "mode": "max", "path": "runs/x",
    }  # fmt: skip
    return Snapshot(**{**fields, **changes})


def a_thousand() -> Snapshot:
    """The 3rd trial is the best, 7 and 8 failed, 20 and 21 run, 980 wait, others are left out."""
    rows = [row(n, 20, 0.5 + n / 1000, status="finished") for n in range(4)]
    rows += [row(n, 1, 0.1, status="failed", error=f"ValueError: no {n}") for n in (7, 8)]
    rows += [row(20, worker=1), row(21, worker=0)]
    rows += [TrialRow(n, {"lr": 0.1}, "waiting", 0, 20) for n in range(22, 22 + KEPT_ROWS)]
    return snapshot(rows, more={"finished": 12, "waiting": 980 - KEPT_ROWS})


def render(shown: Snapshot, width: int, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height)
    with console.capture() as captured:
        console.print(table.make_picture(shown, console))
    return [line.rstrip() for line in captured.get().splitlines()]


@pytest.mark.parametrize("width", [40, 41, 52, 60, 80, 100, 132, 200])
@pytest.mark.parametrize("height", [10, 12, 24, 50])
def test_the_table_fits_and_shows_the_trials_that_matter(width: int, height: int) -> None:
    lines = render(a_thousand(), width, height)
    assert max(map(len, lines)) < width
    assert len(lines) < height
    text = "\n".join(lines)
    heading = lines[0].split()
    assert heading[0] == "trial" and {"epoch", "accuracy", "best"} <= set(heading)
    (best,) = [line for line in lines if "★" in line]
    assert best.split()[:2] == ["★", "3"]
    assert {"20/20", "0.3780", "0.5030"} <= set(best.split())  # last and best accuracy
    rows = {line.split()[0] for line in lines[2:] if re.match(r" *\d+ ", line)}
    assert {"20", "21"} <= rows or height == 10
    if height >= 12:
        assert "8" in rows and "trial 8 failed: ValueError" in text
    # In numbers: 1,000 trials less those that have a row.
    assert f"and {1000 - len(rows) - 1} more trials" in text
    assert ("12 finished" in text or "finished" in text) and "25%" in lines[-1]
    assert "5:00 left" in lines[-1]


def test_wide_windows_show_everything() -> None:
    lines = render(a_thousand(), 200)
    for part in ("state", "train loss", "val loss", "best at", "rows/s", "worker", "configuration"):
        assert part in lines[0]
    assert "1:40 so far, 5:00 left   2 workers 90% busy" in lines[-1]
    assert "hidden=64" in lines[2]


def test_long_names_of_metrics_are_cut() -> None:
    rows = [row(n, metrics={"val_a_very_long_name": 0.5}, last={}) for n in range(4)]
    lines = render(snapshot(rows, metric="a_very_long_name"), 40)
    assert "a very long…" in lines[0] and max(map(len, lines)) < 40


def test_the_share_is_not_rounded_up_and_may_be_unknown() -> None:
    assert "99% done" in render(snapshot([row(3)], share_done=0.999), 80)[-1]
    assert "100% done" in render(snapshot([row(3)], share_done=1.0), 80)[-1]
    unknown = render(snapshot([row(3)], share_done=None, seconds_left=None), 80)[-1]
    assert "done" not in unknown and "left" not in unknown and "1:40 so far" in unknown


# --- a terminal that is resized ------------------------------------------------


class Screen:
    """What a terminal shows: it wraps long lines, also when its window gets narrower."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines = [""]  # as written, before they are wrapped
        self.at = 0

    def rows(self) -> list[str]:
        return [
            line[begin : begin + self.columns]
            for line in self.lines
            for begin in range(0, max(1, len(line)), self.columns)
        ]

    def feed(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r\n|\r|\n|[^\x1b\r\n]+", text):
            if part in ("\n", "\r\n"):
                self.at += 1
                self.lines[self.at : self.at + 1] = [""]
            elif part.startswith("\x1b["):
                self.obey(part)
            elif part != "\r":
                self.lines[self.at] += part
        assert self.lines[self.at] == ""  # the cursor rests below the lines

    def obey(self, sequence: str) -> None:
        kind = sequence[-1]
        if kind == "A":  # from here on, wrapped parts are lines of their own
            assert self.lines[self.at] == ""
            self.lines = self.rows()
            self.at = len(self.lines) - 1 - int(sequence[2:-1])
            assert self.at >= 0
            self.lines[self.at] = ""
        elif kind == "J":
            del self.lines[self.at + 1 :]
            self.lines[self.at] = ""
        else:
            assert kind in "Km", f"{sequence!r} would have to be undone"  # no hidden cursor


class Terminal:
    """A pseudo-terminal and what it shows."""

    def __init__(self, columns: int, rows: int) -> None:
        self.master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w", encoding="utf-8")
        self.screen = Screen(columns)
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int) -> None:
        self.read()
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.columns = columns

    def read(self) -> list[str]:
        """Return the screen after all that was written."""
        self.stream.write("\x1b[0m\x1b[m")  # ends what is to be read
        self.stream.flush()
        text = b""
        while not text.endswith(b"\x1b[0m\x1b[m"):
            text += os.read(self.master, 65536)
        self.screen.feed(text.decode())
        return [line.rstrip() for line in self.screen.rows()[: self.screen.at]]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    made = Terminal(80, 24)
    yield made
    made.stream.close()
    os.close(made.master)


def test_advice_stays_above_the_table(terminal: Terminal) -> None:
    shown = a_thousand()
    drawing = table.Table(terminal.stream, clock=lambda: 0.0)
    drawing.phase("trying the first configuration")
    drawing.advise("graph=True")
    assert terminal.read() == ["graph=True", " trying the first configuration ..."]
    drawing.run_started(shown)
    assert terminal.read() == ["graph=True", *render(shown, 80, 24)]
    drawing.close()


def test_a_window_that_is_resized_shows_the_table_once(terminal: Terminal) -> None:
    shown = a_thousand()
    terminal.stream.write("before\n")
    drawing = table.Table(terminal.stream, clock=lambda: 0.0)
    drawing.phase("starting 2 workers")
    drawing.phase("trying the first configuration")
    assert terminal.read() == [
        "before", " starting 2 workers ... trying the first configuration ..."
    ]  # fmt: skip
    drawing.run_started(shown)
    try:
        for columns, rows in [(80, 24), (50, 24), (40, 12), (120, 40), (43, 40), (200, 50)]:
            terminal.resize(columns, rows)
            os.kill(os.getpid(), signal.SIGWINCH)  # as the terminal does
            assert terminal.read() == ["before", *render(shown, columns, rows)]
            terminal.resize(60, 30)
            terminal.resize(columns, rows)  # there and back, before the next drawing
            drawing._draw(shown)
            assert terminal.read() == ["before", *render(shown, columns, rows)]
    finally:
        drawing.close()
    assert signal.getsignal(signal.SIGWINCH) is not None
    terminal.stream.write("after\n")
    assert terminal.read() == ["before", *render(shown, 200, 50), "after"]


def test_printed_text_appears_above_the_table(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = snapshot([row(3)])
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    drawing = table.Table(terminal.stream, clock=lambda: 0.0)
    drawing.run_started(shown)
    print("a warning")
    print("half a line", end="")
    assert terminal.read() == ["a warning", *render(shown, 80)]
    print(" and the rest")
    with contextlib.redirect_stdout(io.StringIO()):  # somebody else's stream stays
        drawing.close()
    assert terminal.read() == ["a warning", "half a line and the rest", *render(shown, 80)]


def test_a_table_in_another_thread_sets_no_signal_handler(terminal: Terminal) -> None:
    before = signal.getsignal(signal.SIGWINCH)
    seen = []

    def run() -> None:
        drawing = table.Table(terminal.stream, clock=lambda: 0.0)
        drawing.run_started(snapshot([row(3)]))
        seen.append(signal.getsignal(signal.SIGWINCH))
        drawing.ended_early(snapshot([row(3)]), KeyboardInterrupt())
        drawing.close()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]
    assert "interrupted" in terminal.read()[-1]


@pytest.mark.parametrize("value", ["漢字" * 20, "a\nb\tc", "\x1b[2Jx"])
def test_any_setting_value_takes_only_one_line(value: str) -> None:
    shown = snapshot([row(3, config={"name": value}), row(4)])
    console = Console(
        file=io.StringIO(), width=110, height=20, force_terminal=True, color_system=None
    )
    with console.capture() as captured:
        console.print(table.make_picture(shown, console))
    lines = captured.get().splitlines()
    assert lines[0].split()[:3] == ["trial", "state", "epoch"] and "\x1b" not in captured.get()
    assert lines[2].split()[:3] == ["★", "3", "running"] and "name=" in lines[2]
    assert lines[3].split()[:2] == ["4", "running"]

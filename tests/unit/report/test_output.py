"""Displays whose stream fails: the search does not end with them."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Callable
from typing import Any

import pytest

from cerebro.report import displays, table
from cerebro.report.progress import Output, Snapshot, TrialRow


class Failing(io.StringIO):
    """A stream whose first `good` writes succeed."""

    def __init__(self, error: Exception, good: int = 0) -> None:
        super().__init__()
        self.error, self.good, self.tried = error, good, 0

    def write(self, text: str) -> int:
        self.tried += 1
        if self.tried > self.good:
            raise self.error
        return super().write(text)


def snapshot(epoch: int, status: str = "running") -> Snapshot:
    row = TrialRow(0, {"lr": 0.1}, status, epoch, 4, {"loss": 0.5} if epoch else {})
    return Snapshot(
        trials=[row], share_done=0.5, seconds=1.0, seconds_left=1.0, busy=0.5, workers=1,
        best=None, metric="loss", mode="min", path="runs/x",
    )  # fmt: skip


LOST = [
    OSError(errno.EIO, "Input/output error"),
    BrokenPipeError(errno.EPIPE, "Broken pipe"),
    OSError(errno.ENOSPC, "No space left on device"),
    ValueError("I/O operation on closed file"),
]


@pytest.mark.parametrize("error", LOST, ids=repr)
@pytest.mark.parametrize("kind", ["lines", "table"])
def test_a_display_whose_stream_fails_warns_once(kind: str, error: Exception) -> None:
    out = Failing(error, good=1)
    display = displays.make_progress(kind, stream=out)
    display.run_started(snapshot(0))
    with pytest.warns(UserWarning, match="search continues without it") as warned:
        display.update(snapshot(1))
        display.update(snapshot(2))
        display.finished(snapshot(4, "finished"), None)
        display.phase("a phase")
        display.close()
    assert len(warned) == 1 and str(error) in str(warned[0].message)
    assert out.tried == 2


def test_printing_works_after_the_table_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Failing(OSError(errno.EIO, "Input/output error"), good=1)
    monkeypatch.setattr(sys, "stdout", out)
    display = table.Table(out)
    display.run_started(snapshot(0))
    with pytest.warns(UserWarning, match="continues without it"):
        print("a line of the user's callback")
    print("another line")
    display.close()
    assert sys.stdout is out


@pytest.mark.parametrize(
    ("errors", "written"), [("backslashreplace", "größe \\u2605\n"), ("replace", "größe ?\n")]
)
def test_characters_that_the_encoding_lacks_are_replaced(errors: str, written: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "latin-1", newline="\n")
    Output(stream, errors).write("größe ★\n")
    assert raw.getvalue().decode("latin-1") == written


def no_stream() -> Any:
    return None


def closed_stream() -> Any:
    out = io.StringIO()
    out.close()
    return out


@pytest.mark.parametrize("make", [no_stream, closed_stream])
def test_without_standard_output_nothing_is_shown(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", make())
    displays.make_progress("auto").phase("a phase")


@pytest.mark.parametrize("make", [no_stream, closed_stream])
def test_a_table_is_drawn_without_standard_error(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", make())
    display = displays.make_progress("table")
    display.run_started(snapshot(0))
    print("a line of the user's callback")
    display.close()
    assert "a line of the user's callback\n" in out.getvalue()


def test_a_stream_that_only_writes_gets_lines() -> None:
    class Writer:
        text = ""

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

    out: Any = Writer()
    displays.make_progress("auto", stream=out).phase("a phase")
    assert out.text == "a phase ...\n"

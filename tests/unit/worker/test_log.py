"""The handlers of `logging` whose streams a unit redirects."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import logging.config
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from cerebro.worker.log import log_path, redirect_streams


@pytest.fixture
def terminal() -> Iterator[io.StringIO]:
    """Standard error while a test redirects it, which it does itself: pytest has its own."""
    yield io.StringIO()
    logging.getLogger("of this test").handlers.clear()
    logging.getLogger("of this test.inner").handlers.clear()


def logged(path: Path, name: str = "of this test") -> str:
    """Return what a unit adds to its log, in which a logger warns."""
    before = path.read_text() if path.exists() else ""
    with redirect_streams(path):
        logging.getLogger(name).warning("in the unit")
    return (path.read_text() if path.exists() else "").removeprefix(before)


def test_handlers_added_at_any_time_are_redirected(tmp_path: Path, terminal: io.StringIO) -> None:
    with contextlib.redirect_stderr(terminal):
        log = tmp_path / "1.log"
        logger = logging.getLogger("of this test")
        logger.propagate = False
        with redirect_streams(log):
            pass  # lists the handlers so far
        logger.addHandler(logging.StreamHandler())
        assert logged(log) == "in the unit\n"

        later = logging.StreamHandler(sys.stderr)
        assert logged(log) == "in the unit\n"
        logger.addHandler(later)  # after it was listed, with no logger
        assert logged(log) == "in the unit\n" * 2

        # The place that this name keeps for "of this test.inner" becomes a logger.
        logging.getLogger("of this test.inner.most")
        logging.getLogger("of this test.inner").addHandler(logging.StreamHandler())
        assert logged(log, "of this test.inner") == "in the unit\n" * 3
        assert terminal.getvalue() == ""
        logger.warning("after the unit")
        assert terminal.getvalue() == "after the unit\n" * 2


def test_handlers_that_logging_has_forgotten_are_noticed(
    tmp_path: Path, terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dictConfig` empties the list of all handlers, but leaves them with their loggers."""
    with contextlib.redirect_stderr(terminal):
        logger = logging.getLogger("of this test")
        logger.propagate = False
        logger.addHandler(logging.StreamHandler())
        assert logged(tmp_path / "1.log") == "in the unit\n"
        monkeypatch.setattr(logging, "_handlerList", [])
        assert logged(tmp_path / "1.log") == "in the unit\n"
        logger.addHandler(logging.StreamHandler())
        assert logged(tmp_path / "1.log") == "in the unit\n" * 2
        assert terminal.getvalue() == ""


def test_files_and_other_streams_are_left_alone(tmp_path: Path, terminal: io.StringIO) -> None:
    with contextlib.redirect_stderr(terminal):
        other = io.StringIO()
        logger = logging.getLogger("of this test")
        logger.propagate = False
        logger.addHandler(logging.StreamHandler(other))
        logger.addHandler(logging.FileHandler(tmp_path / "file"))
        assert logged(tmp_path / "1.log") == ""
        assert other.getvalue() == (tmp_path / "file").read_text() == "in the unit\n"
        logger.handlers[1].close()


def test_handlers_are_not_kept_alive(tmp_path: Path, terminal: io.StringIO) -> None:
    handler = logging.StreamHandler()
    with redirect_streams(tmp_path / "1.log"):
        pass
    gone = weakref.ref(handler)
    del handler
    gc.collect()
    assert gone() is None


def test_log_path_is_named_after_the_trial(tmp_path: Path) -> None:
    assert log_path(str(tmp_path), 12) == tmp_path / "12.log"
    assert log_path(str(tmp_path), None) == Path("/dev/null")


def test_a_descriptor_closed_by_a_trial_is_not_redirected_again(tmp_path: Path) -> None:
    """Its number may be that of the user's file since."""
    mine = tmp_path / "mine"
    with redirect_streams(tmp_path / "1.log"):
        number = sys.stdout.fileno()
        os.close(number)
        file = os.open(mine, os.O_WRONLY | os.O_CREAT)
        if file != number:
            os.dup2(file, number)
            os.close(file)
        print("printed")
    with redirect_streams(tmp_path / "2.log"):
        os.write(number, b"of the user")
        os.write(sys.stdout.fileno(), b"of the trial")
    os.close(number)
    assert mine.read_bytes() == b"of the user"
    assert (tmp_path / "2.log").read_bytes() == b"of the trial"

"""Tracebacks show the user's code."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest

import cerebro
from cerebro.arguments import check_whole_number
from cerebro.errors import (
    CerebroError,
    InputError,
    explain_interrupt,
    shorten_traceback,
    shorten_tracebacks,
)


def files(error: BaseException) -> list[str]:
    """The names of a traceback's files, from the outermost call."""
    return [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]


@shorten_tracebacks
def call(function: Any) -> Any:
    return check_whole_number("n", function(), 1)


def wrong() -> int:
    raise InputError("the user's own function calls Cerebro, which refuses")


def test_a_public_function_fails_with_one_frame_of_cerebro() -> None:
    with pytest.raises(InputError) as caught:
        cerebro.plan({}, "no data", epochs=0)
    assert files(caught.value) == ["test_errors.py", "errors.py"]
    with pytest.raises(InputError) as caught:
        cerebro.search(wrong, {}, "no data", epoch=1)  # type: ignore[call-arg]
    assert files(caught.value) == ["test_errors.py", "errors.py"]


def test_the_users_frames_below_cerebros_stay() -> None:
    with pytest.raises(InputError) as caught:
        call(wrong)
    # This test, the wrapper, then `call` and `wrong`, which are not Cerebro's.
    assert files(caught.value) == ["test_errors.py", "errors.py", *["test_errors.py"] * 2]


def test_other_exceptions_are_left_alone() -> None:
    def build() -> int:
        return 1 // 0

    with pytest.raises(ZeroDivisionError) as caught:
        call(build)
    assert files(caught.value) == ["test_errors.py", "errors.py", *["test_errors.py"] * 2]
    interrupt = KeyboardInterrupt()
    try:
        check_whole_number("n", Interrupting(), 1)
    except KeyboardInterrupt as error:
        interrupt = error
    before = files(interrupt)
    shorten_traceback(interrupt)
    assert files(interrupt) == before and "arguments.py" in before
    explain_interrupt(interrupt, ["kept", "to see it", "to resume it"], "kept. Resume it", 7)
    shorten_traceback(interrupt)
    assert files(interrupt) == ["test_errors.py"] * 2
    assert type(interrupt) is KeyboardInterrupt and str(interrupt) == "kept. Resume it"
    assert vars(interrupt)["result"] == 7
    assert vars(interrupt)["_render_traceback_"]() == ["kept", "to see it", "to resume it"]


class Interrupting:
    def __index__(self) -> int:
        raise KeyboardInterrupt


def test_an_environment_variable_keeps_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CEREBRO_TRACEBACK", "1")
    with pytest.raises(InputError) as caught:
        cerebro.plan({}, "no data", epochs=0)
    assert len(files(caught.value)) > 2


def test_a_cause_without_the_users_code_is_not_shown() -> None:
    def text(raise_it: Any) -> str:
        with pytest.raises(CerebroError) as caught:
            raise_it()
        shorten_traceback(caught.value)
        return "".join(traceback.format_exception(caught.value))

    def of_cerebro() -> None:
        try:
            check_whole_number("n", "x", 1)
        except InputError as error:
            error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]
            raise InputError("given: n='x'") from error

    def of_the_user() -> None:
        try:
            {}["lr"]
        except KeyError as error:
            raise InputError("no lr") from error

    assert "direct cause" not in text(of_cerebro)
    assert "KeyError: 'lr'" in text(of_the_user)

"""Ctrl-C and SIGTERM: what hears them, and what does not while cleaning up."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from cerebro.machine.signals import Terminated, call_on_sigterm, defer_interrupts, raise_on_sigterm


def test_sigterm_raises_keyboard_interrupt_only_inside_the_block():
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(KeyboardInterrupt) as caught, raise_on_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.type is Terminated
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_users_sigterm_handler_is_left_alone():
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        with raise_on_sigterm(), defer_interrupts():
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [1]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_sigterm_can_be_handled_without_leaving_the_block():
    heard = []
    with raise_on_sigterm():
        with call_on_sigterm(lambda: heard.append(1)):
            os.kill(os.getpid(), signal.SIGTERM)
            heard.append(2)
        assert heard == [1, 2]
        with pytest.raises(Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
    with call_on_sigterm(heard.clear):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_cleaning_up_after_an_interrupt_is_not_interrupted():
    with raise_on_sigterm():
        with defer_interrupts(KeyboardInterrupt()):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
@pytest.mark.parametrize("after", [None, ValueError("the run failed")])
def test_an_interrupt_during_cleanup_is_raised_afterwards(number, raised, after):
    before = signal.getsignal(signal.SIGINT)
    done = []
    with raise_on_sigterm():
        with pytest.raises(raised) as caught, defer_interrupts(after):
            with defer_interrupts(after):
                os.kill(os.getpid(), number)
                done.append("inner")
            os.kill(os.getpid(), signal.SIGINT)
            done.append("outer")
        assert caught.type is raised
        assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_interrupt_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with defer_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_change_nothing():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    seen = []

    def run():
        with raise_on_sigterm(), defer_interrupts():
            seen.append((signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


def test_deferring_inside_terminable_changes_no_handler():
    with raise_on_sigterm():
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        with defer_interrupts():
            assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_an_interrupt_in_a_block_that_fails_is_not_delivered_later():
    with raise_on_sigterm():
        with pytest.raises(ValueError, match="first"), defer_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            raise ValueError("first")
        with defer_interrupts():
            pass
        with pytest.raises(KeyboardInterrupt), defer_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
        with defer_interrupts():
            pass


def test_a_handler_of_the_user_inside_the_block_is_deferred_and_left_in_place():
    heard = []
    default = signal.getsignal(signal.SIGINT)
    try:
        with raise_on_sigterm():
            own = signal.signal(signal.SIGINT, lambda *_: heard.append("user"))
            assert own is not default
            with defer_interrupts():
                os.kill(os.getpid(), signal.SIGINT)
                heard.append("block")
            assert heard == ["block", "user"]
        assert signal.getsignal(signal.SIGINT) not in (own, default)
    finally:
        signal.signal(signal.SIGINT, default)


def test_a_signal_between_restoring_two_handlers_leaves_none_deaf(monkeypatch):
    """The user's handler of Ctrl-C raises as soon as it is restored."""
    restore = signal.signal

    def interrupted(number, handler):
        before = restore(number, handler)
        if handler is stop:
            signal.raise_signal(number)
        return before

    def stop(signum, frame):
        raise LookupError

    with raise_on_sigterm():
        ours = signal.getsignal(signal.SIGTERM)
        default = restore(signal.SIGINT, stop)
        try:
            monkeypatch.setattr(signal, "signal", interrupted)
            with pytest.raises(LookupError), defer_interrupts():
                assert signal.getsignal(signal.SIGTERM) is not ours
            assert signal.getsignal(signal.SIGTERM) is ours
            assert signal.getsignal(signal.SIGINT) is stop
        finally:
            monkeypatch.undo()
            restore(signal.SIGINT, default)

"""Call the user's callbacks, and carry out the user's commands to a live run."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cerebro.callbacks.observer import Observer
from cerebro.control import FOLDER, REQUESTS, Command
from cerebro.errors import one_line, text_of
from cerebro.machine.local import Machine
from cerebro.run.records import ENDED, TrialRecord

STOP_SECONDS = 10.0
"""How long a stopped run waits for units in flight to end at their next batch."""

MAX_NOTES = 1000
"""The most events that commands may record, so that a flood of files does not fill the disk."""

MAX_BYTES = 1 << 16
LOOK_SECONDS = 1.0
"""The longest time between two readings of the folder."""


class Hooks:
    """Calls the hooks of a run's callbacks.

    Exceptions propagate unchanged, except those of an observer that is not strict: it is left out
    from then on, with a warning. `view` makes a `Trial`, a copy of the trial as it is now.
    """

    def __init__(self, callbacks: Sequence[Any], view: Callable[[TrialRecord], Any]) -> None:
        self._callbacks = list(callbacks)
        self._view = view
        self._failure: tuple[BaseException, str] | None = None
        self._later: list[Callable[[], None]] | None = None

    @contextlib.contextmanager
    def postpone_calls(self) -> Iterator[None]:
        """Postpone calls until the block has ended without error and the store has its rows."""
        self._later = []
        try:
            yield
            calls, self._later = self._later, None
            for call in calls:
                call()
        finally:
            self._later = None

    def notify(self, hook: str, *arguments: Any) -> None:
        for callback in list(self._callbacks):
            method = getattr(callback, hook, None)
            if method is None:
                continue
            if self._later is None:
                self._call(callback, hook, method, arguments)
            else:
                self._later.append(partial(self._call, callback, hook, method, arguments))

    def notify_of(self, record: TrialRecord, hook: str, *arguments: Any) -> None:
        """Call a hook with a copy of the current trial, if any callback has the hook."""
        if any(getattr(callback, hook, None) is not None for callback in self._callbacks):
            self.notify(hook, self._view(record), *arguments)

    @property
    def _observers(self) -> list[Any]:
        return [callback for callback in self._callbacks if isinstance(callback, Observer)]

    @property
    def of_commits(self) -> list[Callable[[], None]]:
        """What observers have called after each commit of the store."""
        return [each.on_commit for each in self._observers if hasattr(each, "on_commit")]

    def notify_closed(self) -> None:
        """Tell the observers that the run's folder is complete and released."""
        for observer in self._observers:
            if hasattr(observer, "on_run_closed"):
                self._call(observer, "on_run_closed", observer.on_run_closed, ())

    def close(self) -> None:
        """Close the observers; called once when the run ends, with or without an error."""
        for observer in self._observers:
            self._call(observer, "close", observer.close, ())

    def cause_of(self, error: BaseException) -> str:
        """Return one line with the error that ended a run and the callback that raised it."""
        text = text_of(error, 2000)
        if self._failure is None or self._failure[0] is not error:
            return text
        kind = type(error).__name__
        return f"{self._failure[1]}: {kind}: {text}" if text else f"{self._failure[1]}: {kind}"

    def _call(
        self, callback: Any, hook: str, method: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        if all(callback is not other for other in self._callbacks):
            return  # an observer that failed after the call was postponed
        try:
            method(*arguments)
        except KeyboardInterrupt:  # Ctrl-C is not the callback's error
            raise
        except BaseException as error:
            is_fenced = isinstance(callback, Observer) and not callback.strict
            if is_fenced and isinstance(error, Exception):
                self._leave_out(callback, hook, error)
                return
            cause = f"the callback {name_of(callback)} failed in {hook}"
            self._failure = (error, cause)
            if hasattr(error, "add_note"):  # shown in tracebacks from Python 3.11 on
                error.add_note(f"{cause}: the run has ended, and all finished work is kept")
            raise

    def _leave_out(self, observer: Observer, hook: str, error: Exception) -> None:
        self._callbacks = [callback for callback in self._callbacks if callback is not observer]
        warnings.warn(
            f"the observer {name_of(observer)} failed in {hook} ({type(error).__name__}: "
            f"{text_of(error, 500)}): the run continues without it; give strict=True to end the "
            "run instead",
            stacklevel=2,
        )
        if hook != "close":
            with contextlib.suppress(Exception):  # usually for the same cause
                observer.close()


def name_of(callback: Any) -> str:
    """Return the name of a callback's class or, if it is a module, of the module."""
    kind = type(callback)
    return str(callback.__name__ if kind.__name__ == "module" else kind.__qualname__)


class Commands:
    """Carries out the commands that arrive; `note` is called with a line for the run's events."""

    def __init__(
        self,
        folder: Path,
        note: Callable[[str], None],
        machine: Machine,
        steering: Any = None,
    ) -> None:
        self._inbox = Inbox(folder, machine)
        self._note = note
        self.steering = steering
        """What carries out requests about trials, and records all commands: a `Steering`."""
        self._seen: set[str] = set()  # requests, each of which is carried out once
        self._notes = 0
        self._clock = machine.clock.monotonic
        self._stop_by = 0.0
        self.paused = False  # whether the run is paused: no unit begins for now
        self.stopping = False  # whether the run is stopped: no unit begins any more

    @property
    def gave_up(self) -> bool:
        """Whether units in flight took too long to end after a stop command."""
        return self.stopping and self._clock() >= self._stop_by

    def wait_seconds(self, seconds: float | None) -> float:
        """Return how long to wait, at most `seconds`, which is the limit set by everything else."""
        limits = [LOOK_SECONDS] if seconds is None else [LOOK_SECONDS, seconds]
        if self.stopping:
            limits.append(max(0.0, self._stop_by - self._clock()))
        return min(limits)

    def carry_out(self, run: Any) -> None:
        """Carry out what has arrived; `run` is the run's `Coordinator`."""
        for item in self._inbox.take():
            if isinstance(item, Command) and item.verb in REQUESTS:
                self._pass_on(item)
                continue
            note = self._carry_out(item, run) if isinstance(item, Command) else item
            self._notes += 1
            if self._notes <= MAX_NOTES:
                self._note(note)

    def _pass_on(self, request: Command) -> None:
        """Let a request be answered; its file stays until the answer is durable."""
        if self.steering is None or request.request in self._seen:
            return
        self._seen.add(request.request)
        self.steering.take(request, self._inbox.keep_current())

    def know_requests(self, requests: Iterable[str]) -> None:
        """Note requests that an earlier process has answered."""
        self._seen.update(requests)

    def close(self) -> None:
        if self.steering is not None:
            with contextlib.suppress(OSError):  # the store's own error is the one to raise
                self.steering.refuse_all("the run is ending")
        self._inbox.close()

    def _carry_out(self, command: Command, run: Any) -> str:
        cause = None
        if command.trial is not None:
            cause = _carry_out_for_trial(command, command.trial, run)
        if self.steering is not None and command.request not in self._seen:
            self._seen.add(command.request)
            outcome = self.steering.describe(command) if cause is None else f"refused: {cause}"
            self.steering.record(command, outcome)
        if command.trial is not None:
            return str(command) if cause is None else f"{command}: ignored, {cause}"
        if command.verb != "stop":
            self.paused = command.verb == "pause"
        elif not self.stopping:
            self.stopping = True
            self._stop_by = self._clock() + STOP_SECONDS
            run.cancel_units()
        return str(command)


def _carry_out_for_trial(command: Command, number: int, run: Any) -> str | None:
    """Carry out a command for one trial; return why it failed, or None. Never raises."""
    status = run.status_of(number)
    if status is None:
        return "there is no such trial"
    if status in ENDED:
        return f"it is {status}"
    if command.verb == "unpause" and not run.trials[number].held:
        return "no command has paused it"
    acts = {"stop": run.stop_trial, "pause": run.pause_trial, "unpause": run.continue_trial}
    acts[command.verb](number)
    return None


class Inbox:
    """The commands that arrive in a run's folder; files from before are discarded."""

    def __init__(self, folder: Path, machine: Machine) -> None:
        machine.disk.check_folder(folder)  # all files in it will be removed
        machine.disk.make_folder(folder)
        # Open, so that only this folder is emptied, even if a link takes its name later.
        self._folder = machine.disk.open_folder(folder)
        self._clock = machine.clock
        self._next_look = 0.0
        self._stuck: set[str] = set()  # not removable, or not yet; carried out only once
        self._current = ""  # the command that `take` has yielded last
        self._is_far = machine.disk.is_remote(folder)
        self.discard()

    def take(self) -> Iterator[Command | str]:
        """Yield pending commands by file name, or why one was rejected; remove each afterwards."""
        if self._is_far:  # each read is a round trip
            now = self._clock.monotonic()
            if now < self._next_look:
                return
            self._next_look = now + LOOK_SECONDS
        for name in sorted(set(self._list_names()) - self._stuck):
            if name.startswith("."):  # still being written
                continue
            self._current = name
            try:
                yield self._read(name)
            except (ValueError, OSError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                yield one_line(f"{name} in {FOLDER}/ is removed: {reason}", 200)
            if name not in self._stuck:
                self._remove(name)

    def keep_current(self) -> Callable[[], None]:
        """Keep the file of the command yielded last; return the call that removes it."""
        self._stuck.add(self._current)
        return partial(self._remove, self._current)

    def discard(self) -> None:
        for name in self._list_names():
            self._remove(name)

    def close(self) -> None:
        """Accept no more commands; discard those that arrived too late."""
        if self._folder.is_open:
            self.discard()
            self._folder.close()

    def _list_names(self) -> list[str]:
        try:
            return self._folder.list()
        except OSError:  # if its disk is gone, the run continues without commands
            return []

    def _read(self, name: str) -> Command:
        """Read a command file of any file type, without following links or blocking."""
        if not name.endswith(".json"):
            raise ValueError("it is not a command: its name does not end in .json")
        return Command.from_json(self._folder.read(name, MAX_BYTES))

    def _remove(self, name: str) -> None:
        self._stuck.discard(name)
        try:
            self._folder.remove(name)
        except OSError:
            self._stuck.add(name)

"""Receive commands to a live run and carry them out."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cerebro.control import FOLDER, Command
from cerebro.errors import one_line
from cerebro.machine.files import check_folder, is_network_file_system
from cerebro.run.records import ENDED

STOP_SECONDS = 10.0
"""How long a stopped run waits for units in flight to end at their next batch."""

MAX_NOTES = 1000
"""The most events that commands may record, so that a flood of files does not fill the disk."""


class Commands:
    """Carries out the commands that arrive; `note` is called with a line for the run's events."""

    def __init__(
        self, folder: Path, note: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._inbox = Inbox(folder)
        self._note = note
        self._notes = 0
        self._clock = clock
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
            note = self._carry_out(item, run) if isinstance(item, Command) else item
            self._notes += 1
            if self._notes <= MAX_NOTES:
                self._note(note)

    def close(self) -> None:
        self._inbox.close()

    def _carry_out(self, command: Command, run: Any) -> str:
        if command.trial is not None:
            cause = _carry_out_for_trial(command, command.trial, run)
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
    if command.verb == "continue" and not run.trials[number].held:
        return "no command has paused it"
    acts = {"stop": run.stop_trial, "pause": run.pause_trial, "continue": run.continue_trial}
    acts[command.verb](number)
    return None


MAX_BYTES = 4096
LOOK_SECONDS = 1.0
"""The longest time between two readings of the folder."""


class Inbox:
    """The commands that arrive in a run's folder; files from before are discarded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()  # the working directory may change
        check_folder(self._folder)  # all files in it will be removed
        self._folder.mkdir(exist_ok=True)
        # Use the descriptor, so that only this folder is emptied, even if a link replaces it later.
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._folder, flags)
        self._next_look = 0.0
        self._stuck: set[str] = set()  # not removable; carried out only once
        self._is_far = is_network_file_system(self._folder)
        self.discard()

    def take(self) -> Iterator[Command | str]:
        """Yield pending commands by file name, or why one was rejected; remove each afterwards."""
        if self._is_far:  # each read is a round trip
            now = time.monotonic()
            if now < self._next_look:
                return
            self._next_look = now + LOOK_SECONDS
        for name in sorted(set(self._list_names()) - self._stuck):
            if name.startswith("."):  # still being written
                continue
            try:
                yield self._read(name)
            except (ValueError, OSError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                yield one_line(f"{name} in {FOLDER}/ is removed: {reason}", 200)
            self._remove(name)

    def discard(self) -> None:
        for name in self._list_names():
            self._remove(name)

    def close(self) -> None:
        """Accept no more commands; discard those that arrived too late."""
        if self._fd < 0:
            return
        self.discard()
        os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)

    def _list_names(self) -> list[str]:
        try:
            return os.listdir(self._fd)  # noqa: PTH208
        except OSError:  # if its disk is gone, the run continues without commands
            return []

    def _read(self, name: str) -> Command:
        """Read a command file of any file type, without following links or blocking."""
        if not name.endswith(".json"):
            raise ValueError("it is not a command")
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(name, flags, dir_fd=self._fd)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise ValueError("it is not a regular file")
            if info.st_size > MAX_BYTES:
                raise ValueError(f"it has more than {MAX_BYTES} bytes")
            return Command.from_json(os.read(fd, MAX_BYTES + 1))
        finally:
            os.close(fd)

    def _remove(self, name: str) -> None:
        try:
            try:
                os.unlink(name, dir_fd=self._fd)
            except (IsADirectoryError, PermissionError):  # macOS raises the second
                _remove_tree(name, self._fd)
        except FileNotFoundError:
            pass
        except OSError:
            self._stuck.add(name)


def _remove_tree(name: str, parent: int) -> None:
    """Remove a folder and its contents; remove links without following them."""
    for _, folders, files, fd in os.fwalk(name, topdown=False, dir_fd=parent):
        for file in files:
            os.unlink(file, dir_fd=fd)
        for folder in folders:
            info = os.stat(folder, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                os.rmdir(folder, dir_fd=fd)
            else:
                os.unlink(folder, dir_fd=fd)
    os.rmdir(name, dir_fd=parent)

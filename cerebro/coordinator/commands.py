"""Commands to a live run: where they arrive, and what they do."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from cerebro.control import FOLDER, Command
from cerebro.coordinator.trial import LiveTrial
from cerebro.errors import one_line
from cerebro.machine.files import check_folder, is_network_file_system
from cerebro.run.records import ENDED, Status

STOP_SECONDS = 10.0
"""How long a run that is stopped waits for units in flight to end at their next batch."""

MAX_NOTES = 1000
"""Events that are kept of commands: whoever fills the folder fills no disk."""


class Commanded(Protocol):
    """What a run offers to whoever commands it."""

    @property
    def trials(self) -> Mapping[int, LiveTrial]:
        """All that have not ended, by number."""

    def status_of(self, number: int) -> Status | None:
        """What a trial is; None where there is none."""

    def cancel_units(self) -> None:
        """End the units in flight at their next batch."""

    def stop_trial(self, number: int) -> None:
        """End a trial when its unit in flight is done."""

    def pause_trial(self, number: int) -> None:
        """Let a trial rest when its unit in flight is done."""

    def continue_trial(self, number: int) -> None:
        """Let a trial go on that was paused."""


class Remote:
    """Carries commands out.

    Parameters
    ----------
    folder
        The run's ``control`` folder.
    note
        Called with a line for the run's events.
    clock
        Gives seconds.
    """

    def __init__(
        self,
        folder: Path,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inbox = Inbox(folder)
        self._note = note
        self._notes = 0
        self._clock = clock
        self._stop_by = 0.0
        self.paused = False
        """No unit begins."""
        self.stopping = False
        """No unit begins, and the run ends."""

    @property
    def gave_up(self) -> bool:
        """Whether units in flight do not end although the run was told to stop."""
        return self.stopping and self._clock() >= self._stop_by

    def patience(self, seconds: float | None) -> float:
        """The longest time to wait, where `seconds` would do for everything else."""
        limits = [LOOK_SECONDS] if seconds is None else [LOOK_SECONDS, seconds]
        if self.stopping:
            limits.append(max(0.0, self._stop_by - self._clock()))
        return min(limits)

    def obey(self, run: Commanded) -> None:
        """Carry out what has arrived, in order."""
        for item in self._inbox.take():
            note = self._obey(item, run) if isinstance(item, Command) else item
            self._notes += 1
            if self._notes <= MAX_NOTES:
                self._note(note)

    def close(self) -> None:
        """Take no more commands."""
        self._inbox.close()

    def _obey(self, command: Command, run: Commanded) -> str:
        if command.trial is not None:
            cause = self._obey_for_trial(command, command.trial, run)
            return str(command) if cause is None else f"{command}: ignored, {cause}"
        if command.verb != "stop":
            self.paused = command.verb == "pause"
        elif not self.stopping:
            self.stopping = True
            self._stop_by = self._clock() + STOP_SECONDS
            run.cancel_units()
        return str(command)

    def _obey_for_trial(self, command: Command, number: int, run: Commanded) -> str | None:
        """Do it, or say why not; a command is never an error of the run."""
        status = run.status_of(number)
        if status is None:
            return "there is no such trial"
        if status in ENDED:
            return f"it is {status}"
        if command.verb == "stop":
            run.stop_trial(number)
        elif command.verb == "pause":
            run.pause_trial(number)
        elif not run.trials[number].held:
            return "no command has paused it"
        else:
            run.continue_trial(number)
        return None


MAX_BYTES = 4096

LOOK_SECONDS = 1.0
"""The longest time between two looks."""


class Inbox:
    """The commands that arrive in a run's folder while it is trained.

    What lies there when a run begins was meant for somebody else and is discarded.

    Parameters
    ----------
    folder
        The run's ``control`` folder; made if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()  # the working directory may change
        check_folder(self._folder)  # everything in it will be removed
        self._folder.mkdir(exist_ok=True)
        # Whatever later takes the folder's place, a link even, is not what is emptied.
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._folder, flags)
        self._next_look = 0.0
        self._stuck: set[str] = set()  # what could not be removed; not to be obeyed twice
        self._is_far = is_network_file_system(self._folder)
        self.discard()

    def take(self) -> Iterator[Command | str]:
        """Yield what has arrived, in order of names: commands, and why other things are none.

        A file is removed when the next one is asked for, that is when it took effect.
        Costs a few microseconds where nothing has arrived. On a network file system a look costs
        a round trip, so it looks once in `LOOK_SECONDS` there, however often it is asked.
        """
        if not self._is_due():
            return
        for name in sorted(set(self._names()) - self._stuck):
            if name.startswith("."):  # somebody is writing it
                continue
            try:
                yield self._read(name)
            except (ValueError, OSError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                yield one_line(f"{name} in {FOLDER}/ is removed: {reason}", 200)
            self._remove(name)

    def discard(self) -> None:
        """Remove everything."""
        for name in self._names():
            self._remove(name)

    def close(self) -> None:
        """Take no more; commands that came too late are discarded."""
        if self._fd < 0:
            return
        self.discard()
        os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)

    def _is_due(self) -> bool:
        if not self._is_far:
            return True
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_SECONDS
        return True

    def _names(self) -> list[str]:
        try:
            return os.listdir(self._fd)  # noqa: PTH208
        except OSError:  # the disk is away: then nobody can command the run, which goes on
            return []

    def _read(self, name: str) -> Command:
        """Read a file that may be anything: never followed, never waited for."""
        if not name.endswith(".json"):
            raise ValueError("it is no command")
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(name, flags, dir_fd=self._fd)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise ValueError("it is no regular file")
            if info.st_size > MAX_BYTES:
                raise ValueError(f"it has more than {MAX_BYTES} bytes")
            return Command.from_json(os.read(fd, MAX_BYTES + 1))
        finally:
            os.close(fd)

    def _remove(self, name: str) -> None:
        try:
            try:
                os.unlink(name, dir_fd=self._fd)
            except (IsADirectoryError, PermissionError):  # macOS says the second
                _remove_tree(name, self._fd)
        except FileNotFoundError:
            pass
        except OSError:
            self._stuck.add(name)


def _remove_tree(name: str, parent: int) -> None:
    """Remove a folder with all that is in it; links are removed, not followed."""
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

"""What commands do to a run that goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from cerebro.control import Command
from cerebro.inbox import LOOK_SECONDS, Inbox
from cerebro.live_trial import LiveTrial
from cerebro.trial import ENDED, Status

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

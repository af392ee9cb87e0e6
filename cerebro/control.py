"""Send commands to a live run: stop, pause, continue.

A command is a small JSON file that is written under a temporary name and renamed into the run's
``control`` folder. The coordinating process checks the folder between units and at least once a
second, carries out commands in the order of their file names, and removes each file once its
command has taken effect. No port is opened: write access to the folder gives permission to control
the run.

    {"command": "pause", "trial": 3}

Without ``trial``, the command applies to the whole run. Any other file in the folder is removed and
noted among the run's events; it never harms the run.
"""

from __future__ import annotations

import itertools
import json
import operator
import os
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cerebro.errors import InputError
from cerebro.machine.files import path_of
from cerebro.run.owner import owner_of
from cerebro.run.records import ENDED
from cerebro.run.store import read_meta, reader

FOLDER = "control"
Verb = Literal["stop", "pause", "continue"]
VERBS: tuple[Verb, ...] = ("stop", "pause", "continue")
MAX_TRIAL = 2**31 - 1

_count = itertools.count()


@dataclass(frozen=True)
class Command:
    """A command to a run, or to one of its trials."""

    verb: Verb
    trial: int | None = None

    def to_json(self) -> str:
        trial = {} if self.trial is None else {"trial": self.trial}
        return json.dumps({"command": self.verb, **trial})

    @classmethod
    def from_json(cls, text: str | bytes) -> Command:
        """Parse a command strictly; raise ValueError with the reason, in a few words."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("it is not JSON") from None
        if not isinstance(value, dict) or not value.keys() <= {"command", "trial"}:
            raise ValueError(
                "it is not a command, which is an object with only 'command' and 'trial'"
            )
        verb, trial = value.get("command"), value.get("trial")
        if verb not in VERBS:
            raise ValueError(f"its command is not one of {', '.join(VERBS)}")
        whole = isinstance(trial, int) and not isinstance(trial, bool) and 0 <= trial <= MAX_TRIAL
        if trial is not None and not whole:
            raise ValueError(f"its trial must be a number from 0 to {MAX_TRIAL}")
        return cls(verb, trial)

    def __str__(self) -> str:
        return self.verb if self.trial is None else f"{self.verb} trial {self.trial}"


def stop(run: str | os.PathLike[str], trial: int | None = None) -> None:
    """Stop a live run, or one of its trials.

    A run stops within a batch (with ``workers=0``, after the current unit). All finished units are
    kept, and `cerebro.resume` continues from there. A trial ends as ``stopped`` when its current
    unit is done; its epochs are kept and count.

    Parameters
    ----------
    run
        The run's folder.
    trial
        A trial's number; None: the whole run.

    Raises
    ------
    InputError
        If the run is not live, if the trial does not exist, or if the trial has ended.
    OSError
        If the run's folder cannot be written.
    """
    send(run, Command("stop", trial))


def pause(run: str | os.PathLike[str], trial: int | None = None) -> None:
    """Pause a live run, or one of its trials, until `go_on`.

    Current units are finished; workers then stay idle and keep their models. A run's ``time_limit``
    keeps counting. A paused run can be stopped. The parameters and errors are those of `stop`.
    """
    send(run, Command("pause", trial))


def go_on(run: str | os.PathLike[str], trial: int | None = None) -> None:
    """Continue a paused run, or a paused trial; do nothing if it is not paused.

    The parameters and errors are those of `stop`.
    """
    send(run, Command("continue", trial))


def send(run: str | os.PathLike[str], command: Command) -> None:
    """Send a command to the process that is training a run; see `stop`, `pause` and `go_on`."""
    folder = path_of("run", run)
    with reader(folder) as connection:
        check_is_trained(folder, read_meta(connection))
        if command.trial is not None:
            try:
                trial = operator.index(command.trial)
            except TypeError:
                text = f"trial must be a trial's number, not {command.trial!r}"
                raise InputError(text) from None
            sql = "SELECT status FROM trials WHERE number = ?"
            row = connection.execute(sql, (trial,)).fetchone()
            if row is None:
                count = connection.execute("SELECT COUNT(*) FROM trials").fetchone()[0]
                has = f"trials 0 to {count - 1}" if count else "no trials"
                raise InputError(f"{folder} has no trial {trial!r} yet; it has {has}")
            if row["status"] in ENDED:
                raise InputError(f"{folder}: trial {trial} is {row['status']} already")
            command = replace(command, trial=trial)
    put(folder / FOLDER, command)


def put(control: Path, command: Command) -> Path:
    """Write a command's file, which appears either complete or not at all."""
    # Names are ordered by time; for equal times, the commands of each sender keep their order.
    name = f"{time.time_ns():020d}-{os.getpid()}-{next(_count):06d}.json"
    temporary = control / f".{name}"
    try:
        control.mkdir(exist_ok=True)
        temporary.write_text(command.to_json(), encoding="utf-8")
        temporary.rename(control / name)
    except FileNotFoundError as error:  # the folder is cleared when a run begins or ends
        raise InputError(
            f"{control.parent} began or ended just now: check it and try again"
        ) from error
    except PermissionError as error:
        raise PermissionError(
            f"this user cannot write to {control}: only the run's owner can control it"
        ) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return control / name


def check_is_trained(folder: Path, meta: dict[str, Any]) -> None:
    status = meta["status"]
    if status != "running":
        raise InputError(f"{folder} is {status}: the run is not in progress")
    if owner_of(folder) is None:
        owner = meta.get("owner") or {}
        raise InputError(
            f"{folder}: the process that trained it ({owner.get('pid')} on {owner.get('host')}) is "
            f"gone; to resume: python -m cerebro resume {shlex.quote(str(folder))}"
        )

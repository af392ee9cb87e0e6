"""Steer a live run: stop, pause and unpause it; clone, add and extend trials.

A command is a small JSON file that is written under a temporary name and renamed into the run's
``control`` folder. The coordinating process checks the folder between units and at least once a
second, carries out commands in the order of their file names, records each with its outcome in the
table ``actions``, and then removes the file. No port is opened: write access to the folder gives
permission to control the run.

    {"command": "pause", "trial": 3}
    {"command": "clone", "trial": 3, "changes": {"lr": 0.01}, "after": 8}

Without ``trial``, stop, pause and unpause apply to the whole run. Any other file in the folder is
removed and noted among the run's events; it never harms the run.
"""

from __future__ import annotations

import getpass
import itertools
import json
import operator
import os
import shlex
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from cerebro.arguments import check_whole_number
from cerebro.errors import InputError
from cerebro.machine.files import path_of
from cerebro.run.owner import owner_of
from cerebro.run.records import ENDED, ActionRecord
from cerebro.run.store import decode, encode, read_actions, read_meta, reader

FOLDER = "control"
Verb = Literal["stop", "pause", "unpause", "clone", "add", "extend"]
VERBS: tuple[Verb, ...] = ("stop", "pause", "unpause")
REQUESTS: tuple[Verb, ...] = ("clone", "add", "extend")
"""The verbs that change which trials there are, and what they train; they are answered."""

MAX_TRIAL = 2**31 - 1
ANSWER_SECONDS = 10.0
"""How long `clone`, `add` and `extend` wait for the run's answer."""

_count = itertools.count()


def _name_sender() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


@dataclass(frozen=True)
class Command:
    """A command to a run, or to one of its trials."""

    verb: Verb
    trial: int | None = None
    changes: Mapping[str, Any] | None = None
    """The settings that a clone changes, or all of an added trial's."""
    after: int | None = None
    """After how many epochs of its parent a clone begins; None: after all that it has."""
    epochs: int | None = None
    """Until how many epochs are done the trial trains, a clone's parent's included."""
    cold: bool = False
    """Whether a clone takes only the parent's configuration, and begins anew."""
    anyway: bool = False
    """Whether a clone may change nothing: it then differs by its seed."""
    request: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)
    sender: str = field(default_factory=_name_sender, compare=False)

    def __post_init__(self) -> None:
        if str(self.verb) == "continue":  # another word for it
            object.__setattr__(self, "verb", "unpause")

    def to_json(self) -> str:
        written: dict[str, Any] = {"command": self.verb}
        for name in ("trial", "after", "epochs"):
            if getattr(self, name) is not None:
                written[name] = getattr(self, name)
        for name in ("cold", "anyway"):
            if getattr(self, name):
                written[name] = True
        if self.verb in REQUESTS:
            if self.changes is not None:
                written["changes"] = json.loads(encode(dict(self.changes)))
            written |= {"request": self.request, "sender": self.sender}
        return json.dumps(written)

    @classmethod
    def from_json(cls, text: str | bytes) -> Command:
        """Parse a command strictly; raise ValueError with the reason, in a few words."""
        try:
            value = decode(text if isinstance(text, str) else text.decode())
        except (ValueError, TypeError, RecursionError):
            raise ValueError("it is not JSON") from None
        names = {"command", *(one.name for one in fields(cls))} - {"verb"}
        if not isinstance(value, dict) or not value.keys() <= names:
            raise ValueError("it is not a command, which is an object with 'command' and 'trial'")
        verb = value.pop("command", None)
        if verb not in (*VERBS, *REQUESTS, "continue"):
            raise ValueError(f"its command is not one of {', '.join((*VERBS, *REQUESTS))}")
        for name, most in (("trial", MAX_TRIAL), ("after", MAX_TRIAL), ("epochs", MAX_TRIAL)):
            number = value.get(name)
            whole = isinstance(number, int) and not isinstance(number, bool)
            if number is not None and not (whole and 0 <= number <= most):
                raise ValueError(f"its {name} must be a number from 0 to {most}")
        kinds = {"cold": bool, "anyway": bool, "request": str, "sender": str, "changes": dict}
        for name, kind in kinds.items():
            if name in value and not isinstance(value[name], kind):
                raise ValueError(f"its {name} is {value[name]!r}")
        value.setdefault("sender", "")  # not this process
        if len(value.get("request", "")) > 100:
            raise ValueError("its request has more than 100 characters")
        if verb in ("clone", "extend") and value.get("trial") is None:
            raise ValueError(f"{verb} needs the number of a trial")
        return cls(verb, **value)

    def __str__(self) -> str:
        return self.verb if self.trial is None else f"{self.verb} trial {self.trial}"


def Clone(
    trial: int,
    changes: Mapping[str, Any] | None = None,
    *,
    after: int | None = None,
    epochs: int | None = None,
    cold: bool = False,
    anyway: bool = False,
) -> Command:
    """Return a request for ``cerebro.resume(actions=[...])``, with the arguments of `clone`."""
    return Command(
        "clone",
        check_whole_number("trial", trial, 0),
        _check_changes("changes", changes or {}),
        check_whole_number("after", after, 1, optional=True),
        check_whole_number("epochs", epochs, 1, optional=True),
        bool(cold),
        bool(anyway),
    )


def Add(config: Mapping[str, Any], *, epochs: int | None = None) -> Command:
    """Return a request for ``cerebro.resume(actions=[...])``, with the arguments of `add`."""
    epochs = check_whole_number("epochs", epochs, 1, optional=True)
    return Command("add", changes=_check_changes("config", config), epochs=epochs)


def Extend(trial: int, epochs: int) -> Command:
    """Return a request for ``cerebro.resume(actions=[...])``, with the arguments of `extend`."""
    number = check_whole_number("trial", trial, 0)
    return Command("extend", number, epochs=check_whole_number("epochs", epochs, 1))


def _check_changes(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{name} must be a mapping of names to values, not {value!r}")
    encode(dict(value))  # it can be recorded
    return dict(value)


def clone(
    run: str | os.PathLike[str],
    trial: int,
    changes: Mapping[str, Any] | None = None,
    *,
    after: int | None = None,
    epochs: int | None = None,
    cold: bool = False,
    anyway: bool = False,
) -> int:
    """Clone a trial of a live run with some settings changed.

    The clone begins with the parent's weights, the optimizer's moments and the position of its
    schedule, and with its own settings and seed. It is trained, ranked and kept like any trial, but
    the searcher neither sees nor stops it, and no other trial changes by a bit. `cerebro.replay`
    repeats it.

    Parameters
    ----------
    run
        The run's folder.
    trial
        The parent's number.
    changes
        The settings that differ from the parent's.
    after
        Begin after this many epochs of the parent, whose state must be kept. Default: after its
        last finished epoch.
    epochs
        Until how many epochs are done, the parent's included. Default: as many as the parent.
    cold
        Take only the configuration: the clone trains from the beginning.
    anyway
        Clone even without a change: the clone differs by its seed.

    Returns
    -------
    int
        The number of the new trial.

    Raises
    ------
    InputError
        If the run is not live, if it refuses the clone, with the reason, or if it does not answer
        within ten seconds; it then still carries out the request.
    """
    action = Clone(trial, changes, after=after, epochs=epochs, cold=cold, anyway=anyway)
    return _ask(run, action).child or 0


def add(
    run: str | os.PathLike[str], config: Mapping[str, Any], *, epochs: int | None = None
) -> int:
    """Add a configuration to a live run; return the number of its trial.

    It has a value for every name of the space; values may be outside of it. The trial is one of the
    user's, as with `clone`, whose errors apply. `epochs` is the run's by default.
    """
    return _ask(run, Add(config, epochs=epochs)).child or 0


def extend(run: str | os.PathLike[str], trial: int, epochs: int) -> None:
    """Let an open trial of a live run train until `epochs` epochs are done.

    ``info.epochs`` is that number from the next unit on. Trials whose searcher decides how long
    they train, and trials that have ended, are not extended but cloned, with more epochs. The
    errors are those of `clone`.
    """
    _ask(run, Extend(trial, epochs))


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
    """Pause a live run, or one of its trials, until `unpause`.

    Current units are finished; workers then stay idle and keep their models. A run's ``time_limit``
    keeps counting. A paused run can be stopped, and does not end by itself. A paused trial stays
    paused when the run is resumed. In a search whose trials are compared epoch by epoch, the others
    wait for a paused one. The parameters and errors are those of `stop`.
    """
    send(run, Command("pause", trial))


def unpause(run: str | os.PathLike[str], trial: int | None = None) -> None:
    """Continue a paused run, or a paused trial; do nothing if it is not paused.

    The parameters and errors are those of `stop`.
    """
    send(run, Command("unpause", trial))


def send(run: str | os.PathLike[str], command: Command) -> None:
    """Send a command to the process that is training a run; see `stop`, `pause` and `unpause`."""
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


def _ask(run: str | os.PathLike[str], command: Command) -> ActionRecord:
    """Send a request about trials; return what the run has recorded about it."""
    folder = path_of("run", run)
    with reader(folder) as connection:
        check_is_trained(folder, read_meta(connection), command)
    put(folder / FOLDER, command)
    return await_answer(folder, command)


def await_answer(folder: Path, command: Command, seconds: float = ANSWER_SECONDS) -> ActionRecord:
    """Wait until a run has recorded the outcome of a request; raise InputError if it refused."""
    give_up = time.monotonic() + seconds
    while True:
        with reader(folder) as connection:
            actions = read_actions(connection)
            is_over = read_meta(connection)["status"] != "running"
        for action in actions:
            if action.request == command.request:
                if not action.is_done:
                    raise InputError(action.outcome.partition(": ")[2])
                return action
        if is_over:
            raise InputError(f"{folder} ended just now, without an answer to: {command}")
        if time.monotonic() >= give_up:
            raise InputError(
                f"{folder} has not answered within {seconds:g} s, because its workers are busy; "
                f"the request stays: python -m cerebro actions {shlex.quote(str(folder))}"
            )
        time.sleep(0.05)


def to_command_line(command: Command, *, of_resume: bool = False) -> str:
    """Write a request as options of the command line."""
    words: list[str] = [] if of_resume else [command.verb]
    if command.trial is not None:
        words += ["--clone" if of_resume else "--trial", str(command.trial)]
    settings = [f"{name}={_to_text(value)}" for name, value in (command.changes or {}).items()]
    if settings:
        words += [*(["--set"] if command.verb == "clone" else ()), *settings]
    words += [] if command.after is None else ["--after", str(command.after)]
    words += ["--cold"] if command.cold else []
    words += [] if command.epochs is None else ["--epochs", str(command.epochs)]
    words += ["--anyway"] if command.anyway else []
    return shlex.join(words)


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(json.loads(encode(value)))


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


def check_is_trained(folder: Path, meta: dict[str, Any], command: Command | None = None) -> None:
    """Raise InputError unless a process trains the run; say how to resume it with a clone."""
    status = meta["status"]
    then = ""
    if command is not None and command.verb == "clone":
        options = to_command_line(command, of_resume=True)
        then = f"python -m cerebro resume {shlex.quote(str(folder))} {options}"
    if status != "running":
        hint = f"; to clone when it goes on: {then}" if then else ""
        raise InputError(f"{folder} is {status}: the run is not in progress{hint}")
    if owner_of(folder) is None:
        owner = meta.get("owner") or {}
        raise InputError(
            f"{folder}: the process that trained it ({owner.get('pid')} on {owner.get('host')}) is "
            f"gone; to resume: {then or f'python -m cerebro resume {shlex.quote(str(folder))}'}"
        )

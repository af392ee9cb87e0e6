"""Faults of a simulated machine, each at a numbered call of one of its processes."""

from __future__ import annotations

import errno as errors
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "kill", "stop", "error", "slow", "delay", "cut", "double", "late beats", "jump", "suspend",
    "power", "leave",
]  # fmt: skip

WORDS: dict[Kind, str] = {
    "kill": "{process} is killed at its call {at}",
    "stop": "{process} is stopped for {seconds:g} s at its call {at}",
    "error": "the disk gives {process} {errno} {times} from its call {at} on",
    "slow": "call {at} of {process} takes {seconds:g} s",
    "delay": "the first message of {process} from its call {at} on is {seconds:g} s late",
    "cut": "the first message of {process} from its call {at} on is cut, with the connection",
    "double": "the first message of {process} from its call {at} on arrives twice",
    "late beats": "{process} works on without heartbeats for {seconds:g} s from its call {at} on",
    "jump": "the wall clock jumps by {seconds:+g} s at call {at} of {process}",
    "suspend": "the machine is suspended for {seconds:g} s at call {at} of {process}",
    "power": "the machine loses power at call {at} of {process}",
    "leave": "{process} is told to end at its call {at}",
}


class ProcessDied(BaseException):
    """Raised in the code of a simulated process that has ended, at each call of the machine."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong at one call of a process.

    A fault that does not fit the call, such as an error of the disk at a message, strikes at the
    next call that it fits.
    """

    process: str
    """Such as ``coordinator-0``, or ``worker-3``: the fourth worker that was started."""
    at: int
    """The number of the process's call, from 1."""
    kind: Kind
    seconds: float = 0.0
    errno: int = errors.EIO
    times: int = 1
    """For ``error``: how many calls in a row fail."""

    def __str__(self) -> str:
        values = {**vars(self), "errno": errors.errorcode[self.errno]}
        values["times"] = "once" if self.times == 1 else f"{self.times} times"
        return WORDS[self.kind].format(**values)


SECONDS: dict[Kind, tuple[float, float]] = {
    "stop": (0.01, 30.0),
    "slow": (0.01, 30.0),
    "delay": (0.001, 30.0),
    "late beats": (0.1, 30.0),
    "jump": (-1e5, 1e5),
    "suspend": (1.0, 1e5),
}

ERRNOS = (
    *(errors.EIO, errors.ENOSPC, errors.EDQUOT, errors.EROFS, errors.EACCES, errors.ESTALE),
    *(errors.EMFILE, errors.ENFILE),
)


def draw_fault(random: random.Random, calls: Mapping[str, int], kinds: tuple[Kind, ...]) -> Fault:
    """Draw a fault of one of the `kinds` in one of `calls`: for each process, how many it makes.

    Short and long times are equally likely. No command is doubled: a worker would obey it twice,
    and a stream does not double what it carries.
    """
    name = random.choice(sorted(calls))
    at = random.randint(1, max(1, calls[name]))
    kind = random.choice(kinds)
    if kind == "double" and name.startswith("coordinator"):
        kind = "delay"
    first, last = SECONDS.get(kind, (0.0, 0.0))
    if first > 0:
        seconds = first * (last / first) ** random.random()
    else:
        seconds = random.uniform(first, last)
    errno = random.choice(ERRNOS) if kind == "error" else errors.EIO
    times = random.choice((1, 1, 2, 5, 100)) if kind == "error" else 1
    return Fault(name, at, kind, float(f"{seconds:.3g}"), errno, times)

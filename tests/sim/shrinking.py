"""Find the shortest list of faults with which a simulated run still goes wrong.

First whole faults are left out, then each is made smaller: fewer failing calls, shorter times, an
earlier call. The rest of a run depends on its seed alone, so each attempt can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from faults import Fault

MOST_ATTEMPTS = 400


def shrink(faults: Sequence[Fault], fails: Callable[[Sequence[Fault]], bool]) -> list[Fault]:
    """Return a shortest list for which `fails` is true, as far as `MOST_ATTEMPTS` show one."""
    shortest = list(faults)
    attempts = 0
    goes_on = True
    while goes_on:
        goes_on = False
        for smaller in list_smaller(shortest):
            attempts += 1
            if attempts > MOST_ATTEMPTS:
                return shortest
            if fails(smaller):
                shortest, goes_on = smaller, True
                break
    return shortest


def list_smaller(faults: Sequence[Fault]) -> Iterator[list[Fault]]:
    """Yield lists that are a little simpler, those without a fault first."""
    for left_out in range(len(faults)):
        yield [*faults[:left_out], *faults[left_out + 1 :]]
    for at, fault in enumerate(faults):
        for simpler in simplify(fault):
            yield [*faults[:at], simpler, *faults[at + 1 :]]


def simplify(fault: Fault) -> Iterator[Fault]:
    if fault.times > 1:
        yield replace(fault, times=fault.times // 2)
        yield replace(fault, times=fault.times - 1)
    if abs(fault.seconds) > 1:
        yield replace(fault, seconds=float(round(fault.seconds / 2)))
    for at in (fault.at // 2, fault.at * 3 // 4, fault.at - 1):
        if 0 < at < fault.at:
            yield replace(fault, at=at)

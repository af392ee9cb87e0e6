"""Advise on a search that trains fewer trials at a time than it has workers.

Units of different trials run in parallel; those of one trial run one after the other. With fewer
trials than workers, the other workers are idle.
"""

from __future__ import annotations

from collections.abc import Sequence

from cerebro.machine.devices import CPU, are_gpus


def idle_advice(
    at_once: int | None,
    workers: int,
    threads: int,
    *,
    folds: int | None = None,
    devices: Sequence[str] = (CPU,),
    elsewhere: bool = False,
) -> str | None:
    """Return how many workers are idle and what would use them; None if all have work.

    `at_once` is the most trials that train at a time, counting each fold; None: unknown. With
    `elsewhere`, an executor has the workers, whose nodes may have no cores for more threads.
    """
    if at_once is None or not 0 < at_once < workers:
        return None
    cures = []
    more = workers * threads // at_once
    if more > threads and not are_gpus(devices) and not elsewhere:
        cures.append(f"threads={more} with workers={at_once}")
    if folds is None:
        cures.append("folds (validation=cerebro.KFold(...))")
    cures.append("more trials")
    trials = "1 trial trains" if at_once == 1 else f"{at_once} trials train"
    return (
        f"{trials} at a time on {workers} workers: {workers - at_once} idle. "
        f"{_join_choices(cures)} would use them"
    )


def _join_choices(choices: Sequence[str]) -> str:
    text = ", ".join(choices[:-1])
    text = f"{text} or {choices[-1]}" if text else choices[-1]
    return text if text.startswith("threads=") else text[0].upper() + text[1:]

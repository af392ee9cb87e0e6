"""When a busy worker is given up: no sign of life, or a unit that takes too long.

Silence is counted in the coordinator's own beats, which a thread like the
workers' makes at the same rate: on a machine that is suspended, frozen or so
busy that such threads do not run, both stand still, and nobody is killed for it.
A unit's time is counted by a clock that stands still while the machine is
suspended. Pure: whoever asks brings the numbers.
"""

from __future__ import annotations

import math

BEAT_SECONDS = 0.1
LOOKS = 5
"""Looks at a worker within the time that it may be silent."""
START_SILENCE = 120.0
"""Seconds until a worker's first beat: Python starts, on a slow disk."""


class Vigil:
    """Watches one task of one worker.

    Parameters
    ----------
    silence
        Seconds within which a worker that does not beat is given up.
    limit
        Seconds that the task may take, or None.
    """

    def __init__(self, silence: float, limit: float | None) -> None:
        self._look = silence / LOOKS
        self._silent_beats = math.ceil((silence - self._look) / BEAT_SECONDS)
        self._start_beats = math.ceil(max(silence, START_SILENCE) / BEAT_SECONDS)
        self._limit = limit
        self._beats = -1
        self._since = 0

    def is_silent(self, beats: int, own: int) -> bool:
        """Whether the worker, now at `beats`, made none for too long; `own` are ours."""
        if beats != self._beats:
            self._beats, self._since = beats, own
        allowed = self._silent_beats if beats > 0 else self._start_beats
        return own - self._since >= allowed

    def is_late(self, task_seconds: float | None) -> bool:
        """Whether the task takes too long; None: it has not begun."""
        return self._limit is not None and task_seconds is not None and task_seconds >= self._limit

    def patience(self, task_seconds: float | None) -> float:
        """Seconds until the next look is due."""
        if self._limit is None:
            return self._look
        # What has not begun cannot be late before the limit has passed.
        left = self._limit - (0.0 if task_seconds is None else task_seconds)
        return min(self._look, max(0.0, left))

"""What a run remembers of trials that have ended: how many, and the few worth showing.

The store has everything about them. A run of 100,000 trials must not keep 100,000
configurations and histories in memory to count them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable

from cerebro.report import format as fmt
from cerebro.report.snapshot import TrialRow
from cerebro.settings import Settings
from cerebro.trial import ENDED, Status, TrialRecord, best_score

KEPT_ROWS = 12
"""As many of the best as a display shows at most."""


class EndedTrials:
    """The ended trials of a run; see the module's text.

    Parameters
    ----------
    metric, mode, select
        What ranks trials, as for `cerebro.search`.
    """

    def __init__(self, metric: str, mode: str, select: str) -> None:
        self.counts: Counter[str] = Counter()
        """How many ended with which status."""
        self.first_failure: str | None = None
        """Why the first trial ended that did not succeed."""
        self.leader: tuple[float, int] | None = None
        """The best of them: its metric as a number to minimise, and its number."""
        self._metric = metric
        self._mode = mode
        self._select = select
        self._status = bytearray()  # by number: 1 + the place in ENDED; 0: has not ended
        self._leader_row: TrialRow | None = None
        self._best: list[tuple[float, int, TrialRow]] = []  # a heap, the worst first
        self._news: list[TrialRow] = []

    @classmethod
    def of(cls, settings: Settings) -> EndedTrials:
        """For the trials of a search."""
        return cls(settings.metric, settings.mode, settings.select)

    def add(self, record: TrialRecord, row: TrialRow) -> None:
        """A trial has ended."""
        number = record.number
        self._status.extend(bytes(max(0, number + 1 - len(self._status))))
        self._status[number] = 1 + ENDED.index(record.status)
        self.counts[record.status] += 1
        if record.status in ("failed", "diverged") and self.first_failure is None:
            self.first_failure = record.error or ""
        rank = best_score([record], self._metric, self._mode, self._select)
        if rank is not None and (self.leader is None or rank < self.leader):
            self.leader, self._leader_row = rank, row
        self._news.append(row)
        # Of equals the lowest number is the better one: it leaves the heap last.
        entry = (-self._shown_rank(row), -number, row)
        if len(self._best) < KEPT_ROWS:
            heapq.heappush(self._best, entry)
        else:
            heapq.heappushpop(self._best, entry)

    def status_of(self, number: int) -> Status | None:
        """How a trial ended; None if it has not."""
        code = self._status[number] if 0 <= number < len(self._status) else 0
        return ENDED[code - 1] if code else None

    def __contains__(self, number: int) -> bool:
        return self.status_of(number) is not None

    def __len__(self) -> int:
        return self.counts.total()

    def rows(self) -> list[TrialRow]:
        """The best, and those that ended since :meth:`shown`, by number."""
        chosen = {row.number: row for _, _, row in self._best}
        chosen.update((row.number, row) for row in self._news)
        if self._leader_row is not None:
            chosen[self._leader_row.number] = self._leader_row
        return [chosen[number] for number in sorted(chosen)]

    def counts_without(self, rows: Iterable[TrialRow]) -> Counter[str]:
        """How many ended with which status, without those that have a row."""
        return self.counts - Counter(row.status for row in rows if row.number in self)

    def shown(self) -> None:
        """Those that have ended are no news any more."""
        self._news.clear()

    def _shown_rank(self, row: TrialRow) -> float:
        """What displays sort by."""
        value = fmt.metric_value(row.metrics, self._metric)
        if value is None or not math.isfinite(value):
            return math.inf
        return -value if self._mode == "max" else value

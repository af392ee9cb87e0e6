"""Show the progress of a run in a notebook: one block per search, updated in place.

A kernel's output is not a terminal, but the contents of a display with an identifier can be
replaced, without a widget; the last contents are saved with the notebook. If a display fails, the
search continues without it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

from cerebro.errors import text_of
from cerebro.report import format as fmt
from cerebro.report import summary
from cerebro.report.block import Block
from cerebro.report.progress import Progress, choose_rows, describe_load
from cerebro.report.snapshot import Snapshot

DRAW_SECONDS = 0.5

MAX_CAUSES = 8
"""The most distinct causes of failures that are shown."""


class Notebook(Progress):
    """Redraws one block of HTML, at most twice a second; tests pass their own clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._drawn = float("-inf")
        self._handle: Any = None
        self._phases: list[str] = []
        self._causes: dict[str, list[int]] = {}
        self._other_causes = 0
        self._failed: set[int] = set()
        self._is_over = False
        self._is_broken = False

    def phase(self, what: str) -> None:
        self._phases.append(f"{what} ...")
        self._draw(Block(" ".join(self._phases), ""))

    def run_started(self, snapshot: Snapshot) -> None:
        self._draw(self._make_block(snapshot, "running"))

    def update(self, snapshot: Snapshot) -> None:
        """Redraw the block, at most twice a second; immediately if the search is paused."""
        self._note_failures(snapshot)
        if snapshot.resting or self._clock() - self._drawn >= DRAW_SECONDS:
            self._draw(self._make_block(snapshot, snapshot.pause or "running"))

    def finished(self, snapshot: Snapshot, result: Any) -> None:
        """Draw the final state, which is saved with the notebook."""
        self._is_over = True
        self._draw(self._make_block(snapshot, result.status))

    def ended_early(self, snapshot: Snapshot | None, error: BaseException) -> None:
        if self._is_over or self._handle is None:
            return
        self._is_over = True
        state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        if snapshot is None:
            self._draw(Block(" ".join(self._phases), state))
        else:
            self._draw(self._make_block(snapshot, state))

    def _make_block(self, snapshot: Snapshot, state: str) -> Block:
        self._note_failures(snapshot)
        rows = choose_rows(snapshot)
        hidden = snapshot.count_trials(rows)
        count = hidden.total()
        return Block(
            title=snapshot.path or "search",
            state=state,
            rows=rows,
            metric=snapshot.metric,
            mode=snapshot.mode,
            best=snapshot.best,
            facts=_list_facts(snapshot, is_over=self._is_over),
            more=f"and {count} more: {fmt.states(hidden)}" if count else "",
            notes=[
                *summary.describe_causes(self._causes),
                *([f"and {self._other_causes} for other reasons"] if self._other_causes else []),
            ],
            share_done=None if self._is_over and state != "interrupted" else snapshot.share_done,
        )

    def _note_failures(self, snapshot: Snapshot) -> None:
        """Remember why trials failed, because the snapshot omits trials that ended long ago."""
        for row in snapshot.trials:
            if row.status in ("failed", "diverged") and row.number not in self._failed:
                self._failed.add(row.number)
                what = f" {row.status}: {row.error}" if row.error else f" {row.status}"
                if what in self._causes or len(self._causes) < MAX_CAUSES:
                    self._causes.setdefault(what, []).append(row.number)
                else:
                    self._other_causes += 1

    def _draw(self, block: Block) -> None:
        if self._is_broken:
            return
        try:
            from IPython.display import display

            bundle = {"text/plain": block.to_text(), "text/html": block.to_html()}
            if self._handle is None:
                self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
            else:
                self._handle.update(bundle, raw=True)
        except Exception as error:
            self._is_broken = True
            warnings.warn(
                f"the notebook's display failed, so the search continues without it: "
                f"{text_of(error)}",
                stacklevel=2,
            )
        self._drawn = self._clock()


def _list_facts(snapshot: Snapshot, *, is_over: bool) -> list[str]:
    of_workers = filter(None, [describe_load(snapshot)])
    if is_over:
        ended = fmt.states(snapshot.count_trials()) or "no trials"
        return [ended, fmt.duration(snapshot.seconds), *of_workers]
    so_far = f"{fmt.rough_duration(snapshot.seconds)} so far"
    return [
        *([] if snapshot.share_done is None else [f"{fmt.percent(snapshot.share_done)} done"]),
        ", ".join(filter(None, [so_far, snapshot.time_left])),
        *of_workers,
    ]

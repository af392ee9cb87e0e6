"""Define `cerebro.open`, which in the other modules is `open_run`: there, `open` is Python's."""

from __future__ import annotations

from cerebro.results.result import open_run

open = open_run

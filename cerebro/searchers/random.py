"""Random search: every trial draws its configuration independently."""

from __future__ import annotations

from typing import Any

from cerebro.searchers.drawn import DrawnSearch


class RandomSearch(DrawnSearch):
    """Draws configurations from the space; trial ``t`` is ``space.sample(seed, t)``.

    More trials of the same search repeat the first ones: the configuration
    depends on the seed and the trial's number alone.
    """

    _title = "random search"

    def _config(self, trial: int) -> dict[str, Any]:
        return self._space.sample(self._seed, trial)

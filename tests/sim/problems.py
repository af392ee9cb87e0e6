"""The searches that are simulated: small, and different in what a fault could spoil.

The data is in real shards, which are only read. Everything else of a run is on the simulated disk.
"""

from __future__ import annotations

import atexit
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import cerebro
from cerebro.api.settings import set_up_searcher
from cerebro.coordinator.searcher_record import describe
from cerebro.data import Dataset
from cerebro.data.validation import Folds, make_folds
from cerebro.run.records import Ranking
from cerebro.run.settings import Batches, Exactness, Limits, Settings, Strategy
from cerebro.searchers import ASHA, PBT, GridSearch, Hyperband, RandomSearch, Searcher
from cerebro.space import Space

FOLDER = Path("/run")
HAS_ZMQ = find_spec("zmq") is not None
COUNT = 256
"""How many different searches there are."""

SEARCHERS: dict[str, Callable[[], Searcher]] = {
    "random": RandomSearch,
    "grid": GridSearch,
    "asha": lambda: ASHA(reduction_factor=2),
    "hyperband": lambda: Hyperband(reduction_factor=2),
    "pbt": lambda: PBT(interval=1, population=3),
}


def build(config: Mapping[str, Any], info: Any) -> Any:
    """Stand for the user's function: simulated workers train without it."""
    raise AssertionError("the simulated trainer has no model to build")


@dataclass(frozen=True)
class Problem:
    """A search; its number decides everything."""

    number: int  # also the seed of the search
    searcher: str
    trials: int
    epochs: int
    shards: int
    workers: int
    validates: bool
    folds: int
    keep: Any
    width: int
    shuffle: Any
    cluster: bool = False
    """Whether it is on a cluster; see `cluster.Shape`."""

    @classmethod
    def draw(cls, seed: int) -> Problem:
        """Return the search of a run: there are `COUNT`, so that each is run undisturbed once."""
        number = seed % COUNT
        choose = random.Random(f"problem {number}")
        searcher = choose.choice(sorted(SEARCHERS))
        validates = choose.random() < 0.5
        adaptive = searcher in ("asha", "hyperband", "pbt")
        cluster = HAS_ZMQ and random.Random(f"cluster {number}").random() < 0.25
        # More of the small ones fit into a minute, and they show as much, but few hops.
        small = choose.random() < (0.4 if cluster else 0.75)
        return cls(
            number=number,
            searcher=searcher,
            trials=choose.randint(1 + adaptive, 2 if small else 4),
            epochs=choose.randint(1 + adaptive, 2 if small else 4),
            shards=choose.randint(1, 2 if small else 3),
            workers=choose.randint(1, 2 if small else 3),
            validates=validates,
            folds=0 if validates or adaptive else choose.choice((0, 0, 2)),
            keep=choose.choice(("best", "last", "all")),
            width=choose.randint(1, 4),
            shuffle=choose.choice(("rows", "shards")),
            cluster=cluster,
        )

    @property
    def space(self) -> Space:
        if self.searcher == "grid":
            return Space({"a": [0.25 * n for n in range(self.trials)]})
        return Space({"a": cerebro.uniform(0, 1)})

    def make_searcher(self) -> Searcher:
        return SEARCHERS[self.searcher]()

    def make(self) -> tuple[Settings, Searcher]:
        """Return the settings of a search, and its searcher, which is set up."""
        searcher = self.make_searcher()
        settings = Settings(
            build=build,
            train=data(self.shards),
            validation=data(1) if self.validates else None,
            folds=split(self.shards, self.folds) if self.folds else None,
            ranking=Ranking("loss", "min", "last"),
            strategy=Strategy(
                searcher_name=type(searcher).__name__,
                width=self.width,
                space_json=self.space.to_json(),
                searcher_class=describe(searcher),
            ),
            limits=Limits(epochs=self.epochs, n_trials=self.trials, max_retries=1000),
            batches=Batches(batch_size=2, eval_batch_size=2, shuffle=self.shuffle),
            exactness=Exactness(seed=self.number),
            workers=self.workers,
            executor=None,
            folder=FOLDER,
            state_dir=FOLDER / "states",
            keep=self.keep,
            callbacks=(),
            progress=False,
        )
        set_up_searcher(searcher, self.space, settings)
        return settings, searcher


@cache
def folder_of_data() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="cerebro-sim-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def data(shards: int) -> Dataset:
    x = np.arange(4.0 * shards).reshape(-1, 1)
    cerebro.shard({"x": x}, folder_of_data() / str(shards), shards=shards)
    return Dataset(folder_of_data() / str(shards))


@cache
def split(shards: int, folds: int) -> Folds:
    return make_folds(data(shards), folds)

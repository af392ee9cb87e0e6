"""Hold the arguments of a search, checked once and written to the run's record.

Arguments that belong together are one object. `cerebro.search` makes each once, and hands it down
whole, to the workers too. A run's record has all of them in one mapping, by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from cerebro.arguments import MAX_INT32, check_whole_number
from cerebro.data import Dataset
from cerebro.data.order import Cut, EpochOrder, Shuffle, make_order
from cerebro.data.validation import Folds
from cerebro.errors import InputError
from cerebro.machine.devices import CPU, is_gpu
from cerebro.machine.flags import compute_settings, find_inexact_operation
from cerebro.run.records import Ranking
from cerebro.searchers.base import Searcher, SpaceSearcher
from cerebro.searchers.metrics import EarlyStopping
from cerebro.space import Space

MAX_THREADS = 4096
MAX_SEED = 2**64 - 1

Group = TypeVar("Group")


def read_group(kind: type[Group], record: Mapping[str, Any], **others: Any) -> Group:
    """Make a group of settings, below, from a run's record and `others`, or raise KeyError."""
    names = [f.name for f in fields(kind) if f.name not in others]  # type: ignore[arg-type]
    return kind(**others, **{name: record[name] for name in names})


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Which rows are in a batch."""

    batch_size: int | None = None
    """None: each configuration has its own."""
    eval_batch_size: int | None = None
    """None: that of training."""
    drop_last: bool = False
    shuffle: Shuffle = "rows"
    stagger: bool = True

    def size_of(self, config: Mapping[str, Any]) -> int:
        """Return the batch size, which is in the space or of the search, or raise InputError."""
        if "batch_size" in config and self.batch_size is not None:
            raise InputError(
                "batch_size is given twice, as batch_size= and in the space: leave out one of them"
            )
        value = config.get("batch_size", self.batch_size)
        if value is None:
            raise InputError("batch_size is missing: give batch_size=, or put it into the space")
        return check_whole_number("batch_size", value, 1, MAX_INT32)

    def eval_size_of(self, config: Mapping[str, Any]) -> int:
        return self.eval_batch_size or self.size_of(config)

    def make_cut(self, config: Mapping[str, Any], accumulate: int = 1) -> Cut:
        return Cut(self.size_of(config), self.drop_last, accumulate)

    def make_order(self, train: Dataset, seed: int) -> EpochOrder:
        return make_order(train, self.shuffle, seed, stagger=self.stagger)


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """What else determines the bits of a trial's states."""

    seed: int = 0
    threads: int = 1
    deterministic: Literal["warn"] | bool = "warn"

    def compute_on(self, device: str, *, strict: bool = False) -> Any:
        """Return a context in which PyTorch computes so; see `compute_settings`."""
        return compute_settings(self.threads, self.deterministic, device, strict=strict)

    def may_be_inexact_on(self, device: str) -> bool:
        """Return whether operations without a deterministic version are permitted, and noted."""
        return is_gpu(device) and self.deterministic == "warn"

    def find_inexact_operation(self, error: BaseException, device: str) -> str | None:
        """Return the operation that `strict` refused; see `flags.find_inexact_operation`."""
        return find_inexact_operation(error) if self.may_be_inexact_on(device) else None

    def varies_on(self, device: str) -> bool:
        """Return whether operations may differ from run to run, without being noted."""
        return is_gpu(device) and self.deterministic is False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far a search goes, and what its workers may take."""

    epochs: int = 1
    n_trials: int | None = None
    max_retries: int = 3
    unit_timeout: float | None = None
    """The seconds that a unit may take, for executors that can kill their workers."""
    time_limit: float | None = None
    live_models: int | None = 1
    """None: as many as memory allows."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """What a search tries, and how it decides."""

    searcher_name: str
    width: int = 8
    asynchronous: bool = False
    stop: EarlyStopping | None = None
    space: str = ""
    points: tuple[Mapping[str, Any], ...] = ()
    space_json: Mapping[str, Any] | None = None
    """The space, in the form that `cerebro.space.Space.from_json` reads."""
    searcher_class: Mapping[str, Any] | None = None
    """How to recreate the searcher; see `cerebro.coordinator.searcher_record`."""


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """The arguments of a search, simulated or not, that decide which trials run and how."""

    ranking: Ranking
    strategy: Strategy
    limits: Limits
    batches: Batches = Batches()
    exactness: Exactness = Exactness()

    def set_up(self, searcher: Searcher, space: Space) -> None:
        if isinstance(searcher, SpaceSearcher):
            searcher.select = self.ranking.select
        limits = self.limits
        timed = limits.n_trials is None and limits.time_limit is not None
        searcher.setup(
            space,
            seed=self.exactness.seed,
            epochs=limits.epochs,
            n_trials=math.inf if timed else limits.n_trials,
            metric=self.ranking.metric,
            mode=self.ranking.mode,
            points=list(self.strategy.points),
        )


@dataclass(frozen=True, kw_only=True)
class Settings(SearchSettings):
    """The arguments of `cerebro.search`; every field is valid."""

    build: Callable[..., Any]
    train: Dataset
    validation: Dataset | None
    folds: Folds | None
    workers: int
    devices: tuple[str, ...] = (CPU,)
    """The CPU, or the GPUs, which are assigned to workers in turn."""
    executor: Any
    folder: Path
    state_dir: Path
    keep: Literal["best", "last", "all"]
    callbacks: tuple[Any, ...]
    progress: Any

    @property
    def validates(self) -> bool:
        return self.validation is not None or self.folds is not None

    @property
    def trials_per_config(self) -> int:
        """The number of trials per configuration: one, or one for each fold."""
        return 1 if self.folds is None else len(self.folds)

    def record(self) -> dict[str, Any]:
        """Return the settings that the run's store keeps: all that affect the trials."""
        groups = (self.exactness, self.batches, self.limits, self.ranking, self.strategy)
        record = {name: value for group in groups for name, value in vars(group).items()}
        for name in ("points", "space_json", "searcher_class"):  # stored beside the settings
            del record[name]
        stop = None if self.strategy.stop is None else asdict(self.strategy.stop)
        own = {"workers": self.workers, "devices": self.devices, "keep": self.keep}
        return record | own | {"stop": stop}

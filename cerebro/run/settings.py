"""Hold the arguments of a search, checked once and written to the run's record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from cerebro.data import Dataset
from cerebro.data.order import EpochOrder, Shuffle, make_order
from cerebro.data.validation import Folds
from cerebro.machine.devices import CPU
from cerebro.run.records import Ranking
from cerebro.searchers.stopping import EarlyStopping

HOOKS = (
    "on_run_start",
    "on_trial_start",
    "on_unit_end",
    "on_epoch_end",
    "on_trial_end",
    "on_run_end",
)

MAX_THREADS = 4096

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class Training:
    """The settings of a search that affect training in the workers.

    `Settings` and `cerebro.worker.messages.RunContext` both have these fields. To add a setting
    that affects training, add it here and to `cerebro.search`, and nowhere else.
    """

    seed: int = 0
    epochs: int = 1
    batch_size: int | None = None
    eval_batch_size: int | None = None
    drop_last: bool = False
    shuffle: Shuffle = "rows"
    """The order of the rows; see `cerebro.data.order`."""
    stagger: bool = True
    threads: int = 1
    deterministic: Literal["warn"] | bool = "warn"
    live_models: int | None = 1
    unit_timeout: float | None = None
    """The seconds that a unit may take, for executors that can kill their workers."""

    def order_of(self, train: Dataset) -> EpochOrder:
        return make_order(train, self.shuffle, self.seed, stagger=self.stagger)

    def record_training(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(Training)}

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> dict[str, Any]:
        """Return these settings from a run's record; raise KeyError if one is missing."""
        return {f.name: record[f.name] for f in fields(Training)}


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """The arguments of `cerebro.search`; every field is valid."""

    build: Callable[..., Any]
    train: Dataset
    validation: Dataset | None
    folds: Folds | None
    n_trials: int | None
    metric: str
    mode: Literal["min", "max"]
    select: Literal["best", "last"]
    stop: EarlyStopping | None
    width: int
    workers: int
    folder: Path
    keep: Literal["best", "last", "all"]
    max_retries: int
    time_limit: float | None
    asynchronous: bool = False
    state_dir: Path
    callbacks: tuple[Any, ...]
    progress: Any
    executor: Any
    devices: tuple[str, ...] = (CPU,)
    """The CPU, or the GPUs, which are assigned to workers in turn."""
    searcher_name: str = ""
    space: str = ""
    points: tuple[Mapping[str, Any], ...] = field(default=())
    space_json: Mapping[str, Any] | None = None
    """The space, in the form that `cerebro.space.Space.from_json` reads."""
    searcher_class: Mapping[str, Any] | None = None
    """How to recreate the searcher; see `cerebro.coordinator.searcher_record`."""

    @property
    def validates(self) -> bool:
        return self.validation is not None or self.folds is not None

    @property
    def ranking(self) -> Ranking:
        return Ranking(self.metric, self.mode, self.select)

    @property
    def trials_each(self) -> int:
        """The number of trials per configuration: one, or one for each fold."""
        return 1 if self.folds is None else len(self.folds)

    def record(self) -> dict[str, Any]:
        """Return the settings that the run's store keeps: all that affect the trials."""
        left_out = {
            "build", "train", "validation", "folds", "stop", "folder", "state_dir", "callbacks",
            "progress", "executor", "points", "space_json", "searcher_class",
        }  # fmt: skip
        names = [f.name for f in fields(self) if f.name not in left_out]
        record = {name: getattr(self, name) for name in names}
        return {**record, "stop": None if self.stop is None else asdict(self.stop)}

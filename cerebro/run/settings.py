"""The arguments of a search, checked once and written into the run's record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from cerebro.data import Dataset
from cerebro.data.validation import Folds
from cerebro.machine.devices import CPU
from cerebro.searchers.stopping import EarlyStopping

HOOKS = (
    "on_run_start",
    "on_trial_start",
    "on_unit_end",
    "on_epoch_end",
    "on_trial_end",
    "on_run_end",
)

MAX_WORKERS = 4096

MAX_THREADS = 4096

MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class Settings:
    """What `cerebro.search` was asked to do; every field is valid."""

    build: Callable[..., Any]
    train: Dataset
    validation: Dataset | None
    folds: Folds | None
    epochs: int
    n_trials: int | None
    metric: str
    mode: Literal["min", "max"]
    select: Literal["best", "last"]
    batch_size: int | None
    eval_batch_size: int | None
    drop_last: bool
    stop: EarlyStopping | None
    width: int
    workers: int
    threads: int
    seed: int
    folder: Path
    keep: Literal["best", "last", "all"]
    max_retries: int
    unit_timeout: float | None
    time_limit: float | None
    stagger: bool
    asynchronous: bool
    live_models: int | None
    deterministic: Literal["warn"] | bool
    state_dir: Path
    callbacks: tuple[Any, ...]
    progress: Any
    executor: Any
    devices: tuple[str, ...] = (CPU,)
    """The CPU, or GPUs; the workers sit at them in turn."""
    searcher_name: str = ""
    space: str = ""
    points: tuple[Mapping[str, Any], ...] = field(default=())
    space_json: Mapping[str, Any] | None = None
    """The space, as `cerebro.space.Space.from_json` reads it."""
    searcher_class: Mapping[str, Any] | None = None
    """How the searcher can be made again; see `cerebro.coordinator.searcher_record`."""

    @property
    def validates(self) -> bool:
        """Whether trials are validated."""
        return self.validation is not None or self.folds is not None

    @property
    def trials_each(self) -> int:
        """How many trials a configuration is: one, or one for each fold."""
        return 1 if self.folds is None else len(self.folds)

    def record(self) -> dict[str, Any]:
        """The part that the run's store keeps: everything that shapes the trials."""
        left_out = {
            "build", "train", "validation", "folds", "stop", "folder", "state_dir", "callbacks",
            "progress", "executor", "points", "space_json", "searcher_class",
        }  # fmt: skip
        names = [f.name for f in fields(self) if f.name not in left_out]
        record = {name: getattr(self, name) for name in names}
        return {**record, "stop": None if self.stop is None else asdict(self.stop)}

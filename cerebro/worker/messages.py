"""What travels between the coordinator and its workers.

A *unit* is one trial over one shard, once (or one validation pass at an
epoch's end); it is the atom of scheduling, retry and commit. These records are
plain data: executors carry them over a pipe, through Ray or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

from cerebro.errors import one_line
from cerebro.run.settings import Training
from cerebro.run.states import CloneOf, KeptState

if TYPE_CHECKING:
    from cerebro.data import Dataset
    from cerebro.data.validation import Folds

LIBRARIES = ("jax", "sklearn", "torch")
"""What takes long to import."""


@dataclass(frozen=True)
class Warned:
    """A warning that was raised where a trial was trained; see `cerebro.worker.trial_warnings`."""

    category: tuple[str, ...]
    """``module:class`` of its category and of those that this is derived from, itself first."""
    text: str
    file: str
    line: int

    @property
    def name(self) -> str:
        """Its category, without the module."""
        return self.category[0].rpartition(":")[2].rpartition(".")[2]

    @property
    def place(self) -> tuple[str, str, int]:
        """What and where it is, whatever it says."""
        return self.category[0], self.file, self.line

    def __str__(self) -> str:
        text = one_line(self.text)
        return f"{self.name}: {text} ({PurePath(self.file).name}:{self.line})"


Sums = dict[str, tuple[float, float]]
"""Metric name to (sum of value x weight, sum of weights), float64, in batch order."""


@dataclass(frozen=True)
class UnitSums:
    """What a pass over batches counted and summed."""

    rows: int
    batches: int
    sums: Sums


@dataclass(frozen=True)
class RunContext(Training):
    """What a worker needs to know once per run.

    ``state_dir`` holds the slots of live trials, ``epoch_dir`` the states kept
    of finished epochs and ``log_dir`` what trials print.
    """

    build: Callable[..., Any]
    train: Dataset
    state_dir: str
    epoch_dir: str
    log_dir: str
    validation: Dataset | None = None
    folds: Folds | None = None
    """Of `train`; then there is no `validation` beside them."""
    loader_threads: int = 0
    live_bytes: int = 0
    data_bytes: int = 0
    """Of a GPU's memory, for the shards that one worker keeps there; 0: half of it."""
    device: str = "cpu"
    """Where models compute, as a worker names it: see `cerebro.machine.devices.IN_WORKER`."""
    torch_flags: Mapping[str, Any] = field(default_factory=dict)
    warning_filters: tuple[tuple[Any, ...], ...] = ()
    """Those of the user's process; see `cerebro.worker.trial_warnings`."""
    verify: bool = True

    @property
    def validates(self) -> bool:
        """Whether an epoch ends with a unit that validates."""
        return self.validation is not None or self.folds is not None

    @property
    def units_per_epoch(self) -> int:
        return self.train.num_shards + self.validates

    def views(self, trial: int) -> tuple[Dataset, Dataset | None]:
        """What a trial is trained on, and validated on."""
        if self.folds is None:
            return self.train, self.validation
        return self.folds.of_trial(trial)

    def fold_of(self, trial: int) -> int | None:
        """Which fold a trial is; None where there are none."""
        return None if self.folds is None else trial % len(self.folds)

    def check_files(self) -> None:
        """Find data files that were cut or removed since they were opened.

        Raises
        ------
        CorruptDataError
            Naming the first of them.
        """
        for view in (self.train, self.validation):
            for shard in range(0 if view is None else view.num_shards):
                assert view is not None
                view.check_sizes(shard)


@dataclass(frozen=True)
class Task:
    """One unit to run. ``step == train.num_shards`` is the validation unit."""

    trial: int
    config: Mapping[str, Any]
    epoch: int
    step: int
    shard: int
    attempt: int
    position: int
    """Units of the trial that are committed before this one."""
    dispatch: int = 0
    """How often the trial has been handed to a worker before: it never goes down,
    so that slots can refuse a worker that was given up for dead."""
    keep_state: bool = True
    """Whether a state at an epoch's end is written to ``epoch_dir``."""
    clone_of: CloneOf | None = None
    """Set for a clone's first unit."""
    origin: KeptState | None = None
    """Where the trial's own state is, if it is not in the slots: in a resumed run."""
    epochs: int | None = None
    """What ``info.epochs`` is; None: the run's."""
    ended: tuple[int, ...] = ()
    """Trials that have ended since the worker's last task: nothing of them is needed again."""


@dataclass(frozen=True)
class CheckTask:
    """Asks a worker whether a configuration's state survives a hop.

    With ``build_only`` it only builds the model, which imports what training
    needs: other workers do so while the first one checks.
    """

    config: Mapping[str, Any]
    build_only: bool = False


@dataclass(frozen=True)
class WarmTask:
    """Asks a worker that takes another's place to import what units will need.

    It answers with `CheckDone`. Until then its units are better off with others.
    """

    modules: tuple[str, ...] = ()


Job = Task | CheckTask | WarmTask
"""What an executor gives to a worker."""


@dataclass(frozen=True)
class UnitDone:
    worker: int
    task: Task
    rows: int
    batches: int
    sums: Sums
    started: float
    """Seconds since the epoch of ``time.time``."""
    seconds: float
    loaded: bool
    """Whether the state was unpacked: it was not live on this worker."""
    state_bytes: int
    metrics: dict[str, float] | None = None
    """At an epoch's end: ``train_*``, ``val_*`` and the short names."""
    state_hash: str | None = None
    state_file: str | None = None
    """A complete but not yet durable file; renaming it publishes it."""
    dropped: tuple[int, ...] = ()
    """Trials whose live model the worker gave up."""
    libraries: tuple[str, ...] = ()
    """Which of `LIBRARIES` the worker has imported."""
    resident: int = 0
    """Bytes of memory that the worker's process holds; 0 where that is not known."""
    grown: int = 0
    """Bytes by which it grew without a reason; see `cerebro.worker.growth`."""
    packed_hash: str = ""
    """Hash of the state that the unit has left."""
    not_exact: tuple[str, ...] = ()
    """Operations that the unit used and that have no deterministic version on its device."""
    moved: str = ""
    """Why PyTorch moves batches to the worker's GPU; empty: they are made there."""
    warned: tuple[Warned, ...] = ()
    """Warnings that the trial has not raised before on this worker."""
    is_kept: bool = True
    """False where the state at an epoch's end is still on its way to ``epoch_dir``:
    `StateKept` or `StateLost` will tell."""


@dataclass(frozen=True)
class UnitFailed:
    worker: int
    task: Task
    kind: Literal["error", "diverged", "cancelled", "data", "storage", "worker"]
    """``data``: a file is damaged or missing; ``storage``: the run's own files cannot be
    written; ``worker``: this process cannot go on, another can. The trial is to blame for
    none of them. An executor with processes tells ``worker`` as `WorkerLost`."""
    message: str
    traceback: str = ""
    dropped: tuple[int, ...] = ()
    bases: tuple[str, ...] = ()
    """Of ``error``: full names of the exception's class and its base classes, in their order."""
    place: str = ""
    """Of ``error``: the user's line that raised it, as in `message`."""
    warned: tuple[Warned, ...] = ()


@dataclass(frozen=True)
class CheckDone:
    worker: int
    problems: tuple[str, ...]
    error: str | None = None
    """Set where the configuration could not be tried at all."""
    metrics: tuple[str, ...] = ()
    state_bytes: int = 0
    """Size of the model's state after a few batches, packed; 0: not known."""
    environment: Mapping[str, Any] | None = None
    """What the worker computes with; see `cerebro.machine.environment.describe`."""
    not_exact: tuple[str, ...] = ()
    """Operations of the model that have no deterministic version on its device."""
    cpu_only: bool = False
    """Whether the model says that it never computes on a GPU."""
    warned: tuple[Warned, ...] = ()


@dataclass(frozen=True)
class WorkerLost:
    """A worker that is gone for good: it was reaped before this is told."""

    worker: int
    reason: str
    signal: int | None = None
    """What ended it, if it was a signal that nobody of us sent."""
    began: bool = True
    """Whether it had begun what it was given: if not, that is not to blame."""
    traced: bool = False
    """Whether it has left the traceback of its end in the trial's log."""
    with_machine: bool = False
    """Whether the machine that it ran on is gone: no trial is to blame."""


# --- what only executors tell that have other machines ------------------------------


@dataclass(frozen=True)
class WorkerJoined:
    """A worker that has come while the run goes on."""

    worker: int


@dataclass(frozen=True)
class ShardsPlaced:
    """Which workers can read which shards is not what it was."""


@dataclass(frozen=True)
class StateKept:
    """The state at the end of a trial's epoch lies in ``epoch_dir``; see `UnitDone.is_kept`."""

    trial: int


@dataclass(frozen=True)
class StateLost:
    """The machine is gone that held a trial's newest state: the trial goes back."""

    trial: int
    reason: str
    worker: int | None = None
    """Who was to train its next unit."""
    position: int | None = None
    """Units behind the newest state that there still is; None: only kept ones are left."""


@dataclass(frozen=True)
class Note:
    """Something that belongs into the run's record."""

    kind: str
    text: str


Event = UnitDone | UnitFailed | CheckDone | WorkerLost

News = Event | WorkerJoined | ShardsPlaced | StateKept | StateLost | Note
"""What an executor tells."""

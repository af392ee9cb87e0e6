"""Define the messages between the coordinator and its workers.

A *unit* is one pass of one trial over one part of an epoch (see `cerebro.data.order`), or one
validation pass at the end of an epoch. It is the smallest piece of work that is scheduled, retried
and committed. Messages are plain data: executors send them over a socket or through Ray, or pass
them on within one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

from cerebro.errors import one_line
from cerebro.machine.environment import hash_seed
from cerebro.machine.program import Program
from cerebro.model import Words
from cerebro.report.findings import Finding
from cerebro.run.settings import Batches, Exactness, Limits
from cerebro.run.states import CloneOf, KeptState
from cerebro.worker.read_names import ReadNames

if TYPE_CHECKING:
    from cerebro.data import Dataset
    from cerebro.data.manifest import FileEntry
    from cerebro.data.order import EpochOrder
    from cerebro.data.validation import Folds

LIBRARIES = ("jax", "keras", "sklearn", "torch")  # libraries that take long to import
MAX_LIVE_MODELS = 8
MAX_LIVE_MODELS_ON_GPU = 64
"""The most models that a worker keeps if memory is not short. On a GPU, all trials come round to
the worker that holds a shard, and a model that was dropped must be captured again.
"""


@dataclass(frozen=True)
class Warned:
    """A warning that a trial raised in a worker; see `cerebro.worker.trial_warnings`."""

    category: tuple[str, ...]  # ``module:class`` of the category and then of its base categories
    text: str
    file: str
    line: int

    @property
    def name(self) -> str:
        """The category's name without the module."""
        return self.category[0].rpartition(":")[2].rpartition(".")[2]

    @property
    def place(self) -> tuple[str, str, int]:
        """The warning's category, file and line, which identify it regardless of its text."""
        return self.category[0], self.file, self.line

    def __str__(self) -> str:
        text = one_line(self.text)
        return f"{self.name}: {text} ({PurePath(self.file).name}:{self.line})"


Sums = dict[str, tuple[float, float]]  # by metric: sum of value x weight, sum of weights


@dataclass(frozen=True)
class UnitSums:
    rows: int
    batches: int
    sums: Sums


@dataclass(frozen=True)
class RunFolders:
    """The folders into which workers write."""

    slots: str
    """For the states of live trials."""
    states: str
    """For the kept states of finished epochs."""
    logs: str


@dataclass(frozen=True)
class WorkerShare:
    """What a worker may take of its machine."""

    loader_threads: int = 0
    live_bytes: int = 0
    data_bytes: int = 0
    """The GPU memory in bytes for the shards that a worker keeps there; 0: half of the memory."""


@dataclass(frozen=True)
class RunContext:
    """The context of a run, which every worker receives once."""

    build: Callable[..., Any]
    """The user's ``build``; for `ShardTask`, a `cerebro.data.derivation.ShardWork`."""
    train: Dataset
    folders: RunFolders
    validation: Dataset | None = None
    folds: Folds | None = None
    """The folds of `train`; if given, `validation` is None."""
    batches: Batches = field(default_factory=Batches)
    exactness: Exactness = field(default_factory=Exactness)
    limits: Limits = field(default_factory=Limits)
    share: WorkerShare = WorkerShare()
    device: str = "cpu"
    """The models' device as a worker names it; see `cerebro.machine.devices.IN_WORKER`."""
    libraries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The settings of PyTorch, Keras and JAX in the user's process; see `machine.libraries`."""
    hash_seed: str = field(default_factory=hash_seed)
    """``PYTHONHASHSEED`` of all workers."""
    warning_filters: tuple[tuple[Any, ...], ...] = ()
    """The warning filters of the user's process; see `cerebro.worker.trial_warnings`."""
    verify: bool = True
    program: Program = field(default_factory=Program.capture)
    """The source of the user's modules; workers get it before the rest."""

    @property
    def validates(self) -> bool:
        """Whether an epoch ends with a validation unit."""
        return self.validation is not None or self.folds is not None

    @cached_property
    def _orders(self) -> tuple[EpochOrder, ...]:
        folds = 1 if self.folds is None else len(self.folds)
        views = (self.views(fold)[0] for fold in range(folds))
        return tuple(self.batches.make_order(view, self.exactness.seed) for view in views)

    def order(self, trial: int = 0) -> EpochOrder:
        """Return the order of the rows on which a trial is trained; all have as many parts."""
        return self._orders[trial % len(self._orders)]

    @cached_property
    def units_per_epoch(self) -> int:
        return self.order().num_parts + self.validates

    def views(self, trial: int) -> tuple[Dataset, Dataset | None]:
        if self.folds is None:
            return self.train, self.validation
        return self.folds.get_views(trial)

    def fold_of(self, trial: int) -> int | None:
        return None if self.folds is None else trial % len(self.folds)

    def check_files(self) -> None:
        """Raise CorruptDataError with the file's name if a data file is truncated or missing."""
        for view in [self.train] if self.validation is None else [self.train, self.validation]:
            for shard in range(view.num_shards):
                view.shards.check_sizes(shard)


@dataclass(frozen=True)
class Task:
    """One unit to run. ``step == order().num_parts`` is the validation unit."""

    trial: int
    config: Mapping[str, Any]
    epoch: int
    step: int
    part: int  # the part of the epoch to train on; -1 for validation
    attempt: int
    position: int  # the number of the trial's units that were committed before this one
    dispatch: int = 0  # grows with each dispatch of the trial: slots reject older workers
    keep_state: bool = True  # whether to keep the state at an epoch's end, in `RunFolders.states`
    clone_of: CloneOf | None = None  # the state from which a clone starts, in its first unit
    origin: KeptState | None = None
    """Where the trial's state is if not in its slots, as in a resumed run."""
    epochs: int | None = None  # the trial's ``info.epochs``; None: that of the run
    stream: int | None = None  # the trial's stream if it is not its number
    ended: tuple[int, ...] = ()  # trials that have ended since the worker's last task
    notes_reads: bool = False  # whether to note what ``build`` reads; see `worker.read_names`
    after: int | None = None
    """For a task queued behind another: the `dispatch` of the trial's unit before it. If that unit
    has not succeeded on this worker, the worker drops the task without an answer.
    """

    @property
    def key(self) -> int:
        """The number in the trial's seeds."""
        return self.trial if self.stream is None else self.stream

    @property
    def identity(self) -> tuple[int, int]:
        """The trial and the dispatch, which no other task has."""
        return self.trial, self.dispatch

    def may_follow(self, done: tuple[int, int] | None) -> bool:
        """Return whether the task may run on a worker that has just done the unit `done`."""
        return self.after is None or done == (self.trial, self.after)

    @property
    def number_before(self) -> int:
        """The number of the answer to the unit before a queued one; see `BeatPage.hear`."""
        assert self.after is not None
        return (self.trial << 32 | self.after) + 1


@dataclass(frozen=True)
class CheckTask:
    """A task to check whether a configuration's state survives a hop.

    With ``build_only`` the worker only builds the model, which imports the libraries: other workers
    do this while the first worker checks. With ``measures`` it also trains a model that may share a
    GPU on a few batches, to measure the memory that it takes.
    """

    config: Mapping[str, Any]
    build_only: bool = False
    thorough: bool = False  # whether to search thoroughly for mistakes, as `cerebro.check` does
    number: int = 0  # the trial whose model is built; only with `build_only`
    measures: bool = False  # only with `build_only`
    epochs: int | None = None  # its ``info.epochs``; None: that of the run
    stream: int | None = None
    clone_of: CloneOf | None = None
    """With `build_only`: the parent whose state the model must fit; see `clone_check`."""


@dataclass(frozen=True)
class WarmTask:
    """A task to import libraries for a worker that replaces a lost one, which sends `CheckDone`."""

    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardTask:
    """A task to make a shard of a derived dataset, in a folder in `RunFolders.slots`."""

    shard: int
    nbytes: int = 0  # the size of the shard's files, about


Job = Task | CheckTask | WarmTask | ShardTask  # a task that an executor sends to a worker


@dataclass(frozen=True)
class CommittedState:
    nbytes: int
    hash: str = ""
    file: str | None = None
    """At the end of an epoch: a file with the state that is complete but not yet durable; renaming
    publishes it. None if the state is not kept.
    """


@dataclass(frozen=True)
class StepNotes:
    """What was unusual in the steps of a unit."""

    not_exact: tuple[str, ...] = ()  # operations for which the device has no deterministic version
    moved: str = ""  # why PyTorch moves batches to the GPU; empty if they are made there
    unlike: str = ""  # why the unit ran again: its recorded steps gave wrong results


@dataclass(frozen=True)
class ProcessNotes:
    """What a worker's process holds after a unit."""

    libraries: tuple[str, ...] = ()  # the members of `LIBRARIES` that it has imported
    resident: int = 0  # its memory, in bytes; 0 if unknown
    grown: int = 0  # by how many bytes it grew unexpectedly; see `trial_warnings.Growth`


@dataclass(frozen=True)
class UnitDone:
    worker: int
    task: Task
    total: UnitSums
    started: float  # the start time of the unit, as returned by ``time.time``
    seconds: float
    loaded: bool  # whether the state was unpacked because the model was not live on this worker
    state: CommittedState
    metrics: dict[str, float] | None = None
    """At the end of an epoch: ``train_*``, ``val_*`` and short names."""
    dropped: tuple[int, ...] = ()  # trials whose live models the worker has released
    process: ProcessNotes = field(default_factory=ProcessNotes)
    steps: StepNotes = field(default_factory=StepNotes)
    warned: tuple[Warned, ...] = ()  # for the first time on this worker
    read: ReadNames | None = None  # by ``build``, if the task asked for it
    is_kept: bool = True
    """False if the epoch's state is still being copied; `StateKept` or `StateLost` follows."""


@dataclass(frozen=True)
class UnitFailed:
    worker: int
    task: Task
    kind: Literal["error", "diverged", "cancelled", "data", "storage", "worker"]
    """``data``: a file is damaged or missing. ``storage``: the run's files cannot be written.
    ``worker``: this process cannot continue, but another one can. None of these three is the
    trial's fault. An executor with processes reports ``worker`` as `WorkerLost`.
    """
    message: str
    traceback: str = ""
    dropped: tuple[int, ...] = ()
    bases: tuple[str, ...] = ()
    """For ``error``: the full names of the exception's class and its base classes, in MRO order."""
    place: str = ""  # for ``error``: the user's line that raised it, as in `message`
    warned: tuple[Warned, ...] = ()
    read: ReadNames | None = None


@dataclass(frozen=True)
class ModelFacts:
    """What a worker learns of the model that it builds for a check."""

    cpu_only: bool = False  # whether the model declares that it never computes on a GPU
    parameter_order: str = ""  # see `cerebro.worker.models.hash_parameter_order`
    words: Words = field(default_factory=Words)  # what the model's users call its methods
    declares_metrics: bool = False  # whether the model's arguments fix the names of all metrics
    metrics: tuple[str, ...] = ()  # the metrics after a few batches
    state_bytes: int = 0  # the size of the packed state after a few batches; 0 if unknown
    shares_gpu: bool = False  # whether several of its trials are trained faster at once on a GPU
    lane_bytes: int = 0  # the memory of a GPU that training it takes; 0 if unknown
    usable_bytes: int = 0  # the memory of the GPU that its worker has or could get; 0 if unknown
    wrapped: str = ""  # what `build` returned, if that was not a model; see `worker.wrapping`


@dataclass(frozen=True)
class CheckDone:
    worker: int
    problems: tuple[str, ...]
    error: str | None = None  # why the configuration could not be tried
    unfit: bool = False  # whether the error is that the model reads columns unfit for validation
    model: ModelFacts = field(default_factory=ModelFacts)
    environment: Mapping[str, Any] | None = None  # of the worker; see `machine.environment`
    not_exact: tuple[str, ...] = ()  # operations for which the device has no deterministic version
    warned: tuple[Warned, ...] = ()
    findings: tuple[Finding, ...] = ()  # likely mistakes in the model and its data
    gain: tuple[float, float] | None = None  # seconds of a step, ordinary and ``graph=True``
    read: ReadNames | None = None  # what ``build`` has read of the configuration, if it was trained


@dataclass(frozen=True)
class ShardMade:
    """A shard of a derived dataset is complete, in the folder that `ShardTask` describes."""

    worker: int
    task: ShardTask
    files: Mapping[str, FileEntry]  # the size and hash of each file, in the order of the columns
    node: str = ""  # the node's name in messages
    folder: str = ""  # at the coordinator: the folder in which the files have arrived


@dataclass(frozen=True)
class ShardFailed:
    worker: int
    task: ShardTask
    kind: Literal["error", "input", "memory", "data", "storage", "worker"]
    """``input``: Cerebro rejects the function's results. ``memory``: a batch does not fit in the
    GPU's memory. ``data``: a file is damaged or missing. ``storage``: the node's disk is full.
    ``worker``: the worker cannot continue, as without its GPU, and is lost. ``error``: the function
    has raised an exception.
    """
    message: str
    traceback: str = ""
    node: str = ""  # the node's name in messages


@dataclass(frozen=True)
class WorkerLost:
    """A worker is permanently lost: its process has been reaped."""

    worker: int
    reason: str
    signal: int | None = None  # the signal that killed it, unless the executor sent the signal
    began: bool = True  # whether the worker had begun its task; if not, the task is not to blame
    traced: bool = False  # whether the trial's log has the traceback of the crash
    with_machine: bool = False  # whether its machine is also lost; if so, no trial is to blame
    has_left: bool = False  # told to end, after handing its states over; no trial is to blame


# --- only sent by executors with several machines -----------------------------------


@dataclass(frozen=True)
class WorkerJoined:
    """A new worker has joined during the run."""

    worker: int


@dataclass(frozen=True)
class ShardsPlaced:
    """Some workers have loaded or released shards."""


@dataclass(frozen=True)
class StateKept:
    """The state at the end of a trial's epoch is in `RunFolders.states`; see `UnitDone.is_kept`."""

    trial: int


@dataclass(frozen=True)
class StateLost:
    """The machine with a trial's newest state is lost, so the trial goes back to an older state."""

    trial: int
    reason: str
    worker: int | None = None  # the worker that would have trained the trial's next unit
    position: int | None = None  # of the newest remaining state; None: only kept ones remain


@dataclass(frozen=True)
class Note:
    """An event to record and to show as a warning."""

    kind: str
    text: str


Event = UnitDone | UnitFailed | CheckDone | ShardMade | ShardFailed | WorkerLost

News = Event | WorkerJoined | ShardsPlaced | StateKept | StateLost | Note
"""An event from an executor."""

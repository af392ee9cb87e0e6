"""What the C module ``cerebro._core`` offers; its docstrings say the rest.

Private: everything here may change. Arrays at the edges are NumPy's, and dtypes
go by the names of ``csrc/core/dtype.h`` ("float32", "bfloat16", ...).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import Buffer

_Path: TypeAlias = str | PathLike[str]
_Array: TypeAlias = NDArray[Any]

# --- random streams and hashes ------------------------------------------------

def trial_seed(seed: int, trial: int) -> int: ...
def visit_order(trial: int, epoch: int, shards: int, *, stagger: bool = True) -> list[int]: ...
def permutation(
    n: int, seed: int, use: Literal["rows", "write", "split"], a: int = 0, b: int = 0
) -> NDArray[np.uint32]: ...
def random_doubles(
    n: int, seed: int, use: Literal["space", "eval", "search"], a: int = 0, b: int = 0
) -> list[float]: ...
def xxh3_64(buffer: Buffer | _Array, /) -> str: ...
def xxh3_128(buffer: Buffer | _Array, /) -> str: ...

# --- shards and files ---------------------------------------------------------

class ShardReader:
    """One shard, mapped read-only and checked against its manifest.

    Sizes, ``.npy`` headers and ragged offsets are checked here, bytes by
    :meth:`hashes`. Raises ``OSError`` or ``CorruptDataError`` naming the file.
    """

    def __new__(
        cls,
        directory: _Path,
        rows: int,
        columns: Sequence[tuple[str, str, Sequence[int], bool, dict[str, int]]],
    ) -> ShardReader: ...
    @property
    def rows(self) -> int: ...
    @property
    def directory(self) -> str: ...
    @property
    def column_names(self) -> tuple[str, ...]: ...
    def column(self, name: str, /) -> _Array: ...
    def ragged(self, name: str, /) -> tuple[_Array, NDArray[np.int64]]: ...
    def hashes(self) -> dict[str, str]: ...

class NpyWriter:
    """Streams rows into one new ``.npy`` file and hashes on the way.

    A writer that fails, is aborted or is forgotten removes its file again.
    """

    def __new__(cls, path: _Path, dtype: str, row_shape: Sequence[int], rows: int) -> NpyWriter: ...
    def write(self, array: ArrayLike, /) -> None: ...
    def close(self) -> tuple[int, str]: ...
    def abort(self) -> None: ...

def fsync_directory(path: _Path, /) -> None: ...
def replace_file(path: _Path, data: Buffer) -> None: ...
def publish_files(pairs: Iterable[tuple[_Path, _Path]], /) -> None: ...

# --- the scheduler --------------------------------------------------------------

class Schedule:
    """Which trial trains on which shard on which worker, next.

    Events in, commands out, the time (seconds) passed in. ``shards`` is their
    number or a weight for each, e.g. its rows; ``eval_cost`` is the weight of the
    validation unit (0: there is none). Bad arguments raise ``ValueError``.
    """

    def __new__(
        cls,
        *,
        shards: int | Sequence[float],
        exclusive: bool = False,
        stagger: bool = True,
        eval_cost: float = 0.0,
        live_models: int = 8,
        capacity: int = 1024,
    ) -> Schedule: ...
    def add_worker(self, now: float, /) -> int: ...
    def remove_worker(self, worker: int, now: float, /) -> None: ...
    def set_holders(self, shard: int, workers: Sequence[int]) -> None: ...
    def live(self, worker: int, /) -> list[int]: ...
    def forget_live(self, worker: int, trial: int) -> None: ...
    def add_trial(self, trial: int, *, epochs: int, epoch: int = 0, step: int = 0) -> None: ...
    def extend_trial(self, trial: int, epochs: int) -> None: ...
    def drop_trial(self, trial: int, /) -> None: ...
    def forget_trial(self, trial: int, /) -> None: ...
    def hold_trial(self, trial: int, /) -> None: ...
    def release_trial(self, trial: int, /) -> None: ...
    def fork_trial(self, parent: int, child: int, *, epochs: int) -> None: ...
    def trial_status(self, trial: int, /) -> Literal["ready", "running", "waiting", "dropped"]: ...
    def trial_position(self, trial: int, /) -> tuple[int, int, int]: ...
    def next(
        self, now: float, /
    ) -> (
        tuple[Literal["run"], int, int, int, int, int, int]
        | tuple[Literal["load"], int, int]
        | None
    ): ...
    def unit_done(self, worker: int, now: float, /) -> tuple[int, int, int]: ...
    def unit_failed(self, worker: int, now: float, /) -> tuple[int, int, int]: ...
    def unit_lost(self, worker: int, now: float, /) -> tuple[int, int, int]: ...
    def remaining(self) -> float | None: ...
    @property
    def idle_workers(self) -> list[int]: ...
    @property
    def finished(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...

# --- batches ------------------------------------------------------------------

class Tensor:
    """A piece of memory with a shape and an element type, for DLPack and the buffer protocol.

    Row-major, on 256 bytes, writable unless `readonly`. The buffer protocol gives bfloat16 as
    uint16.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def readonly(self) -> bool: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Loader:
    """An iterator of batches of shuffled rows, gathered in C and used for many passes.

    ``parts`` has a pair (reader, rows) per shard of the view; ``plan`` is made by
    ``cerebro.transforms.compile``. Batches are dicts of tensors of the framework.
    """

    def __new__(
        cls,
        parts: Sequence[tuple[ShardReader, tuple[int, int] | NDArray[np.uint32]]],
        plan: Sequence[dict[str, Any]],
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        framework: str = "torch",
        threads: int = 0,
        first_rows: Sequence[int] = (),
    ) -> Loader: ...
    def begin(self, shards: Iterable[int], epoch: int, start: int = 0) -> None: ...
    def close(self) -> None: ...
    def __iter__(self) -> Loader: ...
    def __next__(self) -> dict[str, Any]: ...
    def __len__(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def buffers(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def framework(self) -> str: ...
    @property
    def last_rows(self) -> int: ...

def batch_count(rows: int, batch_size: int, drop_last: bool, /) -> int: ...

# --- states ---------------------------------------------------------------------

class StateBuffer(Buffer):
    """The bytes of a packed state, a safetensors file in memory.

    Supports the buffer protocol; read-only where it shows a slot.
    """

    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def pack_state(state: object, /) -> StateBuffer: ...
def unpack_state(
    buffer: Buffer,
    framework: Literal["torch", "numpy", "jax"] = "numpy",
    copy: bool = True,
    *,
    name: str = "the state",
) -> Any:
    """Return the nested state in a buffer.

    Tensors come back as what they were packed from (torch, NumPy, JAX); as
    `framework` where theirs cannot be imported. ``copy=False`` gives views of
    the buffer, which they keep alive; writing to those of a read-only buffer is
    an error in NumPy and a crash in torch. Raises ``CorruptDataError`` naming
    `name`.
    """

def load_into(buffer: Buffer, state: object, *, name: str = "the state") -> Any | None:
    """Copy a packed state into the live tensors of an equally structured one.

    All or nothing: returns the nested state of the buffer in which every tensor
    is the one of `state` with the same path, now holding the buffer's values;
    or None, with nothing changed, if paths, kinds, dtypes or shapes of the
    tensors differ or one cannot be written to in place. What is not a tensor
    comes from the buffer: the caller hands it on (a step count, a schedule).
    """

def hash_state(buffer: Buffer, /) -> str: ...

class Slots:
    """The two mapped slots of a trial: ``<stem>.a``, ``<stem>.b``, ``<stem>.slots``.

    A pack goes into the slot that is not the newest and is committed by one
    atomic store, so a process killed at any moment leaves a whole state. Works
    across processes; one at a time packs. Attempts must grow over a trial's
    life. Not for two threads at once (StateError).
    """

    def __new__(cls, stem: _Path, create: bool) -> Slots: ...
    def fence(self, attempt: int, /) -> None: ...
    def pack(self, state: object, *, attempt: int, position: int) -> int: ...
    def put(self, buffer: Buffer, *, attempt: int, position: int) -> int: ...
    def revert(self, *, attempt: int, position: int) -> None: ...
    def committed(self) -> tuple[int, int, int] | None: ...
    def view(self, position: int | None = None) -> StateBuffer: ...
    def hash(self) -> str: ...
    def seal(self) -> str: ...
    def sealed(self) -> tuple[int, int, StateBuffer] | None: ...
    def attempt(self) -> int: ...
    def save(self, path: _Path) -> None: ...
    def close(self) -> None: ...

# --- the epoch runner -------------------------------------------------------------

class UnitResult(
    tuple[int, int, dict[str, tuple[float, float]], float, dict[str, tuple[int, float]]]
):
    """What :func:`run_unit` did.

    `sums` is name to (sum of value x weight, weight); `not_finite` is name to
    (number, value) of the first batch that gave no finite number, if one did.
    """

    @property
    def rows(self) -> int: ...
    @property
    def batches(self) -> int: ...
    @property
    def sums(self) -> dict[str, tuple[float, float]]: ...
    @property
    def seconds(self) -> float: ...
    @property
    def not_finite(self) -> dict[str, tuple[int, float]]: ...

class _Batches(Protocol):
    @property
    def last_rows(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...

def run_unit(
    loader: _Batches,
    step: Callable[[Any], dict[str, Any] | None],
    *,
    beat: BeatPage | None = None,
    sums: dict[str, tuple[float, float]] | None = None,
) -> UnitResult:
    """Give every batch of `loader` to ``step(batch)`` and sum the metrics.

    A metric is a number, a tensor of one number, or ``(mean, weight)``; the
    weight is the batch's rows otherwise. Sums are float64, in batch order, and
    go on from `sums`. Raises ``UnitCancelled`` when the page's flag is up,
    TypeError naming a metric that is no number, and what `step` raises.
    """

class FolderWatch:
    """A descriptor that becomes readable when a file arrives in a folder.

    Files renamed into the folder count, and those written there and closed. What
    another host does on a network file system is not seen.
    """

    def __new__(cls, path: _Path) -> FolderWatch: ...
    def fileno(self) -> int: ...
    def drain(self) -> bool:
        """Take note of all that has arrived, without waiting; whether there was anything."""

    def close(self) -> None: ...

class BeatPage:
    """A page shared between a worker and its coordinator.

    Makes one without `fd`; otherwise opens the page of an inherited descriptor,
    which stays the caller's to close. A C thread beats between start_beating
    and stop (or the interpreter's end); run_unit counts batches and rows. Given
    the socket to the coordinator, the thread also kills this process and its
    group when the other end or the parent process is gone.
    """

    def __new__(cls, fd: int | None = None) -> BeatPage: ...
    @property
    def fd(self) -> int: ...
    @property
    def beats(self) -> int: ...
    @property
    def batches(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def cancelled(self) -> bool: ...
    @property
    def task_seconds(self) -> float | None:
        """Seconds since begin_task, negative in its grace; None between tasks."""

    def begin_task(self, grace: float = 0.0) -> None: ...
    def end_task(self) -> None: ...
    def start_beating(self, interval_ms: int, /, coordinator: int | None = None) -> None: ...
    def stop(self) -> None: ...
    def cancel(self) -> None: ...
    def clear(self) -> None: ...

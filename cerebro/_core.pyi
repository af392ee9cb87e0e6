"""The interface of the C module ``cerebro._core``; more in its docstrings.

Private: everything here may change. Arrays at the interface are NumPy's, and dtypes have the names
of ``csrc/core/dtype.h`` ("float32", "bfloat16", ...).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    n: int, seed: int, use: Literal["rows", "write", "split", "groups"], a: int = 0, b: int = 0
) -> NDArray[np.uint32]: ...
def random_doubles(
    n: int, seed: int, use: Literal["space", "eval", "search"], a: int = 0, b: int = 0
) -> list[float]: ...
def xxh3_64(buffer: Buffer | _Array, /) -> str: ...
def xxh3_128(buffer: Buffer | _Array, /) -> str: ...

# --- shards and files ---------------------------------------------------------

class ShardReader:
    """One shard, mapped read-only and checked against its manifest.

    Checks sizes, ``.npy`` headers and ragged offsets; :meth:`hashes` checks the bytes. Raises
    ``OSError`` or ``CorruptDataError`` naming the file.
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
    """Streams rows into one new ``.npy`` file and hashes them on the way.

    A writer that fails, is aborted or is garbage-collected deletes its file, but not in a forked
    child.
    """

    def __new__(cls, path: _Path, dtype: str, row_shape: Sequence[int], rows: int) -> NpyWriter: ...
    def write(self, array: ArrayLike, /) -> None: ...
    def close(self) -> tuple[int, str]: ...
    def abort(self) -> None: ...

# --- the scheduler --------------------------------------------------------------

class Schedule:
    """Decides which trial trains next, on which shard and worker.

    It receives events and returns commands; callers pass the time (seconds). ``shards`` is their
    number or a weight for each, e.g. its rows; ``eval_cost`` is the weight of the validation unit
    (0: none). Invalid arguments raise ``ValueError``.
    """

    def __new__(
        cls,
        *,
        shards: int | Sequence[float],
        exclusive: bool = False,
        stagger: bool = True,
        in_order: bool = False,
        eval_cost: float = 0.0,
        live_models: int = 8,
        capacity: int = 1024,
    ) -> Schedule: ...
    def add_worker(self, now: float, /) -> int: ...
    def remove_worker(self, worker: int, now: float, /) -> None: ...
    def set_holders(self, shard: int, workers: Sequence[int]) -> None: ...
    def live(self, worker: int, /) -> list[int]: ...
    def forget_live(self, worker: int, trial: int) -> None: ...
    def add_trial(
        self, trial: int, *, epochs: int, epoch: int = 0, step: int = 0, stream: int = ...
    ) -> None: ...
    def extend_trial(self, trial: int, epochs: int) -> None: ...
    def drop_trial(self, trial: int, /) -> None: ...
    def forget_trial(self, trial: int, /) -> None: ...
    def hold_trial(self, trial: int, /) -> None: ...
    def release_trial(self, trial: int, /) -> None: ...
    def rewind_trial(self, trial: int, *, epoch: int, step: int) -> None: ...
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
    def unit_continued(self, worker: int, now: float, /) -> tuple[int, int, int]: ...
    def next_here(self, worker: int, /) -> tuple[int, int, int] | None: ...
    def unit_failed(self, worker: int, now: float, /) -> tuple[int, int, int]: ...
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

    Row-major, aligned to 256 bytes, writable unless `readonly`. The buffer protocol exposes
    bfloat16 as uint16 and works only for host memory.
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

class Orders:
    """The orders of rows that loaders share: each is made once, and the last few stay."""

    def __new__(cls) -> Orders: ...

class Loader:
    """An iterator of batches of shuffled rows, gathered in C and reused for many passes.

    ``parts`` has a pair (reader, rows) per shard of the view, or also the running sums of the rows'
    weights, by which they are then drawn, from each shard or, with ``draw_across``, from all, whose
    sums are slices of one array. Arrays are copied unless their memory is that of ``bytes``;
    ``plan`` comes from ``cerebro.transforms.compile``. A pass has mixes: shards whose rows are
    shuffled together. Batches are dicts of the framework's tensors.
    """

    def __new__(
        cls,
        parts: Sequence[
            tuple[ShardReader, tuple[int, int] | NDArray[np.uint32]]
            | tuple[
                ShardReader, tuple[int, int] | NDArray[np.uint32], NDArray[np.uint64] | None, int
            ]
        ],
        plan: Sequence[dict[str, Any]],
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        framework: str = "torch",
        threads: int = 0,
        first_rows: Sequence[int] = (),
        depot: Depot | None = None,
        residence: str = "auto",
        orders: Orders | None = None,
        draw_across: bool = False,
    ) -> Loader: ...
    def begin(
        self,
        mixes: Iterable[Iterable[int]],
        epoch: int,
        start: int = 0,
        count: int | None = None,
    ) -> None: ...
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
    @property
    def depot(self) -> Depot | None: ...
    @property
    def resident_shards(self) -> int: ...
    @property
    def note(self) -> str: ...

class Depot:
    """The resident shards of a device, and its memory for batches.

    All loaders of a device share one. Shards that no pass uses are freed, least recently used
    first, when memory is short or more than `limit` bytes would be resident (default: half of the
    device's).
    """

    limit: int
    def __new__(cls, device: Device, *, limit: int | None = None) -> Depot: ...
    @property
    def device(self) -> Device: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def stream(self) -> int:
        """The stream on which kernels make batches if the consumer's stream is not known."""
    def has(self, reader: ShardReader, column: str, /) -> bool: ...
    def bring(self, reader: ShardReader, column: str, /) -> None: ...
    def drop(self, reader: ShardReader | None = None, /) -> int: ...

def batch_count(rows: int, batch_size: int, drop_last: bool, /) -> int: ...
def batch_start(rows: int, batch_size: int, drop_last: bool, batch: int, /) -> int: ...

# --- states ---------------------------------------------------------------------

class StateBuffer(Buffer):
    """The bytes of a packed state: a safetensors file in memory.

    Supports the buffer protocol; read-only if it shows a slot.
    """

    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def pack_state(state: object, /) -> StateBuffer: ...
def unpack_state(
    buffer: Buffer,
    framework: Literal["torch", "numpy", "jax"] = "numpy",
    copy: bool | None = True,
    *,
    name: str = "the state",
    only: str | None = None,
) -> Any:
    """Return the nested state in a buffer.

    Tensors have the type that was packed (torch, NumPy, JAX), or that of `framework` if theirs
    cannot be imported. ``copy=False`` returns views of the buffer, which they keep alive. Torch has
    no read-only tensors: views of a read-only buffer raise ``BufferError``; with ``copy=None`` the
    caller promises not to write to them. With `only`, a key of the state's dict, only the value
    under it is unpacked and returned. Raises ``CorruptDataError`` naming `name`.
    """

def load_into(buffer: Buffer, state: object, *, name: str = "the state") -> Any | None:
    """Copy a packed state into the live tensors of an equally structured one.

    All or nothing: returns the nested state of the buffer, in which every tensor is the one of
    `state` with the same path, now holding the buffer's values; or None, with nothing changed, if
    paths, kinds, dtypes or shapes of the tensors differ or one cannot be written to in place. Other
    values come from the buffer: the caller applies them (a step count, a schedule).
    """

def hash_state(buffer: Buffer, /) -> str: ...

class Slots:
    """The two mapped slots of a trial: ``<stem>.a``, ``<stem>.b``, ``<stem>.slots``.

    A pack goes into the slot that is not the newest. Its commit is one atomic store, so a process
    killed at any moment leaves a complete state. Works across processes, one of which packs at a
    time. Attempts must increase over a trial's life. Not safe for two threads at once (StateError).
    """

    def __new__(cls, stem: _Path, create: bool) -> Slots: ...
    def fence(self, attempt: int, /) -> None: ...
    def pack(self, state: object, *, attempt: int) -> int: ...
    def put(self, buffer: Buffer, *, attempt: int) -> int: ...
    def commit(self, position: int, /) -> str: ...
    def revert(self, *, attempt: int, position: int) -> None: ...
    def committed(self) -> tuple[int, int, int] | None: ...
    def view(self, position: int | None = None) -> StateBuffer: ...
    def hash(self) -> str: ...
    def sealed(self) -> tuple[int, int, StateBuffer] | None: ...
    def attempt(self) -> int: ...
    def save(self, path: _Path) -> None: ...
    def close(self) -> None: ...

def check_slots(stem: _Path, /) -> tuple[str, str, bool] | None:
    """Compare a trial's slots with their records and seals; change nothing.

    Returns None, or the damaged file's suffix, the damage, and whether the slots changed while they
    were read, so that they may not be damaged.
    """

# --- the epoch runner -------------------------------------------------------------

class UnitResult(
    tuple[int, int, dict[str, tuple[float, float]], float, dict[str, tuple[int, float]]]
):
    """The result of :func:`run_unit`.

    `sums` is name to (sum of value x weight, weight); `not_finite` is name to (number, value) of
    the first batch whose value was not finite, if any.
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
    replays: list[Replay] | list[GraphReplay] | None = None,
    keep: Callable[[RunMetrics], object] | None = None,
) -> UnitResult:
    """Call ``step(batch)`` for every batch of `loader` and sum the metrics.

    A metric is a number, a tensor of one number, or ``(mean, weight)``; the default weight is the
    batch's rows, and a mean of weight 0 does not count. Sums are float64, in batch order, and
    continue from `sums`. Where one of `replays`, to which `step` may add, fits a batch of a
    `Loader` in main memory, it takes the step instead. Raises ``UnitCancelled`` if the page's flag
    is set, TypeError naming a metric that is not a number, and any error of `step`.

    GraphReplays in `replays` take batches of a loader on their device, as many as fit in
    succession. Their numbers are read at the end of such a run, as a `RunMetrics`. It is summed, or
    given to `keep` and left out of the result; a later call sums it if its step returns it.
    """

class MatMul:
    """A product of two float32 matrices, ``c = op(a) op(b) + bias``; called, it computes `c`.

    Matrices are stored by columns, each as ``(address, elements from one column to the next)``, in
    memory that must outlive this object.

    Parameters
    ----------
    sgemm
        The address of BLAS' function SGEMM, with 32-bit integers.
    transposed
        Whether `a` and `b` are.
    sizes
        ``(m, n, k)``: `c` is m x n, ``op(a)`` m x k and ``op(b)`` k x n.
    bias
        The address of a number for each row of `c`; 0: none.
    bias_of_columns
        Whether `bias` has a number for each column instead.

    Raises
    ------
    ValueError
        If a matrix is missing or empty, or if its columns overlap.
    """

    def __init__(
        self,
        sgemm: int,
        transposed: tuple[bool, bool],
        sizes: tuple[int, int, int],
        a: tuple[int, int],
        b: tuple[int, int],
        c: tuple[int, int],
        bias: int,
        bias_of_columns: bool,
    ) -> None: ...
    def __call__(self) -> None: ...

class Reduction:
    """A sum of float32 numbers in PyTorch's order on one thread; called, it computes it.

    Tensors are addresses of memory that must outlive this object.

    Parameters
    ----------
    kind
        ``"sum_columns"``, ``"nll_loss"`` or ``"nll_gradient"``.
    sizes
        ``(rows, columns)`` of a matrix that is stored by rows.
    addresses
        Of the columns' sums: ``(matrix, 0, sums)``. Of the loss: ``(log likelihoods, count of
        rows, loss)``. Of its gradient: ``(gradient of the loss, count of rows, gradient)``.
    block
        The number of columns that PyTorch adds up at once.
    target
        ``(address of a class for each row, class that does not count, whether to average)``.

    Raises
    ------
    ValueError
        If the matrix is empty or an address is missing.
    IndexError
        When called: if a target is not a class.
    """

    def __init__(
        self,
        kind: str,
        sizes: tuple[int, int],
        addresses: tuple[int, int, int],
        block: int = ...,
        target: tuple[int, int, bool] = ...,
    ) -> None: ...
    def __call__(self) -> None: ...

class Elementwise:
    """Operators on float32 tensors, with PyTorch's rounding; called, it runs them.

    Tensors are addresses of memory that must outlive this object.

    Parameters
    ----------
    calls
        ``(name, elements, result, first, second, third operand, number, value)``: 0 for an operand
        that it has not; `number` is an index in `numbers` or -1, `value` a tensor of one number.
    numbers
        A writable array of float64, read whenever the calls run.
    fused
        Whether a multiplication and the addition after it round once.
    sqrt
        The address of ``vmsSqrt``; 0: the correctly rounded root.
    """

    def __new__(
        cls,
        calls: Iterable[tuple[str, int, int, int, int, int, int, int]],
        numbers: Any,
        fused: bool,
        sqrt: int,
    ) -> Elementwise: ...
    def __call__(self) -> None: ...

class Regions:
    """Pieces of memory that are saved, restored and compared at once.

    A buffer has the bytes of all regions, one after the other.

    Parameters
    ----------
    regions
        ``(address, bytes)`` of memory that must outlive this object.
    """

    def __new__(cls, regions: Iterable[tuple[int, int]]) -> Regions: ...
    @property
    def nbytes(self) -> int: ...
    def save(self, buffer: Buffer | _Array, /) -> None: ...
    def restore(self, buffer: Buffer | _Array, /) -> None: ...
    def differing(
        self, buffer: Buffer | _Array, other: Buffer | _Array | None = None, /
    ) -> int | None:
        """Return the index of the first region whose bytes differ between a buffer and the memory.

        With `other`, two buffers are compared. None if all bytes are equal.
        """

def has_entries(
    names: Mapping[Any, Any], keys: tuple[Any, ...], values: tuple[Any, ...], /
) -> bool:
    """Return whether ``names[key]`` is the value for each key; False if a key is missing."""

def optimizer_step(groups: tuple[tuple[tuple[Any, ...], list[int]], ...], /) -> bool:
    """Make a step of Adam, AdamW or SGD over float32 tensors in host memory.

    A group is (settings, tensors). The settings are ``(is SGD, lr, weight_decay, beta1, beta2, eps,
    momentum, dampening, (decoupled, nesterov, fused), address of vmsSqrt or 0)``. The tensors are a
    flat list: for each one the number of its elements and the addresses of parameter, gradient,
    first moment or momentum, second moment and count of steps, or 0. All must be dense.

    Returns False, and changes nothing, if a tensor holds NaN or overlaps another one.
    """

class Replay:
    """A recorded step that :func:`run_unit` takes without Python code.

    Tensors are addresses of memory that must outlive this object.

    Parameters
    ----------
    inputs
        ``(address, dtype, shape, strides)``, in the order of a batch's columns.
    calls
        ``(callable, arguments, keywords or None)``, called in turn within ``context()``.
    numbers
        ``(formula, lr, beta, steps taken, target, dtype of the target)``: the optimizer's numbers
        that change with every step.
    metrics
        ``(name, value, weight or None)``; a value is a number or ``(address, dtype)``.

    Attributes
    ----------
    runs
        The number of steps taken.
    most
        The number of runs from which on :func:`run_unit` calls ``step`` instead.
    failed
        Whether a step has raised an exception.
    """

    runs: int
    most: int
    failed: bool
    def __new__(
        cls,
        inputs: Iterable[tuple[int, str, tuple[int, ...], tuple[int, ...]]],
        calls: Iterable[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any] | None]],
        numbers: Iterable[tuple[str, float, float, int, int, str]],
        metrics: Iterable[tuple[str, Any, Any]],
        context: Callable[[], Any],
    ) -> Replay: ...

class GraphReplay:
    """A step in a CUDA graph, which :func:`run_unit` takes without Python code.

    Tensors are addresses of device memory that must outlive this object. Those in one list differ
    only in their graphs, inputs and outputs; each is for batches of one size. If others differ from
    the first in rates, `prepare`, `context` or the names and kinds of metrics, they are not used.

    Parameters
    ----------
    device
        The device of the batches.
    launch
        The handle of a ``cudaGraphExec_t``, or a callable that launches the graph on the unit's
        stream. An exception of it ends the unit.
    inputs, metrics
        As for :class:`Replay`; one input has at least one dimension, the rows.
    rates
        Addresses of float32 numbers.
    prepare
        ``prepare(n)`` is called before `n` launches in succession. It returns n x len(rates)
        float32 values as a C-contiguous buffer (the rates before each launch), None if the rates
        stay as they are, or a number m < n if only m batches can be taken now; then it is asked
        again for m, unless that is 0.
    context
        Makes the context manager in which a run's launches are.

    Attributes
    ----------
    runs
        The number of launches.
    """

    runs: int
    def __new__(
        cls,
        device: Device,
        launch: int | Callable[[], object],
        inputs: Iterable[tuple[int, str, tuple[int, ...], tuple[int, ...]]],
        metrics: Iterable[tuple[str, Any, Any]],
        rates: Iterable[int],
        prepare: Callable[[int], Any] | None,
        context: Callable[[], Any],
    ) -> GraphReplay: ...

class RunMetrics:
    """The metrics of batches that :func:`run_unit` took by graphs, in order."""

    @property
    def batches(self) -> int: ...
    @property
    def names(self) -> tuple[str, ...]: ...

def step_number(formula: str, lr: float, beta: float, t: float, /) -> float:
    """Return a number as a :class:`Replay` computes it for step `t`."""

def draw_bernoulli(
    get_state: Callable[[], Any], set_state: Callable[[Any], Any], address: int, n: int, p: float, /
) -> None:
    """Set each of `n` float32 numbers to 1 with probability `p`, else to 0.

    The bits are those of ``Tensor.bernoulli_(p)`` with the generator whose methods are `get_state`
    and `set_state`. Raises ``ValueError`` if it is not PyTorch's generator of the CPU, or if `p` is
    not a probability.
    """

class NativeNet:
    """A small convolutional network in C; all its parts are initially zeros.

    Arrays are dense, images float32 (rows, channels, height, width), labels int64 (rows,). Raises
    ``ValueError`` for others, and for use by two threads at once. On a GPU, with cuDNN, the parts
    in host memory are a copy, which `push` sends to the GPU and `pull` brings back.
    """

    def __new__(
        cls,
        channels: int,
        height: int,
        width: int,
        filters1: int,
        filters2: int,
        classes: int,
        device: Device | None = None,
        cudnn: str | None = None,
    ) -> NativeNet: ...
    def push(self) -> None: ...
    def pull(self) -> None: ...
    def differentiate(self, images: _Array, labels: _Array, /) -> tuple[float, float]: ...
    def evaluate(self, images: _Array, labels: _Array, /) -> tuple[float, float]: ...
    def step(self, rate: float, momentum: float, /) -> None: ...
    def predict(self, images: _Array, /) -> NDArray[np.float32]: ...
    def parts(self, kind: Literal["values", "momenta", "gradients"], /) -> dict[str, Tensor]: ...

class BeatPage:
    """A page shared between a worker and its coordinator.

    Without `fd`, makes a page; otherwise opens the page of an inherited descriptor, which remains
    the caller's to close. A C thread beats from start_beating until stop (or the interpreter's
    end); run_unit counts batches and rows. Given the socket to the coordinator, the thread also
    kills this process and its group when the other end or the parent process is gone.
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
    def heard(self) -> int: ...
    @property
    def task_seconds(self) -> float | None:
        """Seconds since begin_task, negative in its grace; None between tasks."""

    def begin_task(self, grace: float = 0.0) -> None: ...
    def postpone_task(self, seconds: float, /) -> None: ...
    def end_task(self) -> None: ...
    def start_beating(self, interval_ms: int, /, coordinator: int | None = None) -> None: ...
    def stop(self) -> None: ...
    def cancel(self) -> None: ...
    def clear(self) -> None: ...
    def hear(self, answer: int, /) -> None: ...

# --- devices ------------------------------------------------------------------

def cuda_open(
    folders: Sequence[_Path], *, prefer: int = 0, path: _Path | None = None
) -> dict[str, Any]: ...
def cuda_devices() -> list[dict[str, Any]]: ...
def cudnn_find(folders: Sequence[_Path], /) -> dict[str, Any] | None: ...

class Device:
    """Host memory (``"cpu"``) or a GPU (``"cuda:0"``), after :func:`cuda_open`."""

    def __new__(cls, name: str) -> Device: ...
    @property
    def name(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def unpinned(self) -> str | None:
        """Why memory could not be pinned, the first time; None: it always could."""
    def memory(self) -> tuple[int, int]: ...
    def held(self) -> dict[str, int]: ...
    def set_allocator(
        self, allocate: Callable[[int, int], int], release: Callable[[int], None], /
    ) -> None: ...
    def check(self) -> None: ...
    def synchronize(self) -> None: ...

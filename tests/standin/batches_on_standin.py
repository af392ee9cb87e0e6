"""Batches on a fake GPU; tests/core/test_device_batches.py runs this in a separate process.

The CUDA runtime is the stand-in of this folder: device memory can be inspected, work is done as
late as CUDA allows, and forbidden calls are counted.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_chains import chains
from dlpack_structs import describe

import cerebro._core as _core
import cerebro.data
from cerebro.data import depots
from cerebro.data.batches import make_loader
from cerebro.errors import DeviceError, InputError
from cerebro.machine import cuda
from cerebro.worker.models import make_batches

ROWS = 203
PORTABLE, TO_HOST = 1, 2

DTYPES = [
    *["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"],
    *["float16", "float32", "float64"],
]

CHAINS = chains(moved=(5, 4), last=3, trained=(6, 5))

runtime = ctypes.CDLL(os.environ[cuda.OVERRIDE])
runtime.standin_left.restype = ctypes.c_size_t
runtime.standin_fault.restype = ctypes.c_char_p
runtime.standin_log_line.restype = ctypes.c_char_p
runtime.standin_fail.argtypes = (ctypes.c_char_p, ctypes.c_uint, ctypes.c_int)
for name in (
    "standin_capture",
    "standin_gate",
    "cudaStreamDestroy",
    "cudaStreamSynchronize",
    "cudaFreeHost",
):
    getattr(runtime, name).argtypes = (ctypes.c_void_p,)
runtime.cudaStreamSynchronize.argtypes = (ctypes.c_void_p,)
runtime.cudaEventDestroy.argtypes = (ctypes.c_void_p,)
runtime.cudaEventRecord.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
runtime.cudaStreamWaitEvent.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
runtime.cudaHostAlloc.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
runtime.cudaMemcpyAsync.argtypes = (
    *(ctypes.c_void_p, ctypes.c_void_p),
    *(ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p),
)


def checked(code: int) -> None:
    assert code == 0


class Consumer:
    """A framework that reads tensors on a private stream, and releases them before reading.

    Its "kernel" is a copy to pinned memory, on the stream that it names in the handshake.
    """

    def __init__(self) -> None:
        self._stream = ctypes.c_void_p()
        checked(runtime.cudaStreamCreateWithFlags(ctypes.byref(self._stream), 1))
        self._read: list[tuple[ctypes.c_void_p, int]] = []

    @property
    def stream(self) -> int:
        assert self._stream.value is not None
        return self._stream.value

    def ask(self, tensor: _core.Tensor) -> object:
        return tensor.__dlpack__(stream=self.stream, max_version=(1, 0))

    def take(self, tensor: _core.Tensor) -> None:
        assert tensor.__dlpack_device__() == (2, 0)
        capsule = self.ask(tensor)
        _, view = describe(capsule)
        assert (view.device_type, view.device_id, view.byte_offset) == (2, 0, 0)
        assert tuple(view.shape[: view.ndim]) == tensor.shape
        memory = ctypes.c_void_p()
        checked(runtime.cudaHostAlloc(ctypes.byref(memory), max(tensor.nbytes, 1), PORTABLE))
        if tensor.nbytes:
            checked(
                runtime.cudaMemcpyAsync(memory, view.data, tensor.nbytes, TO_HOST, self._stream)
            )
        self._read.append((memory, tensor.nbytes))

    def finish(self) -> list[bytes]:
        checked(runtime.cudaStreamSynchronize(self._stream))
        values = [ctypes.string_at(memory.value or 0, size) for memory, size in self._read]
        for memory, _ in self._read:
            checked(runtime.cudaFreeHost(memory))
        self._read = []
        return values

    def close(self) -> None:
        checked(runtime.cudaStreamDestroy(self._stream))


class Elsewhere(Consumer):
    """Like JAX: it names a stream to wait for a tensor, and computes on a different one."""

    def __init__(self) -> None:
        super().__init__()
        self._named, self._event = ctypes.c_void_p(), ctypes.c_void_p()
        checked(runtime.cudaStreamCreateWithFlags(ctypes.byref(self._named), 1))
        checked(runtime.cudaEventCreateWithFlags(ctypes.byref(self._event), 2))

    def ask(self, tensor: _core.Tensor) -> object:
        capsule = tensor.__dlpack__(stream=self._named.value)
        checked(runtime.cudaEventRecord(self._event, self._named))
        checked(runtime.cudaStreamWaitEvent(self._stream, self._event, 0))
        return capsule

    def close(self) -> None:
        super().close()
        checked(runtime.cudaStreamDestroy(self._named))
        checked(runtime.cudaEventDestroy(self._event))


@pytest.fixture(params=[Consumer])
def consumer(request: pytest.FixtureRequest) -> Iterator[Consumer]:
    made: Consumer = request.param()
    yield made
    gc.collect()
    depots.depot("cuda:0").device.synchronize()
    # Its stream must outlive the tensors used on it, so these are freed first.
    depots.depot.cache_clear()
    gc.collect()
    made.close()


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    """Check that nothing forbidden by CUDA was done, and that everything is freed."""
    runtime.standin_reset()
    assert depots.find_problem("cuda:0") == ""
    yield
    depots.depot.cache_clear()
    gc.collect()
    assert runtime.standin_faults() == 0, runtime.standin_fault()
    for kind in (b"device", b"pinned", b"stream", b"event"):
        assert runtime.standin_left(kind) == 0, kind


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> cerebro.data.Dataset:
    random = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "x": random.integers(0, 256, (ROWS, 6, 5, 3), np.uint8),
        "y": np.arange(ROWS),
        "v": random.normal(size=(ROWS, 7)).astype(np.float32),
        "t": [list(range(i % 8)) for i in range(ROWS)],
        "none": np.zeros((ROWS, 0, 2), np.float32),
    }
    for dtype in DTYPES:
        values = random.integers(0, 2 if dtype == "bool" else 100, (ROWS, 3))
        columns[f"of_{dtype}"] = values.astype(dtype)
    return cerebro.data.shard(columns, tmp_path_factory.mktemp("data") / "d", shards=4)


def on_host(data: Any, size: int = 16, **options: Any) -> list[bytes]:
    """The bytes of every tensor of a pass, from the CPU's loader."""
    return [
        bytes(memoryview(tensor).cast("B")) if tensor.nbytes else b""
        for batch in data.batches(size, seed=5, framework="dlpack", **options)
        for tensor in batch.values()
    ]


def loader(data: Any, size: int = 16, **options: Any) -> _core.Loader:
    options = {"seed": 5, "framework": "dlpack", "device": "cuda", **options}
    made: _core.Loader = make_loader(data, size, **options)
    return made


# --- bits --------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("residence", ["auto", "streamed"])
@pytest.mark.parametrize("chain", CHAINS)
def test_batches_have_the_bits_of_the_cpu(
    data: Any, consumer: Consumer, chain: str, residence: str, threads: int
) -> None:
    view = data.with_transforms(CHAINS[chain])
    batches = view.batches(
        16, seed=5, framework="dlpack", device="cuda", residence=residence, threads=threads
    )
    assert "device='cuda:0'" in repr(batches)
    for epoch in range(2):
        for batch in batches:
            for tensor in batch.values():
                consumer.take(tensor)
            del batch, tensor
        assert consumer.finish() == on_host(view, epoch=epoch)


@pytest.mark.parametrize("residence", ["auto", "streamed"])
@pytest.mark.parametrize("chain", ["images", "moves"])
def test_channels_last_are_the_same_values(
    data: Any, consumer: Consumer, chain: str, residence: str
) -> None:
    view = data.with_transforms(CHAINS[chain])
    made = loader(view, residence=residence, channels_last=True)
    made.begin([range(4)], 0)
    shapes = []
    for batch in made:
        shapes.append(batch["x"].shape)
        consumer.take(batch["x"])
        del batch
    there = make_loader(view, 16, seed=5, framework="dlpack")
    there.begin([range(4)], 0)
    expected = [np.from_dlpack(batch["x"]).copy() for batch in there]
    assert shapes == [array.shape for array in expected]
    assert consumer.finish() == [np.moveaxis(array, 1, 3).tobytes() for array in expected]


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("residence", ["auto", "streamed"])
def test_without_pinned_memory_the_bits_are_the_same(
    data: Any, residence: str, threads: int, caplog: pytest.LogCaptureFixture
) -> None:
    cuda._unpinned.clear()
    runtime.standin_fail(b"cudaHostAlloc", 0, 2)
    view = data.with_transforms(CHAINS["images"])
    batches = view.batches(
        16, seed=5, framework="dlpack", device="cuda", residence=residence, threads=threads
    )
    for epoch in range(2):
        kept = [
            (tensor.nbytes, tensor.__dlpack__(stream=None))
            for batch in batches
            for tensor in batch.values()
        ]
        assert runtime.standin_left(b"pinned") == 0
        depots.depot("cuda:0").device.synchronize()
        found = [ctypes.string_at(describe(x)[1].data or 0, n) if n else b"" for n, x in kept]
        assert found == on_host(view, epoch=epoch)
        del kept
    assert caplog.text.count("no pinned host memory (cuda:0: cudaHostAlloc: cudaError") == 1


@pytest.mark.parametrize("residence", ["auto", "streamed"])
@pytest.mark.parametrize("consumer", [Elsewhere], indirect=True)
def test_a_consumer_on_another_stream_gets_correct_batches(
    data: Any, consumer: Consumer, residence: str
) -> None:
    batches = data.batches(16, seed=5, framework="dlpack", device="cuda", residence=residence)
    for batch in batches:
        for tensor in batch.values():
            consumer.take(tensor)
        del batch, tensor
    assert consumer.finish() == on_host(data)


@pytest.mark.parametrize("residence", ["auto", "streamed"])
def test_models_on_separate_streams_get_correct_batches_in_turn(data: Any, residence: str) -> None:
    models = [Consumer() for _ in range(3)]
    view = data.with_transforms(CHAINS["images"])
    made = [loader(view, residence=residence) for _ in models]  # of one depot: shards, memory
    shared = loader(view, residence=residence)
    found: list[list[bytes]] = [[] for _ in models]
    for unit in range(6):  # one loader for all, as in a worker with live models of one batch size
        shared.begin([[unit % 4]], unit)
        for batch in shared:
            for tensor in batch.values():
                models[unit % 3].take(tensor)
            del batch, tensor
    for each in made:
        each.begin([[0, 3], [1], [2]], 0)
    passes = [iter(each) for each in made]
    while passes:  # a batch for each, in turn
        for consumer, batches in zip(models, list(passes), strict=True):
            batch = next(batches, None)
            if batch is None:
                passes.clear()
                break
            for tensor in batch.values():
                consumer.take(tensor)
            del batch, tensor
    for number, consumer in enumerate(reversed(models)):  # the host waits in another order
        found[2 - number] = consumer.finish()
    for number, values in enumerate(found):
        units = [
            value
            for unit in (number, number + 3)
            for value in on_host(view, shard=unit % 4, epoch=unit)
        ]
        assert values == units + whole_pass(view)
    del made, shared, passes, batches, each
    gc.collect()
    depots.depot("cuda:0").device.synchronize()
    depots.depot.cache_clear()
    gc.collect()
    for consumer in models:
        consumer.close()


def whole_pass(view: Any) -> list[bytes]:
    """The bytes of a pass over all shards, two of them mixed, from the CPU's loader."""
    there = make_loader(view, 16, seed=5, framework="dlpack")
    there.begin([[0, 3], [1], [2]], 0)
    return [
        bytes(memoryview(tensor).cast("B")) if tensor.nbytes else b""
        for batch in there
        for tensor in batch.values()
    ]


@pytest.mark.parametrize(
    "options",
    [{"drop_last": True}, {"shuffle": False}, {"start": 5}, {"shard": 2}, {"epoch": 3}],
)
def test_options_of_a_pass_match_the_host(
    data: Any, consumer: Consumer, options: dict[str, Any]
) -> None:
    view = data.select(np.arange(ROWS - 1, 0, -2))
    for batch in view.batches(8, seed=5, framework="dlpack", device="cuda:0", **options):
        for tensor in batch.values():
            consumer.take(tensor)
    assert consumer.finish() == on_host(view, 8, **options)


# --- the handshake -----------------------------------------------------------------


def first_tensor(data: Any, **options: Any) -> tuple[_core.Loader, _core.Tensor, bytes]:
    made = loader(data.with_transforms(CHAINS["images"]), **options)
    made.begin([[0]], 0)
    want = on_host(data.with_transforms(CHAINS["images"]), shard=0, epoch=0)
    return made, next(made)["x"], want[0]


def test_dlpack_export_accepts_every_kind_of_stream(data: Any, consumer: Consumer) -> None:
    made, x, want = first_tensor(data)
    for stream in (None, 1, 2, -1, consumer.stream):
        for version in (None, (1, 0)):
            assert x.__dlpack__(stream=stream, max_version=version) is not None
        copied = x.__dlpack__(stream=stream, copy=True)
        depots.depot("cuda:0").device.synchronize()
        _, view = describe(copied)
        assert view.device_type == 2
        assert ctypes.string_at(view.data or 0, x.nbytes) == want
        del copied, view
    for wrong in (0, -2, 2**70, -(2**70)):
        with pytest.raises(BufferError, match="stream must be None, -1"):
            x.__dlpack__(stream=wrong)
    for wrong in ("1", 1.0, True):
        with pytest.raises(TypeError, match="stream must be an int or None"):
            x.__dlpack__(stream=wrong)
    made.close()


def test_dlpack_export_refuses_devices_other_than_its_own_and_the_host(data: Any) -> None:
    made, x, want = first_tensor(data)
    assert repr(x) == "Tensor(shape=(17, 3, 6, 5), dtype='float32', device='cuda:0')"
    assert x.__dlpack__(dl_device=(2, 0)) is not None
    with pytest.raises(BufferError, match=r"on device \(2, 0\).*to device \(2, 1\)"):
        x.__dlpack__(dl_device=(2, 1))
    with pytest.raises(BufferError, match="leave out copy=False"):
        x.__dlpack__(dl_device=(1, 0), copy=False)
    with pytest.raises(BufferError, match="device's memory"):
        memoryview(x)
    host = np.from_dlpack(x, device="cpu")
    assert host.tobytes() == want and host.flags.writeable
    made.close()


def test_a_captured_stream_is_refused(data: Any, consumer: Consumer) -> None:
    made, x, _ = first_tensor(data)
    runtime.standin_capture(consumer.stream)
    with pytest.raises(DeviceError, match="being captured into a CUDA graph"):
        x.__dlpack__(stream=consumer.stream)
    runtime.standin_capture(None)
    assert x.__dlpack__(stream=consumer.stream) is not None
    made.close()


def log() -> list[str]:
    lines = range(runtime.standin_log_lines())
    return [runtime.standin_log_line(line).decode() for line in lines]


def test_the_host_never_waits_for_the_device(tmp_path: Path, consumer: Consumer) -> None:
    """Events alone give the order, and every buffer is reused after its consumer's event."""
    flat = cerebro.data.shard({"v": np.arange(400.0).reshape(100, 4)}, tmp_path / "d", shards=2)
    made = loader(flat, 10, residence="streamed")
    made.begin([[0], [1]], 0)
    for batch in made:
        consumer.take(batch["v"])
        del batch
    lines = log()
    s = next(line for line in lines if line.startswith("copy_from")).split()[1]
    reads = [i for i, line in enumerate(lines) if line.startswith(f"copy_from {s}")]
    assert len(reads) == 10
    for before, at in zip([0, *reads], reads, strict=False):  # each waits for its own copy
        assert any(line.startswith(f"wait {s} ") for line in lines[before:at])
    behind = {line.split()[2] for line in lines if line.startswith(f"record {s} ")}
    waits = [line.split()[1:] for line in lines if line.startswith("wait ")]
    assert sum(stream != s and event in behind for stream, event in waits) == 10 - made.buffers
    assert made.buffers == 4
    want = [*on_host(flat, 10, shard=0), *on_host(flat, 10, shard=1)]
    assert consumer.finish() == want
    made.close()


def on_alignment(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


@pytest.mark.parametrize("threads", [0, 2])
def test_streamed_rows_are_uploaded_as_stored_on_disk(
    tmp_path: Path, consumer: Consumer, threads: int
) -> None:
    """Images to be cropped, flipped and cast are uploaded as bytes; ragged rows are not padded."""
    pictures = np.random.default_rng(1).integers(0, 256, (40, 6, 5, 3), np.uint8)
    words = [list(range(i % 9)) for i in range(40)]
    flat = cerebro.data.shard({"x": pictures, "t": words}, tmp_path / "d", shards=1)
    view = flat.with_transforms(CHAINS["training"])
    made = loader(view, 20, residence="streamed", threads=threads)
    made.begin([[0]], 0)
    before = len(log())
    for batch in made:
        for tensor in batch.values():
            consumer.take(tensor)
        del batch, tensor
    copied = [int(line.split()[2]) for line in log()[before:] if line.startswith("copy_to")]
    host = view.batches(20, seed=5, framework="numpy")
    lengths = [int(batch["t_length"].sum()) for batch in host]
    assert copied == [
        # The rows' places, the images, the values of the rows of t, and their offsets.
        sum(map(on_alignment, (20 * 8, 20 * 6 * 5 * 3, n * 8, 21 * 8)))
        for n in lengths
    ]
    assert consumer.finish() == on_host(view, 20)
    made.close()


# --- memory ------------------------------------------------------------------------


def test_data_are_held_on_the_device_once(data: Any) -> None:
    depot = depots.depot("cuda:0")
    made = loader(data)
    made.begin([[0, 2, 3], [1]], 0)
    assert made.resident_shards == 4 and made.note == ""
    assert depot.resident_bytes == data.nbytes == depot.device.held()["shards"]
    others = [loader(data.select(np.arange(0, ROWS, 3)), size) for size in (1, 5, 32)]
    for other in others:
        other.begin([[3], [1]], 7)
        next(other)
    assert depot.resident_bytes == data.nbytes
    odd = loader(data.with_transforms(CHAINS["on the CPU"]))
    assert "column v is made on the CPU and streamed" in odd.note
    reader = data.view.loader_parts()[0][0]
    assert depot.has(reader, "x")
    assert depot.drop() == 0  # all in use
    made.close()
    del others, other
    assert depot.drop(reader) > 0 and not depot.has(reader, "x")
    depot.bring(reader, "x")
    assert depot.has(reader, "x") and not depot.has(reader, "y")
    with pytest.raises(ValueError, match="no column 'nothing'"):
        depot.has(reader, "nothing")
    depot.drop()
    assert depot.resident_bytes == 0


@pytest.mark.parametrize("mixes", [[[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]]])
def test_data_that_do_not_fit_are_streamed(
    data: Any, consumer: Consumer, mixes: list[list[int]]
) -> None:
    """A mix is resident as a whole or not at all."""
    depots.depot("cuda:0").limit = int(data.nbytes * 0.6)
    view = data.with_transforms(CHAINS["training"])
    made, there = loader(view), make_loader(view, 16, seed=5, framework="dlpack")
    made.begin(mixes, 3)
    resident = {4: 2, 2: 2, 1: 0}[len(mixes)]
    assert made.resident_shards == resident
    assert made.note.startswith(f"{resident} of 4 shards are resident, the others are streamed")
    assert "may be resident" in made.note
    for batch in made:
        for tensor in batch.values():
            consumer.take(tensor)
        del batch, tensor
    there.begin(mixes, 3)
    want = [
        bytes(memoryview(tensor).cast("B")) if tensor.nbytes else b""
        for batch in there
        for tensor in batch.values()
    ]
    assert consumer.finish() == want
    assert depots.depot("cuda:0").resident_bytes <= data.nbytes * 0.6
    made.close()


def test_streaming_for_lack_of_memory_is_logged(
    data: Any, consumer: Consumer, caplog: pytest.LogCaptureFixture
) -> None:
    depots.depot("cuda:0").limit = data.nbytes // 2
    with caplog.at_level(logging.WARNING, "cerebro.data"):
        for batch in data.batches(16, seed=5, framework="dlpack", device="cuda"):
            for tensor in batch.values():
                consumer.take(tensor)
            del batch, tensor
    assert consumer.finish() == on_host(data)
    assert "the others are streamed" in caplog.text and "may be resident" in caplog.text


def test_a_loader_recovers_from_out_of_device_memory(data: Any) -> None:
    """The error says what is held, and the next pass works when memory is available again."""
    made = loader(data, residence="resident")
    made.begin([[0], [1], [2], [3]], 0)
    depot = depots.depot("cuda:0")
    held = sum(depot.device.held().values())
    runtime.standin_memory(ctypes.c_size_t(held + (32 << 10)))
    kept = []
    with pytest.raises(MemoryError, match=r"shards.*MB") as caught:
        while True:
            kept.append(next(made))
    assert "cuda:0" in str(caught.value) and len(kept) > 2
    with pytest.raises(StopIteration):
        next(made)
    del kept
    runtime.standin_memory(ctypes.c_size_t(1 << 30))
    made.begin([[0]], 0)
    assert len(list(made)) > 2
    made.close()


def test_batches_outlive_everything(data: Any, consumer: Consumer) -> None:
    made = loader(data.with_transforms(CHAINS["moves"]))
    made.begin([[0], [1]], 0)
    kept = list(made)
    made.close()
    del made
    depots.depot.cache_clear()
    gc.collect()
    for batch in kept:
        for tensor in batch.values():
            consumer.take(tensor)
    want = on_host(data.with_transforms(CHAINS["moves"]), shard=0)
    assert consumer.finish()[: len(want)] == want
    del kept, batch, tensor
    gc.collect()


@pytest.mark.parametrize("residence", ["resident", "streamed"])
def test_a_loader_survives_the_failure_of_any_cuda_call(data: Any, residence: str) -> None:
    depots.depot("cuda:0").limit = 1 << 30  # opens the device before calls are counted
    failures = 0
    for nth in range(1, 400):
        runtime.standin_fail(None, nth, 2 if nth % 2 else 719)
        try:
            made = loader(data.with_transforms(CHAINS["images"]), residence=residence)
            made.begin([[1]], 0)
            list(made)
        except (DeviceError, MemoryError) as error:
            assert "cuda" in str(error)
            failures += 1
        runtime.standin_fail(None, 0, 0)
        made = loader(data, residence=residence)  # the process stays usable
        made.begin([[1]], 0)
        assert len(list(made)) > 2
        made.close()
        depots.depot("cuda:0").drop()
    assert failures > 40


# --- the rest ----------------------------------------------------------------------


def test_units_accept_device_batches(data: Any) -> None:
    """`run_unit` counts the rows and batches of a device loader like those of any other."""
    made = loader(data)
    made.begin([[0, 2], [3]], 1)
    host = make_loader(data, 16, seed=5, framework="dlpack")
    host.begin([[0, 2], [3]], 1)

    def step(batch: dict[str, Any]) -> dict[str, float]:
        y = batch["y"]
        values = np.from_dlpack(y, device="cpu")
        return {"mean": float(values.mean())}

    ours, theirs = _core.run_unit(made, step), _core.run_unit(host, step)
    assert ours[:3] == theirs[:3]
    made.close()


def test_workers_make_torch_batches_on_the_device(
    data: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A torch model's batches are made on the device, below the worker's limit."""
    model = SimpleNamespace(framework="torch")
    made = make_batches(model, data, 8, "cuda:0", seed=1)
    assert isinstance(made, _core.Loader) and made.depot is depots.depot("cuda:0")
    depots.set_limit(made, 0)
    assert depots.depot("cuda:0").limit == 500_000_000
    depots.set_limit(made, 1000)
    assert depots.depot("cuda:0").limit == 1000
    with caplog.at_level(logging.WARNING, "cerebro.data"):
        for _ in range(3):
            made.begin([[0]], 0)
            depots.tell_first_note(made)
    assert len(caplog.records) == 1
    depots.set_limit(made, 1 << 30)
    made.begin([[0]], 0)
    assert made.resident_shards == 1
    made.close()
    assert depots.drop("cuda:0") > 0 == depots.depot("cuda:0").resident_bytes
    assert make_batches(SimpleNamespace(framework="numpy"), data, 8, "cuda:0", seed=1).depot is None


def test_destroying_a_loader_waits_without_the_gil(data: Any) -> None:
    """A host callback on the stream may want it."""
    made = loader(data, residence="streamed")
    made.begin([[0]], 0)
    next(made)
    flag = ctypes.c_int(0)
    answered: list[bool] = []

    def answer() -> None:
        while flag.value != 1:
            if done.wait(0.001):
                return
        flag.value = 2
        answered.append(True)

    done = threading.Event()
    thread = threading.Thread(target=answer)
    thread.start()
    runtime.standin_gate(ctypes.byref(flag))
    del made
    done.set()
    thread.join()
    assert answered == [True]


def test_pytorchs_pool_is_taken_when_pytorch_comes_later(
    data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if devices are already open, because two pools would compete for memory."""
    runtime.cudaMalloc.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    runtime.cudaFree.argtypes = (ctypes.c_void_p,)
    taken: list[int] = []

    def allocate(nbytes: int, index: int) -> int:
        address = ctypes.c_void_p()
        checked(runtime.cudaMalloc(ctypes.byref(address), nbytes))
        taken.append(nbytes)
        assert address.value is not None
        return address.value

    cuda.open_device.cache_clear()
    monkeypatch.setattr(cuda, "_pooled", {})
    monkeypatch.setattr(cuda, "start_torch", lambda: False)  # not loaded yet
    before = loader(data, device="cuda:0")
    before.begin([[0]], 0)
    assert taken == []
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    monkeypatch.setattr(cuda, "start_torch", lambda: True)
    monkeypatch.setattr(cuda, "_torch_allocate", allocate)
    monkeypatch.setattr(cuda, "_torch_release", lambda address: checked(runtime.cudaFree(address)))
    made = loader(data, device="cuda:0")
    made.begin([[1]], 0)
    assert len(taken) > 0
    made.close()
    before.close()
    del before, made
    depots.depot.cache_clear()
    cuda.open_device.cache_clear()
    cuda._pooled.clear()
    gc.collect()


def test_invalid_arguments_are_refused(data: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="NumPy has no arrays on cuda:0"):
        data.batches(8, device="cuda", framework="numpy")
    with pytest.raises(InputError, match="residence must be one of"):
        data.batches(8, device="cuda", residence="everywhere")
    with pytest.raises(InputError, match=r"cuda:7: there are \d CUDA devices, counted from 0"):
        data.batches(8, device="cuda:7", framework="dlpack")
    depot = depots.depot("cuda:0")
    assert depot.device.name == "cuda:0"
    for wrong in (-1, 1.5, "all"):
        with pytest.raises((ValueError, TypeError)):
            depot.limit = wrong  # type: ignore[assignment]
    with pytest.raises(TypeError, match="expected a Depot"):
        _core.Loader([], [], batch_size=1, depot=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a Device"):
        _core.Depot(3)  # type: ignore[arg-type]


def test_a_pytorch_without_cuda_is_refused(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "start_torch", lambda: False)
    with pytest.raises(DeviceError, match="this PyTorch cannot compute on cuda:0"):
        data.batches(8, device="cuda")


def test_a_host_device_is_main_memory(data: Any) -> None:
    """The same code over host memory gives ordinary tensors."""
    depot = _core.Depot(_core.Device("cpu"))
    view = data.with_transforms(CHAINS["images"])
    made = _core.Loader(
        view.view.loader_parts(),
        cerebro.transforms.compile(view.columns, view.transforms),
        batch_size=16,
        seed=5,
        framework="numpy",
        first_rows=view.shards.first_rows,
        depot=depot,
    )
    made.begin([[2]], 3)
    found = [array.tobytes() for batch in made for array in batch.values()]
    assert found == on_host(view, shard=2, epoch=3)
    assert made.resident_shards == 1

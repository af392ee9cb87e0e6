"""Batches on a GPU: the bits of the CPU's, in order with streams, from one copy of the data."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_chains import chains

import cerebro._core as _core
import cerebro.data
from cerebro.data import depots
from cerebro.data.batches import make_loader
from cerebro.errors import DeviceError, InputError
from cerebro.transforms import (
    Scale,
    ToCHW,
)

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device"),
]

ROWS = 1003
LONG_SLEEP = 20_000_000  # cycles: about 10 ms, many times what a batch takes

CHAINS = chains(moved=(14, 12), last=9, trained=(16, 15))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> cerebro.data.Dataset:
    random = np.random.default_rng(0)
    columns = {
        "x": random.integers(0, 256, (ROWS, 16, 15, 3), np.uint8),
        "y": np.arange(ROWS),
        "v": random.normal(size=(ROWS, 7)).astype(np.float32),
        "t": [list(range(i % 8)) for i in range(ROWS)],
    }
    return cerebro.data.shard(columns, tmp_path_factory.mktemp("data") / "d", shards=4)


@pytest.fixture(scope="module", autouse=True)
def nothing_stays() -> Iterator[None]:
    """Other tests find a device of which nothing is held."""
    yield
    gc.collect()
    torch.cuda.synchronize()
    depots.depot.cache_clear()
    gc.collect()


@pytest.fixture
def depot() -> Iterator[_core.Depot]:
    """The first GPU's, with nothing resident, and its limit put back."""
    found = depots.depot("cuda:0")
    limit = found.limit
    found.drop()
    yield found
    found.limit = limit


def bits(tensor: Any) -> tuple[Any, ...]:
    """Type, shape and bytes of a tensor."""
    host = tensor.detach().cpu().contiguous()
    return host.dtype, tuple(host.shape), host.reshape(-1).view(torch.uint8).numpy().tobytes()


def bits_of(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: bits(tensor) for name, tensor in batch.items()}


def expected(data: Any, **options: Any) -> list[dict[str, Any]]:
    return [bits_of(batch) for batch in data.batches(64, seed=5, threads=0, **options)]


# --- bits --------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("residence", ["auto", "resident", "streamed"])
@pytest.mark.parametrize("chain", CHAINS)
def test_batches_have_the_bits_of_the_cpu(
    data: Any, chain: str, residence: str, threads: int
) -> None:
    view = data.with_transforms(CHAINS[chain])
    batches = view.batches(64, seed=5, device="cuda", residence=residence, threads=threads)
    for epoch in range(3):
        found = []
        for batch in batches:
            assert all(tensor.device.type == "cuda" for tensor in batch.values())
            found.append(bits_of(batch))
        assert found == expected(view, epoch=epoch)


@pytest.mark.parametrize("residence", ["auto", "streamed"])
@pytest.mark.parametrize("chain", ["moves", "training"])
def test_views_start_and_drop_last_match_the_cpu(data: Any, chain: str, residence: str) -> None:
    view = data.select(np.arange(ROWS - 1, 0, -3)).with_transforms(CHAINS[chain])
    for options in (
        {"drop_last": True},
        {"shuffle": False, "epoch": 3},
        {"start": 3},
        {"shard": 2, "epoch": 1},
    ):
        found = view.batches(64, seed=5, device="cuda:0", residence=residence, **options)
        assert [bits_of(batch) for batch in found] == expected(view, **options)


def test_batches_made_on_the_device_train_like_moved_batches(data: Any) -> None:
    """Batches made on the device train as batches that were moved there."""
    view = data.with_transforms({"x": [Scale(1 / 255)]})
    states = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        net = torch.nn.Linear(16 * 15 * 3, 10).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for batch in view.batches(32, seed=2, device=device):
            x, y = batch["x"].cuda().flatten(1), batch["y"].cuda() % 10
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        states.append([bits(parameter) for parameter in net.parameters()])
    assert states[0] == states[1]


# --- streams -----------------------------------------------------------------------


@pytest.mark.parametrize("residence", ["auto", "streamed"])
@pytest.mark.parametrize("side", [False, True])
def test_buffers_wait_for_a_slow_consumer(data: Any, residence: str, side: bool) -> None:
    """The host runs ahead of the device: no batch is written over before it was read."""
    view = data.with_transforms(CHAINS["training"])
    want = [batch["x"].double().sum().item() for batch in view.batches(32, seed=5, threads=0)]
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    sums = []
    with torch.cuda.stream(stream):
        for batch in view.batches(32, seed=5, device="cuda", residence=residence):
            torch.cuda._sleep(LONG_SLEEP)
            sums.append(batch.pop("x").double().sum())
    stream.synchronize()
    np.testing.assert_allclose([float(total) for total in sums], want, rtol=1e-9, atol=1e-6)


def test_batches_are_correct_on_streams_that_take_turns(data: Any) -> None:
    streams = [torch.cuda.Stream() for _ in range(6)]
    want = expected(data)
    copies: list[dict[str, Any]] = []
    batches = iter(data.batches(64, seed=5, device="cuda", residence="auto"))
    for turn in range(len(want)):
        with torch.cuda.stream(streams[turn % len(streams)]):
            batch = next(batches)
            torch.cuda._sleep(LONG_SLEEP // 4)
            copies.append({name: tensor.clone() for name, tensor in batch.items()})
            del batch
    torch.cuda.synchronize()
    assert [bits_of(batch) for batch in copies] == want


def test_batches_may_be_used_on_another_stream_as_in_the_guide(data: Any) -> None:
    other = torch.cuda.Stream()
    want = expected(data)
    copies = []
    for batch in data.batches(64, seed=5, device="cuda"):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.cuda._sleep(LONG_SLEEP // 4)
            copies.append({name: tensor.clone() for name, tensor in batch.items()})
        torch.cuda.current_stream().wait_stream(other)
    torch.cuda.synchronize()
    assert [bits_of(batch) for batch in copies] == want


def test_no_batch_is_given_out_while_a_graph_is_captured(data: Any) -> None:
    batches = iter(data.batches(64, seed=5, device="cuda", threads=2))
    want = expected(data)
    first = next(batches)
    graph = torch.cuda.CUDAGraph()
    static = torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        with pytest.raises(DeviceError, match="captured"):
            next(batches)
        static += 1
    graph.replay()
    torch.cuda.synchronize()
    assert static.tolist() == [1.0] * 8
    # An error ends the iteration of Batches; the loader goes on with its next pass.
    assert bits_of(first) == want[0]
    again = data.batches(64, seed=5, device="cuda")
    assert [bits_of(batch) for batch in again] == want


# --- DLPack ------------------------------------------------------------------------


def test_dlpack_export_accepts_every_kind_of_stream(data: Any) -> None:
    batches = data.batches(64, seed=5, device="cuda", framework="dlpack")
    for batch, want in zip(batches, expected(data), strict=True):
        x = batch["x"]
        assert x.__dlpack_device__() == (2, 0)
        side = torch.cuda.Stream()
        for stream in (None, 1, 2, -1, side.cuda_stream):
            assert x.__dlpack__(stream=stream) is not None
            assert x.__dlpack__(stream=stream, max_version=(1, 0), copy=True) is not None
        for wrong in (0, -2, 2**70):
            with pytest.raises(BufferError, match="stream must be"):
                x.__dlpack__(stream=wrong)
        with pytest.raises(BufferError, match=r"cannot be exported to device \(2, 7\)"):
            x.__dlpack__(dl_device=(2, 7))
        with pytest.raises(BufferError, match="device's memory"):
            memoryview(x)
        assert bits(torch.from_dlpack(x)) == want["x"]
        host = np.from_dlpack(x, device="cpu")
        assert host.tobytes() == want["x"][2]
        with torch.cuda.stream(side):
            theirs = torch.from_dlpack(x)
            torch.cuda._sleep(LONG_SLEEP // 10)
            copy = theirs.clone()
        side.synchronize()
        assert bits(copy) == want["x"]


def test_tensors_outlive_batches_and_loaders(data: Any) -> None:
    kept = list(data.batches(64, seed=5, device="cuda"))
    found = [bits_of(batch) for batch in kept]
    views = [batch["v"][1:, :3] for batch in kept]
    del kept
    for _ in data.batches(32, seed=9, device="cuda"):
        pass
    assert found == expected(data)
    for view, batch in zip(views, data.batches(64, seed=5, device="cuda"), strict=True):
        assert torch.equal(view, batch["v"][1:, :3])


ALONE = """
import sys
import cerebro.data

data = cerebro.data.Dataset(sys.argv[1])
assert "torch" not in sys.modules
print(sum(int(batch["y"].sum()) for batch in data.batches(64, device="cuda")))
"""


def test_batches_work_before_torch_has_started_cuda(data: Any) -> None:
    command = [sys.executable, "-c", ALONE, str(data.path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == ROWS * (ROWS - 1) // 2


@pytest.mark.parametrize("residence", ["auto", "streamed"])
def test_jax_batches_match_the_host(data: Any, residence: str) -> None:
    jax = pytest.importorskip("jax")
    try:
        gpu = jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("JAX has no CUDA device")
    view = data.with_transforms({"x": [Scale(1 / 255), ToCHW()]})
    total = jax.jit(lambda x: x.sum())
    batches = view.batches(64, seed=5, device="cuda", framework="jax", residence=residence)
    host = view.batches(64, seed=5, framework="numpy")
    with jax.enable_x64(True):
        for batch, want in zip(batches, host, strict=True):
            assert batch["x"].devices() == {gpu}
            for name in ("x", "v", "y"):
                np.testing.assert_array_equal(np.asarray(batch[name]), want[name])
            np.testing.assert_allclose(float(total(batch["x"])), want["x"].sum(), rtol=1e-4)


# --- memory ------------------------------------------------------------------------


def test_data_are_held_on_the_device_once(data: Any, depot: _core.Depot) -> None:
    first = data.batches(64, seed=5, device="cuda", framework="dlpack")
    list(first)
    once = depot.resident_bytes
    assert once == data.nbytes
    assert depot.device.held()["shards"] == once
    passes = [iter(data.batches(size, seed=1, device="cuda")) for size in (8, 16, 32)]
    for batches in passes:
        next(batches)
    assert depot.resident_bytes == once
    assert depot.drop() == 0  # in use
    del passes, batches
    assert depot.drop() == once
    assert depot.device.held()["shards"] == 0


def test_data_that_do_not_fit_are_streamed(
    data: Any, depot: _core.Depot, caplog: pytest.LogCaptureFixture
) -> None:
    depot.limit = data.nbytes // 2
    view = data.with_transforms(CHAINS["training"])
    with caplog.at_level(logging.WARNING, "cerebro.data"):
        found = [bits_of(batch) for batch in view.batches(64, seed=5, device="cuda")]
    assert found == expected(view)
    assert 0 < depot.resident_bytes <= depot.limit
    assert "streamed" in caplog.text


def test_a_full_device_streams(depot: _core.Depot, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (4000, 65536), np.uint8)
    big = cerebro.data.shard({"x": rows}, tmp_path / "big", shards=4, progress=False)
    # Kernels are loaded at their first use, into memory that the full device has not.
    next(iter(big.batches(64, device="cuda", residence="streamed")))["x"].sum(dtype=torch.int64)
    torch.cuda.empty_cache()
    free, _ = depot.device.memory()
    # One of the shards has room, and batches: PyTorch takes 20 MB at a time for them.
    taken = torch.empty(free - (104 << 20), dtype=torch.uint8, device="cuda")
    try:
        batches = big.batches(64, seed=5, device="cuda", residence="resident")
        sums = [batch["x"].sum(dtype=torch.int64) for batch in batches]
    finally:
        del taken
    want = [batch["x"].sum(dtype=torch.int64) for batch in big.batches(64, seed=5)]
    assert [int(total) for total in sums] == [int(total) for total in want]
    depot.drop()


def test_numpy_is_refused(data: Any) -> None:
    with pytest.raises(InputError, match="NumPy has no arrays on cuda:0"):
        data.batches(8, device="cuda:0", framework="numpy")
    with pytest.raises((DeviceError, ValueError), match="9"):
        list(data.batches(8, device="cuda:9"))


def test_batches_are_made_on_a_second_device(data: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    found = []
    for batch in data.batches(64, seed=5, device="cuda:1"):
        assert batch["x"].device == torch.device("cuda", 1)
        found.append(bits_of(batch))
    assert found == expected(data)
    assert torch.cuda.current_device() == 0


# --- units -------------------------------------------------------------------------


def test_units_accept_device_batches(data: Any) -> None:
    """`run_unit` counts rows and sums metrics of batches on the device."""
    results = []
    for device in ("cpu", "cuda"):
        loader = make_loader(data, 64, seed=5, device=device)
        loader.begin([[0, 2]], 1)
        results.append(_core.run_unit(loader, lambda batch: {"mean": batch["y"].double().mean()}))
    assert results[0].rows == results[1].rows
    assert results[0].batches == results[1].batches
    assert results[0].sums["mean"] == pytest.approx(results[1].sums["mean"], rel=1e-12)

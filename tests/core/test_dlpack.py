"""Batches as tensors of NumPy, PyTorch and JAX, and as DLPack capsules."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dlpack_structs import capsule_name, capsule_pointer, describe

import cerebro._core as _core

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
]


def reader(folder: Path, **columns: np.ndarray) -> _core.ShardReader:
    specs = []
    for name, values in columns.items():
        np.save(folder / f"{name}.npy", values)
        dtype = "bfloat16" if name.startswith("bf16") else values.dtype.name
        size = (folder / f"{name}.npy").stat().st_size
        specs.append((name, dtype, values.shape[1:], False, {f"{name}.npy": size}))
    return _core.ShardReader(folder, len(values), specs)


def loader(folder: Path, framework: str, batch_size: int = 4, **columns: Any) -> _core.Loader:
    shard = reader(folder, **columns)
    made = _core.Loader(
        [(shard, (0, shard.rows))],
        [{"name": name, "ops": []} for name in columns],
        batch_size=batch_size,
        shuffle=False,
        framework=framework,
    )
    made.begin([[0]], 0)
    return made


def values_of(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    values = np.arange(int(np.prod(shape))).reshape(shape) % 100
    return (values % 2 if dtype == "bool" else values).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 1, 2), (4, 0, 3), (1, 5)])
def test_all_dtypes_and_shapes(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    x = values_of(dtype, shape)
    (batch,) = loader(tmp_path, "numpy", x=x)
    assert batch["x"].dtype == x.dtype
    np.testing.assert_array_equal(batch["x"], x)
    assert batch["x"].flags.writeable and batch["x"].flags.c_contiguous

    (batch,) = loader(tmp_path, "torch", x=x)
    assert batch["x"].dtype == getattr(torch, dtype)
    assert tuple(batch["x"].shape) == shape
    np.testing.assert_array_equal(batch["x"].numpy(), x)

    (batch,) = loader(tmp_path, "dlpack", x=x)
    ours = batch["x"]
    assert (ours.shape, ours.dtype, ours.nbytes) == (shape, dtype, x.nbytes)
    np.testing.assert_array_equal(np.from_dlpack(ours), x)
    np.testing.assert_array_equal(np.asarray(ours), x)
    np.testing.assert_array_equal(torch.from_dlpack(ours).numpy(), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4,), (4, 1, 2), (4, 0, 3)])
def test_jax_gets_all_dtypes_and_shapes(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    x = values_of(dtype, shape)
    with jax.enable_x64(True):
        (batch,) = loader(tmp_path, "jax", x=x)
        assert isinstance(batch["x"], jax.Array)
        assert batch["x"].dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(batch["x"]), x)


def test_bfloat16(tmp_path: Path) -> None:
    x = torch.arange(12).reshape(4, 3).to(torch.bfloat16) / 7
    bits = x.view(torch.int16).numpy().view(np.uint16)
    (batch,) = loader(tmp_path, "torch", bf16=bits)
    assert batch["bf16"].dtype == torch.bfloat16
    assert torch.equal(batch["bf16"], x)
    (batch,) = loader(tmp_path, "numpy", bf16=bits)
    np.testing.assert_array_equal(batch["bf16"], bits)
    (batch,) = loader(tmp_path, "jax", bf16=bits)
    assert batch["bf16"].dtype == jax.numpy.bfloat16
    np.testing.assert_array_equal(np.asarray(batch["bf16"]).view(np.uint16), bits)
    (batch,) = loader(tmp_path, "dlpack", bf16=bits)
    assert batch["bf16"].dtype == "bfloat16"
    np.testing.assert_array_equal(np.asarray(batch["bf16"]), bits)
    with pytest.raises((BufferError, RuntimeError)):  # NumPy has no such type
        np.from_dlpack(batch["bf16"])


def test_nothing_is_copied(tmp_path: Path) -> None:
    x = np.ones((4, 100), np.float32)
    (batch,) = loader(tmp_path, "dlpack", x=x)
    ours = np.asarray(batch["x"])
    address = ours.ctypes.data
    assert address % 256 == 0
    assert torch.from_dlpack(batch["x"]).data_ptr() == address
    assert np.from_dlpack(batch["x"]).ctypes.data == address
    assert jax.dlpack.from_dlpack(batch["x"]).unsafe_buffer_pointer() == address
    torch.from_dlpack(batch["x"]).add_(1)
    assert (ours == 2).all()


def test_columns_start_on_256_bytes(tmp_path: Path) -> None:
    for framework in ("torch", "numpy"):
        for batch in loader(
            tmp_path, framework, 3, a=np.arange(7), x=np.zeros((7, 5)), c=np.zeros(7, np.int8)
        ):
            for value in batch.values():
                pointer = value.data_ptr() if framework == "torch" else value.ctypes.data
                assert pointer % 256 == 0


# --- the capsule ----------------------------------------------------------------


@pytest.fixture
def tensor(tmp_path: Path) -> Any:
    (batch,) = loader(tmp_path, "dlpack", x=np.arange(12, dtype=np.int16).reshape(4, 1, 3))
    return batch["x"]


def test_capsules_describe_their_tensor(tensor: Any) -> None:
    assert tensor.__dlpack_device__() == (1, 0)
    for version, name in [
        (None, b"dltensor"),
        ((0, 8), b"dltensor"),
        ((1, 0), b"dltensor_versioned"),
        ((1, 3), b"dltensor_versioned"),
        ((2, 0), b"dltensor_versioned"),
    ]:
        capsule = tensor.__dlpack__(stream=None, max_version=version, dl_device=None, copy=None)
        assert capsule_name(capsule) == name
        managed, view = describe(capsule)
        assert (view.device_type, view.device_id) == (1, 0)
        assert (view.code, view.bits, view.lanes) == (0, 16, 1)
        assert view.shape[: view.ndim] == [4, 1, 3]
        assert view.strides[: view.ndim] == [3, 3, 1]
        assert view.byte_offset == 0
        if version and version >= (1, 0):
            assert (managed.major, managed.flags) == (1, 0)


def test_empty_tensors_have_no_address(tmp_path: Path) -> None:
    (batch,) = loader(tmp_path, "dlpack", x=np.zeros((4, 0, 2), np.float32))
    _, view = describe(batch["x"].__dlpack__())
    assert view.data is None
    assert view.shape[: view.ndim] == [4, 0, 2]
    assert memoryview(batch["x"]).nbytes == 0


def test_a_requested_copy_has_its_own_memory(tensor: Any) -> None:
    shared = describe(tensor.__dlpack__(copy=False))[1].data
    for version in (None, (1, 0)):
        managed, view = describe(capsule := tensor.__dlpack__(max_version=version, copy=True))
        assert view.data != shared and view.data % 256 == 0
        if version:
            assert managed.flags == 2  # IS_COPIED
        del capsule
    copied = np.from_dlpack(tensor, copy=True)
    copied[:] = 0
    assert np.asarray(tensor).sum() == 66


def test_device_and_stream(tensor: Any) -> None:
    assert describe(tensor.__dlpack__(dl_device=(1, 0)))[1].data
    with pytest.raises(BufferError, match=r"device \(2, 0\)"):
        tensor.__dlpack__(dl_device=(2, 0))
    for stream in (-1, 0, 1):
        with pytest.raises(BufferError, match="stream must be None"):
            tensor.__dlpack__(stream=stream)
    with pytest.raises(TypeError, match="max_version"):
        tensor.__dlpack__(max_version=1)
    with pytest.raises(TypeError, match="dl_device"):
        tensor.__dlpack__(dl_device=1)
    with pytest.raises(TypeError):
        tensor.__dlpack__(None)


def test_buffer_protocol(tensor: Any) -> None:
    view = memoryview(tensor)
    assert (view.format, view.shape, view.strides, view.readonly) == (
        "h",
        (4, 1, 3),
        (6, 6, 2),
        False,
    )
    view[1, 0, 2] = 77
    assert np.asarray(tensor)[1, 0, 2] == 77
    assert repr(tensor) == "Tensor(shape=(4, 1, 3), dtype='int16')"
    with pytest.raises(TypeError):
        type(tensor)()


# --- lifetime -------------------------------------------------------------------


def test_no_buffer_in_fortran_order(tensor: Any) -> None:
    get = ctypes.pythonapi.PyObject_GetBuffer
    get.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]
    view = ctypes.create_string_buffer(256)  # room for a Py_buffer, which nothing fills
    fortran = 0x40 | 0x18  # PyBUF_F_CONTIGUOUS
    with pytest.raises(BufferError, match="row-major"):
        get(tensor, ctypes.addressof(view), fortran)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "dlpack"])
def test_buffers_are_reused_once_released(tmp_path: Path, framework: str) -> None:
    made = loader(tmp_path, framework, 2, x=np.arange(200, dtype=np.float32).reshape(100, 2))
    batches = list(made)  # does not hang
    assert len(batches) == 50
    assert made.buffers == 50
    made.begin([[0]], 0)
    first = np.asarray(batches[0]["x"]).copy()
    list(made)
    np.testing.assert_array_equal(np.asarray(batches[0]["x"]), first)
    del batches
    gc.collect()
    made.begin([[0]], 0)
    assert made.buffers <= 3


def test_a_view_keeps_the_buffer(tmp_path: Path) -> None:
    made = loader(
        tmp_path, "torch", 2, x=np.arange(40, dtype=np.float32).reshape(20, 2), y=np.arange(20)
    )
    view = next(made)["x"][1:, :1]
    for _ in range(3):
        made.begin([[0]], 0)
        for batch in made:
            batch["x"].zero_()
    del made, batch
    assert view.item() == 2


def test_consumed_and_unconsumed_capsules(tmp_path: Path) -> None:
    made = loader(tmp_path, "dlpack", 2, x=np.arange(40, dtype=np.float32).reshape(20, 2))
    for batch in made:
        ours = batch["x"]
        capsules = [
            ours.__dlpack__(),
            ours.__dlpack__(max_version=(1, 0)),
            ours.__dlpack__(copy=True),
        ]
        theirs = [np.from_dlpack(ours), torch.from_dlpack(ours), jax.dlpack.from_dlpack(ours)]
        assert len(capsules) == len(theirs) == 3
    assert made.buffers == 2


def test_a_deleter_called_twice_frees_once(tmp_path: Path) -> None:
    """As TensorFlow does after an error: it calls the deleter and leaves the capsule's name."""
    made = loader(tmp_path, "dlpack", 2, x=np.arange(40, dtype=np.float32).reshape(20, 2))
    for batch in made:
        for version in (None, (1, 0)):
            capsule = batch["x"].__dlpack__(max_version=version)
            managed, _ = describe(capsule)
            managed.deleter(capsule_pointer(capsule, capsule_name(capsule)))
            del capsule
        assert np.asarray(batch["x"]).shape == (2, 2)
    assert made.buffers == 2


def test_batches_may_be_freed_on_another_thread_and_after_close(tmp_path: Path) -> None:
    x = np.arange(2000, dtype=np.float32).reshape(1000, 2)
    for framework in ("numpy", "torch", "jax"):
        made = loader(tmp_path, framework, 2, x=x)
        batches = list(made)
        checks: list[bool] = []

        def drop(batches: list[Any] = batches, checks: list[bool] = checks) -> None:
            while batches:
                checks.append(float(batches.pop()["x"][0, 0]) % 4 == 0)

        threads = [threading.Thread(target=drop) for _ in range(3)]
        for thread in threads:
            thread.start()
        made.close()
        del made
        for thread in threads:
            thread.join()
        assert len(checks) == 500 and all(checks)


def test_without_an_exchange_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch before 2.10 has none: then batches go through from_dlpack."""

    class OldTensor:
        pass

    monkeypatch.setattr(torch, "Tensor", OldTensor)
    made = loader(tmp_path, "torch", 2, x=np.arange(20, dtype=np.float32).reshape(10, 2))
    monkeypatch.undo()
    for batch in made:
        assert isinstance(batch["x"], torch.Tensor)
    assert made.buffers == 2


def test_no_reference_is_lost(tmp_path: Path) -> None:
    made = loader(tmp_path, "numpy", 2, x=np.arange(20, dtype=np.float32).reshape(10, 2))
    array = next(made)["x"]
    gone = weakref.ref(array)
    del array
    assert gone() is None
    before = sys.getrefcount(_core.Tensor)
    list(made)
    after = sys.getrefcount(_core.Tensor)
    assert after == before


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("dev", [False, True])
def test_batches_may_live_until_the_interpreter_exits(
    tmp_path: Path, framework: str, dev: bool
) -> None:
    code = f"""
        import sys
        import numpy as np
        import {framework}
        from pathlib import Path
        from cerebro import _core
        folder = Path({str(tmp_path)!r})
        x = np.arange(400, dtype=np.float32).reshape(200, 2)
        np.save(folder / "x.npy", x)
        size = (folder / "x.npy").stat().st_size
        shard = _core.ShardReader(folder, 200, [("x", "float32", (2,), False, {{"x.npy": size}})])
        kept = []
        for threads in (0, 2):
            loader = _core.Loader([(shard, (0, 200))], [{{"name": "x", "ops": []}}], batch_size=2,
                                  framework={framework!r}, threads=threads)
            loader.begin([[0]], 0)
            kept.append([next(loader) for _ in range(50)])
            sys.modules[f"kept{{threads}}"] = (kept, loader)
        print("done")
    """
    command = [sys.executable, *(["-X", "dev"] if dev else []), "-c", textwrap.dedent(code)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"

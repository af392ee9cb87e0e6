"""pack_state, unpack_state, load_into and hash_state."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import json
import math
import os
import struct
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dlpack_structs import capsule_pointer
from hypothesis import given, settings
from hypothesis import strategies as st

import cerebro._core as _core
from cerebro.errors import CorruptDataError, StateError

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")


def round_trip(state: Any, **options: Any) -> Any:
    return _core.unpack_state(_core.pack_state(state), **options)


def same(a: Any, b: Any) -> bool:
    """Equal in type, value and order, to the bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return (
            [*map(repr, a)] == [*map(repr, b)]
            and all(same(x, y) for x, y in zip(a, b, strict=True))
            and all(same(x, y) for x, y in zip(a.values(), b.values(), strict=True))
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        return bool(torch.equal(a, b))
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return bool(a == b)


def header_of(buffer: Any) -> dict[str, Any]:
    data = bytes(buffer)
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])


def with_header(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def file_of(structure: str, **tensors: tuple[str, list[int], bytes]) -> bytes:
    """A state file with this structure and these tensors, in this order."""
    header: dict[str, Any] = {"__metadata__": {"cerebro": structure}}
    data = b""
    for path, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[path] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    return with_header(header, data)


# --- values ---------------------------------------------------------------------

SCALARS = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**63 - 1,
    -(2**63),
    2**63,
    -(2**63) - 1,
    2**20000,
    0.0,
    -0.0,
    1.0,
    0.1,
    1e22,
    1e-5,
    5e-324,
    1.7976931348623157e308,
    math.pi,
    math.inf,
    -math.inf,
    math.nan,
    "",
    "text",
    'quote " backslash \\ newline \n nul \x00 bell \x07 del \x7f',
    "ü€😀\u2028",
    b"",
    b"\x00\xff bytes",
    np.float32(0.1),
    np.float64(-0.0),
    np.float16(1.5),
    np.int8(-3),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex64(1 - 2j),
    np.float32("nan"),
]


@pytest.mark.parametrize("value", SCALARS, ids=range(len(SCALARS)))
def test_scalars(value: Any) -> None:
    assert same(round_trip(value), value)
    assert same(round_trip({"a": [value, (value,)]}), {"a": [value, (value,)]})


CONTAINERS = [
    [],
    (),
    {},
    [[], [()]],
    {"b": 1, "a": 2, "": 3},
    {0: "int", 1: {2: 3}},
    {"$": 1},
    {"$": {"$": "torch"}},
    {(1, ("a", None)): 1, None: 2, True: 3, 2.5: 4, b"x": 5, "s": 6, np.int64(9): 7},
    {"a/b~c~1": [1], "~": {"/": 2}},
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.OrderedDict({1: 2, "1": 3}),
    collections.Counter({30: 1, 80: 2}),
    torch.Size([3, 4]),
    torch.Size([]),
]


@pytest.mark.parametrize("value", CONTAINERS, ids=lambda v: repr(v)[:40])
def test_containers(value: Any) -> None:
    assert same(round_trip(value), value)
    assert same(round_trip([value, {"x": value}]), [value, {"x": value}])


def test_an_ordered_dict_keeps_the_order_of_its_own() -> None:
    value = collections.OrderedDict(a=1, b=2, c=3)
    value.move_to_end("a")
    assert list(round_trip(value)) == ["b", "c", "a"]


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary(max_size=8)
    | st.integers(0, 5).map(lambda n: np.arange(n, dtype=np.float32))
    | st.integers(0, 5).map(lambda n: torch.arange(n)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.text("a$~/0#", max_size=3) | st.integers(0, 3) | st.tuples(st.integers(0, 2)),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(values)
def test_any_state(state: Any) -> None:
    packed = _core.pack_state(state)
    assert same(_core.unpack_state(packed), state)
    assert bytes(_core.pack_state(_core.unpack_state(packed))) == bytes(packed)
    safetensors_torch.load(bytes(packed))


# --- tensors --------------------------------------------------------------------

TORCH_DTYPES = [
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_torch_dtypes_and_layouts(dtype: torch.dtype) -> None:
    base = torch.arange(4 * 6 * 5).remainder(100).reshape(4, 6, 5).to(dtype)
    state = {
        "whole": base,
        "transposed": base.permute(2, 0, 1),
        "sliced": base[::2, 1:5:3, :],
        "expanded": base[:1, :, :1].expand(3, 6, 7),
        "scalar": base[1, 1, 1],
        "empty": base[:0],
        "ones": base[:1, :1, :1],
        "column": base[:, 2, 3],
    }
    assert same(round_trip(state), state)


@pytest.mark.parametrize("dtype", [np.dtype(c) for c in "?bhilqBHILQefdF"], ids=str)
def test_numpy_dtypes_and_layouts(dtype: np.dtype[Any]) -> None:
    base = np.arange(4 * 6 * 5).reshape(4, 6, 5).astype(dtype)
    state = {
        "whole": base,
        "fortran": np.asfortranarray(base),
        "reversed": base[::-1, :, ::-2],
        "broadcast": np.broadcast_to(base[:1], (3, 6, 5)),
        "scalar": np.array(base[1, 1, 1]),
        "empty": base[:, :0],
        "read only": base.view(),
    }
    state["read only"].flags.writeable = False
    back = round_trip(state)
    assert same(back, state)
    assert all(array.flags.writeable and array.flags.owndata for array in back.values())


def test_bfloat16_of_numpy() -> None:
    import ml_dtypes

    state = {"x": np.arange(5).astype(ml_dtypes.bfloat16)}
    assert same(round_trip(state), state)
    assert header_of(_core.pack_state(state))["/x"]["dtype"] == "BF16"


def test_kinds_are_kept() -> None:
    state = {"t": torch.ones(2), "n": np.ones(2), "s": [np.zeros(1), torch.zeros(1)]}
    for framework in ("torch", "numpy", "jax"):
        assert same(round_trip(state, framework=framework), state)


def test_parameters_come_back_as_tensors() -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    back = round_trip({"p": parameter, "b": torch.nn.Buffer(torch.ones(2))})
    assert type(back["p"]) is torch.Tensor
    assert not back["p"].requires_grad
    assert torch.equal(back["p"], parameter)


def test_conjugate_and_negative_views_have_their_values() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conj": z.conj(), "imag": z.conj().imag, "real": z.conj().real}
    assert state["imag"].is_neg() and state["conj"].is_conj()
    back = round_trip(state)
    assert back["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert back["imag"].tolist() == [-2.0, 4.0]
    assert back["real"].tolist() == [1.0, 3.0]


def changing(value: torch.Tensor, change: Callable[[Any], object]) -> torch.Tensor:
    """A tensor that calls `change` with itself when it is asked whether it is negative."""

    class Changing(torch.Tensor):
        def is_neg(self) -> bool:
            with torch._C.DisableTorchFunctionSubclass():
                change(self)
            return False

    return value.as_subclass(Changing)


def move(tensor: Any) -> None:
    """Give a tensor other memory with the same values."""
    storage = tensor.untyped_storage()
    storage.resize_(storage.nbytes() * 4)


def test_a_tensor_that_moves_while_it_is_read() -> None:
    values = torch.arange(100_000.0)
    back = round_trip({"t": changing(values.clone(), move)})
    assert torch.equal(back["t"], values)


@pytest.mark.parametrize("kind", ["torch", "numpy", "shape"])
def test_a_tensor_that_another_one_moves_is_refused(kind: str) -> None:
    first: Any = torch.zeros(100_000) if kind == "torch" else np.zeros(100_000)

    def change(_: object) -> None:
        if kind == "torch":
            move(first)
        elif kind == "numpy":
            first.resize(10, refcheck=False)
        else:
            first.shape = (10, 10_000)

    state = {"a": {"first": first}, "b": changing(torch.ones(1), change)}
    packed = _core.pack_state({"a": {"first": first}, "b": torch.ones(1)})
    for call in (_core.pack_state, lambda state: _core.load_into(packed, state)):
        first = torch.zeros(100_000) if kind == "torch" else np.zeros(100_000)
        state["a"]["first"] = first
        with pytest.raises(StateError, match="the tensor at '/a/first' was replaced"):
            call(state)


def test_a_partially_imported_torch_has_no_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Array:
        def __dlpack__(self, **options: object) -> object:
            return np.arange(3).__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    class Failing(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(f"no {name} today")

    for module in (types.ModuleType("torch"), None):
        monkeypatch.setitem(sys.modules, "torch", module)
        packed = _core.pack_state({"a": Array(), "b": 1})
        assert _core.unpack_state(packed, "numpy", only="a").tolist() == [0, 1, 2]
    monkeypatch.setitem(sys.modules, "torch", Failing("torch"))
    with pytest.raises(RuntimeError, match="no Tensor today"):
        _core.pack_state({"a": Array()})


def test_tied_weights_are_both_packed() -> None:
    w = torch.randn(4)
    back = round_trip({"a": w, "b": w})
    assert same(back, {"a": w, "b": w})
    back["a"].zero_()
    assert torch.equal(back["b"], w)


def test_unpacked_tensors_have_memory_of_their_own() -> None:
    packed = _core.pack_state({"t": torch.zeros(3), "u": torch.zeros(3), "n": np.zeros(3)})
    back = _core.unpack_state(packed)
    del packed
    gc.collect()
    back["t"].fill_(1)
    back["n"].fill(2)
    assert back["u"].tolist() == [0, 0, 0]
    assert back["t"].data_ptr() % 64 == 0
    back["t"].requires_grad_()
    (back["t"] * 2).sum().backward()
    assert back["t"].grad is not None


def test_unpacked_tensors_are_freed_on_any_thread() -> None:
    back = round_trip([torch.ones(1000) for _ in range(50)])
    thread = threading.Thread(target=back.clear)
    thread.start()
    thread.join()
    assert back == []


def test_views_share_and_keep_the_buffer() -> None:
    packed = _core.pack_state({"t": torch.zeros(3), "n": np.zeros(3)})
    back = _core.unpack_state(packed, copy=False)
    back["t"].fill_(5)
    back["n"].fill(6)
    again = _core.unpack_state(packed)
    assert again["t"].tolist() == [5, 5, 5]
    assert again["n"].tolist() == [6, 6, 6]
    del packed
    gc.collect()
    assert back["t"].tolist() == [5, 5, 5]
    t = back.pop("t")
    del back
    assert t.sum() == 15


def test_views_of_read_only_buffers_are_read_only() -> None:
    data = bytes(_core.pack_state({"n": np.zeros(3)}))
    for copy in (False, None):
        assert not _core.unpack_state(data, copy=copy)["n"].flags.writeable


def test_torch_views_of_read_only_memory_require_copy_none(tmp_path: Path) -> None:
    slots = _core.Slots(tmp_path / "0", True)
    slots.pack({"t": torch.ones(3)}, attempt=1)
    slots.commit(1)
    committed = slots.view()
    for buffer in (bytes(committed), memoryview(committed).toreadonly(), committed):
        with pytest.raises(BufferError, match="torch has no read-only tensors"):
            _core.unpack_state(buffer, copy=False)
        shown = _core.unpack_state(buffer, copy=None)["t"]
        assert shown.tolist() == [1, 1, 1]
        assert _core.unpack_state(buffer)["t"].fill_(2).tolist() == [2, 2, 2]
        assert shown.tolist() == [1, 1, 1]
    writable = bytearray(committed)
    _core.unpack_state(writable, copy=None)["t"].fill_(3)
    assert _core.unpack_state(writable)["t"].tolist() == [3, 3, 3]


def test_an_older_exchange_table_behind_a_newer_one_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A torch with DLPack 2 keeps the older table for consumers that know no other."""
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no exchange table")

    class Header(ctypes.Structure):
        _fields_ = (
            ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("prev_api", ctypes.c_void_p)
        )  # fmt: skip

    name = b"dlpack_exchange_api"
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    table = Header(2, 0, capsule_pointer(torch.Tensor.__dlpack_c_exchange_api__, name))
    state = {"a": torch.arange(6).reshape(2, 3)}
    packed = bytes(_core.pack_state(state))
    monkeypatch.setattr(
        torch.Tensor, "__dlpack_c_exchange_api__", new(ctypes.addressof(table), name, None)
    )
    monkeypatch.delattr(torch.Tensor, "__dlpack__")  # without the table nothing would be left
    assert bytes(_core.pack_state(state)) == packed
    assert torch.equal(_core.unpack_state(packed)["a"], state["a"])
    table.prev_api = None
    with pytest.raises(StateError):
        _core.pack_state(state)


def test_without_an_exchange_table(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.arange(6).reshape(2, 3).t(), "b": torch.nn.Parameter(torch.ones(2))}
    state["c"] = torch.zeros(0, dtype=torch.bfloat16)
    packed = _core.pack_state(state)
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert bytes(_core.pack_state(state)) == bytes(packed)
    back = _core.unpack_state(packed)
    assert torch.equal(back["a"], state["a"])
    assert torch.equal(_core.unpack_state(packed, copy=False)["b"], state["b"])
    with pytest.raises(StateError, match="sparse"):
        _core.pack_state(torch.eye(2).to_sparse())


def test_jax_arrays() -> None:
    jnp = pytest.importorskip("jax.numpy")
    state = {"x": jnp.arange(4.0), "b": jnp.ones(2, dtype=jnp.bfloat16), "n": np.ones(1)}
    packed = _core.pack_state(state)
    for copy in (True, False):
        back = _core.unpack_state(packed, copy=copy)
        assert type(back["x"]) is type(state["x"])
        assert back["x"].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert back["b"].dtype == jnp.bfloat16
        assert type(back["n"]) is np.ndarray
    assert _core.load_into(packed, state) is None


class Other:
    """A tensor of some other framework."""

    def __init__(self, array: np.ndarray[Any, Any], device: int = 1) -> None:
        self.array = array
        self.device = device

    def __dlpack__(self) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)


def test_tensors_of_other_frameworks_come_back_as_asked() -> None:
    packed = _core.pack_state([Other(np.arange(3)), Other(np.arange(6).reshape(2, 3).T)])
    back = _core.unpack_state(packed)
    assert same(back, [np.arange(3), np.arange(6).reshape(2, 3).T])
    assert torch.equal(_core.unpack_state(packed, "torch")[0], torch.arange(3))
    with pytest.raises(StateError, match="at '/a' is on another device"):
        _core.pack_state({"a": Other(np.arange(3), device=2)})


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from cerebro import _core
from cerebro.errors import StateError
state = _core.unpack_state(open(sys.argv[1], "rb").read())
print(type(state["w"]).__name__, state["w"].tolist(), state["size"])
try:
    _core.unpack_state(open(sys.argv[1], "rb").read(), "torch")
except ImportError as error:
    print(error)
try:
    _core.pack_state({1, 2})
except StateError as error:
    print(str(error).split(";")[0])
"""


def test_one_part_alone_is_unpacked() -> None:
    part = {"step": 3, "loss": [math.nan, (1, b"x")], "only": None}
    state = {"a": {"model": np.ones(3)}, "model": {"w": torch.ones(2)}, "part": part, "z": 1}
    packed = _core.pack_state(state)
    assert repr(_core.unpack_state(packed, only="part")) == repr(part)
    assert torch.equal(_core.unpack_state(packed, only="model")["w"], torch.ones(2))
    assert _core.unpack_state(packed, only="z") == 1
    for other, key in ((packed, "step"), (packed, "mod"), (_core.pack_state([1]), "z")):
        with pytest.raises(CorruptDataError):
            _core.unpack_state(other, only=key)


def test_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    path.write_bytes(_core.pack_state({"w": torch.ones(2), "size": torch.Size([2])}))
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(path)], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines() == [
        "ndarray [1.0, 1.0] (2,)",
        "the state needs torch, which cannot be imported: install it, or ask for framework='numpy'",
        "cannot pack the state: the value at the top is of type set",
    ]


# --- what training states hold --------------------------------------------------


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 2),
    )


OPTIMIZERS = [
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
    "LBFGS",
    "Adafactor",
]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_resume_bit_for_bit(name: str) -> None:
    def step(net: torch.nn.Module, opt: Any, seed: int) -> None:
        x = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(seed))

        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            return loss

        opt.step(closure)

    def make() -> tuple[torch.nn.Module, Any]:
        net = network()
        return net, getattr(torch.optim, name)(net.parameters(), lr=0.01)

    net, opt = make()
    for seed in range(3):
        step(net, opt, seed)
    state = {"net": net.state_dict(), "opt": opt.state_dict()}
    packed = _core.pack_state(state)
    other_net, other_opt = make()
    back = _core.unpack_state(packed)
    other_net.load_state_dict(back["net"])
    other_opt.load_state_dict(back["opt"])
    step(net, opt, 3)
    step(other_net, other_opt, 3)
    assert bytes(_core.pack_state({"net": net.state_dict(), "opt": opt.state_dict()})) == bytes(
        _core.pack_state({"net": other_net.state_dict(), "opt": other_opt.state_dict()})
    )


SCHEDULERS: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [1, 3, 3]},
    "ConstantLR": {},
    "LinearLR": {},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 0.5},
    "OneCycleLR": {"max_lr": 0.5, "total_steps": 20},
    "ReduceLROnPlateau": {"patience": 1},
    "LambdaLR": {"lr_lambda": lambda epoch: 0.9**epoch},
    "MultiplicativeLR": {"lr_lambda": lambda epoch: 0.9},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_resume_with_equal_rates(name: str) -> None:
    def make() -> tuple[Any, Any]:
        opt = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return opt, getattr(torch.optim.lr_scheduler, name)(opt, **SCHEDULERS[name])

    def step(opt: Any, scheduler: Any) -> float:
        opt.step()
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        return float(opt.param_groups[0]["lr"])

    opt, scheduler = make()
    for _ in range(3):
        step(opt, scheduler)
    back = round_trip({"opt": opt.state_dict(), "scheduler": scheduler.state_dict()})
    assert same(back["scheduler"], scheduler.state_dict())
    other_opt, other = make()
    other_opt.load_state_dict(back["opt"])
    other.load_state_dict(back["scheduler"])
    assert [step(opt, scheduler) for _ in range(5)] == [step(other_opt, other) for _ in range(5)]


def test_generators() -> None:
    import random

    rng = np.random.default_rng(3)
    state = {
        "torch": torch.get_rng_state(),
        "random": random.Random(3).getstate(),
        "legacy": np.random.RandomState(3).get_state(),
        "numpy": rng.bit_generator.state,
    }
    assert same(round_trip(state), state)


# --- layout ---------------------------------------------------------------------


def test_the_layout() -> None:
    state = {
        "z": torch.ones(3, dtype=torch.uint8),
        "a": torch.ones(3, dtype=torch.float16),
        "m": torch.ones(2),
        "b": {0: torch.ones(1, dtype=torch.float64), "k": [np.ones((2, 0))]},
        "lr": 0.5,
    }
    packed = bytes(_core.pack_state(state))
    header = header_of(packed)
    assert list(header) == ["__metadata__", "/a", "/b/0", "/b/k/0", "/m", "/z"]
    assert header["__metadata__"] == {
        "cerebro": '{"z":{"$":"torch"},"a":{"$":"torch"},"m":{"$":"torch"},'
        '"b":{"$":"dict","v":[[0,{"$":"torch"}],["k",[{"$":"numpy"}]]]},"lr":0.5}'
    }
    assert header["/b/0"] == {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}
    assert header["/b/k/0"] == {"dtype": "F64", "shape": [2, 0], "data_offsets": [8, 8]}
    assert header["/m"] == {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}
    assert header["/a"] == {"dtype": "F16", "shape": [3], "data_offsets": [16, 22]}
    assert header["/z"] == {"dtype": "U8", "shape": [3], "data_offsets": [22, 25]}
    start = 8 + struct.unpack("<Q", packed[:8])[0]
    assert start % 64 == 0
    assert len(packed) == start + 25
    assert _core.hash_state(packed) == _core.xxh3_128(packed)


def test_golden_bytes() -> None:
    """The format: a change here makes old states unreadable or their hashes differ."""
    state = {"w": np.arange(3, dtype=np.float32), "t": (1, None), 2: -0.0}
    packed = _core.pack_state(state)
    assert bytes(packed)[8:256].rstrip(b" ") == (
        b'{"__metadata__":{"cerebro":"{\\"$\\":\\"dict\\",\\"v\\":[[\\"w\\",{\\"$\\":\\"numpy\\"}],'
        b'[\\"t\\",{\\"$\\":\\"tuple\\",\\"v\\":[1,null]}],[2,-0.0]]}"},'
        b'"/w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}'
    )
    assert _core.hash_state(packed) == GOLDEN_HASH


GOLDEN_HASH = "ad58aa0667927ee4640ba39f37891f0c"


def test_long_headers_begin_data_on_a_page() -> None:
    packed = _core.pack_state({f"tensor number {i}": torch.ones(i) for i in range(100)})
    (length,) = struct.unpack("<Q", bytes(packed)[:8])
    assert (8 + length) % 4096 == 0
    assert len(safetensors_torch.load(bytes(packed))) == 100


def test_keys_that_look_alike_get_different_paths() -> None:
    state = {0: np.zeros(1), "0": np.ones(1), "#0": np.full(1, 2.0), 1: np.full(1, 3.0)}
    packed = _core.pack_state(state)
    assert set(header_of(packed)) == {"__metadata__", "/0", "/#0", "/##0", "/##1"}
    assert same(_core.unpack_state(packed), state)


def test_equal_states_have_equal_bytes_in_another_process() -> None:
    program = (
        "import torch, numpy as np; from cerebro import _core;"
        "print(_core.hash_state(_core.pack_state({'b': torch.arange(5.0), 'a': {3: (1, 2.5)},"
        "'n': np.arange(4)})))"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    state = {"b": torch.arange(5.0), "a": {3: (1, 2.5)}, "n": np.arange(4)}
    assert hashes == {_core.hash_state(_core.pack_state(state)) + "\n"}


# --- refusals -------------------------------------------------------------------


class Text(str):
    pass


Point = collections.namedtuple("Point", "x y")

REFUSED: list[tuple[Any, str]] = [
    ({1, 2}, "is of type set;"),
    (frozenset(), "is of type frozenset;"),
    (3j, "is of type complex;"),
    (bytearray(b"x"), "is of type bytearray;"),
    (range(3), "is of type range;"),
    (object(), "is of type object;"),
    (type("torch.Size", (), {})(), ".torch.Size;"),
    (len, "is of type builtin_function_or_method;"),
    (Point(1, 2), "Point"),
    (Text("x"), "Text"),
    (collections.defaultdict(list), "is of type collections.defaultdict;"),
    (torch.float32, "is of type torch.dtype;"),
    (torch.device("cpu"), "is of type torch.device;"),
    (torch.ones(2, dtype=torch.complex128), "torch.complex128"),
    (torch.ones(2).to(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
    (torch.eye(2).to_sparse(), "torch.sparse_coo"),
    (torch.ones(2, device="meta"), "device meta"),
    (torch.nn.UninitializedParameter(), "UninitializedParameter"),
    (np.ones(2, dtype=np.complex128), "complex128"),
    (np.ones(2, dtype=np.longdouble), "float128"),
    (np.ones(2, dtype=">f4"), ">f4"),
    (np.array([None]), "object"),
    (np.array(["a"]), "<U1"),
    (np.array([1], dtype="M8[s]"), "datetime64"),
    (np.ones(2, dtype=[("a", "f4")]), "'a'"),
    (np.ma.ones(2), "MaskedArray"),
    (np.longdouble(1), "numpy.longdouble"),
    (np.str_("x"), "numpy.str_"),
    (np.complex128(1), "numpy.complex128"),
    ("\ud800", "lone surrogate"),
    ({"\ud800": 1}, "lone surrogate"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_errors_name_values_that_cannot_be_packed(value: Any, message: str) -> None:
    with pytest.raises(StateError, match=r"^cannot pack the state: the \w+ at the top") as caught:
        _core.pack_state(value)
    assert message in str(caught.value)
    with pytest.raises(StateError, match=r"^cannot pack the state: the \w+ at '/a/b~1/1"):
        _core.pack_state({"a": {"b/": [0, value]}})


@pytest.mark.parametrize("key", [torch.ones(1), frozenset([1]), Point(1, 2)])
def test_errors_name_invalid_keys(key: Any) -> None:
    for bad in (key, (1, key)):
        with pytest.raises(StateError, match=r"at '/x.* in a key; keys are made of"):
            _core.pack_state({"x": {bad: 1}})


def test_a_list_that_holds_itself() -> None:
    loop: list[Any] = []
    loop.append({"a": loop})
    with pytest.raises(StateError, match="nested too deep, or contains itself"):
        _core.pack_state(loop)


def test_deep_nesting() -> None:
    state: Any = 1
    for _ in range(99):
        state = {(1,): [state]}
    assert same(round_trip(state), state)
    with pytest.raises(StateError, match="nested too deep"):
        _core.pack_state([state, [[state]]])


def test_exceptions_from_tensors_come_with_their_place() -> None:
    class Broken(Other):
        def __dlpack__(self) -> Any:
            raise ValueError("no memory today")

    with pytest.raises(StateError, match="the tensor at '/x' no memory today"):
        _core.pack_state({"x": Broken(np.ones(1))})

    class Interrupted(Other):
        def __dlpack__(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _core.pack_state({"x": Interrupted(np.ones(1))})


# --- load_into ------------------------------------------------------------------


def test_load_into_copies_in_place() -> None:
    def make(value: float) -> dict[str, Any]:
        return {
            "net": {
                "w": torch.nn.Parameter(torch.full((3, 4), value)),
                "t": torch.full((4, 3), value).t(),
                "cl": torch.full((2, 3, 4, 5), value).to(memory_format=torch.channels_last),
            },
            "step": value,
            "n": [np.full((2, 3), value)[:, ::-1], np.full(3, value)[::-1]],
            "empty": torch.ones(0),
        }

    live, packed = make(1.0), _core.pack_state(make(2.0))
    tensors = [live["net"]["w"], live["net"]["t"], live["n"][0], live["n"][1]]
    back = _core.load_into(packed, live)
    assert same(back, _core.unpack_state(packed) | {"net": make(2.0)["net"]})
    assert back["step"] == 2
    assert live["step"] == 1
    assert back["net"]["w"] is tensors[0]
    assert back["net"]["t"] is tensors[1]
    assert back["n"][0] is tensors[2]
    assert back["n"][1] is tensors[3]
    assert back["net"]["cl"].is_contiguous(memory_format=torch.channels_last)


LIVE = {"a": torch.zeros(2, 3), "b": {"c": np.zeros(3), "d": torch.zeros(2, dtype=torch.int64)}}
MISFITS: list[Any] = [
    {},
    {**LIVE, "more": torch.zeros(1)},
    {"a": LIVE["a"]},
    {**LIVE, "a": torch.zeros(3, 2)},
    {**LIVE, "a": torch.zeros(2, 3, 1)},
    {**LIVE, "a": torch.zeros(2, 3, dtype=torch.float64)},
    {**LIVE, "a": np.zeros((2, 3), dtype=np.float32)},
    {**LIVE, "a": torch.zeros(1).expand(2, 3)},
    {**LIVE, "a": torch.zeros(6).as_strided((2, 3), (2, 1))},
    {"x": LIVE["a"], "b": LIVE["b"]},
    [LIVE["a"], LIVE["b"]],
]


@pytest.mark.parametrize("state", MISFITS, ids=range(len(MISFITS)))
def test_load_into_changes_nothing_if_it_does_not_fit(state: Any) -> None:
    source = {
        "a": torch.ones(2, 3),
        "b": {"c": np.ones(3), "d": torch.ones(2, dtype=torch.int64)},
    }
    before = _core.hash_state(_core.pack_state(state))
    assert _core.load_into(_core.pack_state(source), state) is None
    assert _core.hash_state(_core.pack_state(state)) == before


def test_load_into_leaves_read_only_arrays_alone() -> None:
    live = {"n": np.zeros(3)}
    live["n"].flags.writeable = False
    assert _core.load_into(_core.pack_state({"n": np.ones(3)}), live) is None
    assert live["n"].tolist() == [0, 0, 0]


def test_load_into_of_a_lazy_view_does_not_fit() -> None:
    z = torch.zeros(2, dtype=torch.complex64)
    packed = _core.pack_state({"z": torch.ones(2, dtype=torch.complex64)})
    assert _core.load_into(packed, {"z": z.conj()}) is None


def test_load_into_errors() -> None:
    with pytest.raises(StateError):
        _core.load_into(_core.pack_state({}), {"x": {1}})
    with pytest.raises(CorruptDataError, match="epoch-3 is corrupt"):
        _core.load_into(b"", {}, name="epoch-3")


# --- corrupt buffers ------------------------------------------------------------

SMALL = {"w": torch.ones(3), "n": np.ones((2, 1), dtype=np.int16), 1: (0.5, -(2**70)), "b": b"\x01"}


def test_a_state_cut_at_any_byte() -> None:
    packed = bytes(_core.pack_state(SMALL))
    for n in range(len(packed)):
        with pytest.raises(CorruptDataError, match="my state is corrupt"):
            _core.unpack_state(packed[:n], name="my state")
    with pytest.raises(CorruptDataError):
        _core.unpack_state(packed + b"\0")
    assert same(_core.unpack_state(packed), SMALL)


def test_any_bit_flipped_is_found_or_harmless() -> None:
    packed = bytes(_core.pack_state(SMALL))
    for at in range(len(packed)):
        for bit in range(8):
            damaged = bytearray(packed)
            damaged[at] ^= 1 << bit
            assert _core.hash_state(damaged) != _core.hash_state(packed)
            with contextlib.suppress(CorruptDataError):
                _core.unpack_state(damaged)


TOKENS = [
    *('{"$":"', '"v":', '"dtype":"float32"', '"tuple"', '"dict"', '"ordered"', '"counter"'),
    *('"float"', '"int"', '"bytes"', '"scalar"', '"size"', '"torch"', '"numpy"', '"jax"'),
    *("[", "]", "{", "}", ",", ":", '"', "[[", "]]", "null", "true", "-1", "1e999", "0.5", "\\u"),
    *('{"$":"numpy"}', '{"$":"torch"}', '"w"', '"p":"#"', "9" * 20, "\\ud800", "\x00", "\xe9"),
]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_change_of_the_structure_is_found_or_harmless(data: Any) -> None:
    """The tensors stay as they are; what says how they hang together is cut up and mixed."""
    header = header_of(_core.pack_state(SMALL))
    tensors = {name: value for name, value in header.items() if name != "__metadata__"}
    text = header["__metadata__"]["cerebro"]
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        stop = data.draw(st.integers(start, min(len(text), start + 12)))
        middle = "".join(data.draw(st.lists(st.sampled_from(TOKENS), max_size=3)))
        text = text[:start] + middle + text[stop:]
    packed = bytes(_core.pack_state(SMALL))
    begin = 8 + struct.unpack("<Q", packed[:8])[0]
    changed = with_header({"__metadata__": {"cerebro": text}, **tensors}, packed[begin:])
    with contextlib.suppress(CorruptDataError):
        _core.pack_state(_core.unpack_state(changed))
    with contextlib.suppress(CorruptDataError):
        _core.load_into(changed, _core.unpack_state(packed))


ONE = ("F32", [1], b"abcd")
META = {"cerebro": '{"$":"torch"}'}
BROKEN: dict[str, bytes] = {
    "empty": b"",
    "header longer than the file": struct.pack("<Q", 100) + b"{}",
    "header longer than anything": struct.pack("<Q", 2**64 - 1) + b"{}",
    "no object": with_header(b"[]"),
    "not JSON": with_header(b"{nope}"),
    "invalid UTF-8": with_header(b'{"\xff": 1}'),
    "no metadata": with_header({}),
    "metadata of others": with_header({"__metadata__": {"format": "pt"}}),
    "metadata no object": with_header({"__metadata__": []}),
    "metadata no string": with_header({"__metadata__": {"cerebro": 1}}),
    "metadata twice": with_header(
        b'{"__metadata__":{"cerebro":"1"},"__metadata__":{"cerebro":"1"}}'
    ),
    "structure twice": with_header(b'{"__metadata__":{"cerebro":"1","cerebro":"1"}}'),
    "lone surrogate": with_header(b'{"__metadata__":{"cerebro":"\\ud800"}}'),
    "unknown dtype": file_of('{"$":"torch"}', **{"": ("F8", [4], b"abcd")}),
    "long dtype": file_of('{"$":"torch"}', **{"": ("F" * 90, [4], b"abcd")}),
    "shape and offsets differ": file_of('{"$":"torch"}', **{"": ("F32", [2], b"abcd")}),
    "shape overflows": file_of('{"$":"torch"}', **{"": ("F32", [2**62, 2**62, 2**62], b"")}),
    "shape negative": file_of('{"$":"torch"}', **{"": ("F32", [-1], b"abcd")}),
    "shape fraction": file_of('{"$":"torch"}', **{"": ("F32", [1.5], b"abcd")}),  # type: ignore
    "too many dimensions": file_of('{"$":"torch"}', **{"": ("F32", [1] * 65, b"abcd")}),
    "data missing": file_of('{"$":"torch"}', **{"": ONE})[:-1],
    "data too long": file_of('{"$":"torch"}', **{"": ONE}) + b"x",
    "a hole": with_header(
        {"__metadata__": META, "": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, b"ab"
    ),
    "an overlap": with_header(
        {
            "__metadata__": {"cerebro": '[{"$":"torch"},{"$":"torch"}]'},
            "/0": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
            "/1": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]},
        },
        b"abc",
    ),
    "offsets backwards": with_header(
        {"__metadata__": META, "": {"dtype": "U8", "shape": [1], "data_offsets": [1, 0]}}, b""
    ),
    "offsets huge": with_header(
        {"__metadata__": META, "": {"dtype": "U8", "shape": [1], "data_offsets": [2**64, 1]}}
    ),
    "three offsets": with_header(
        {"__metadata__": META, "": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, b"a"
    ),
    "a member missing": with_header(
        {"__metadata__": META, "": {"dtype": "U8", "data_offsets": [0, 0]}}
    ),
    "a member unknown": with_header(
        {
            "__metadata__": META,
            "": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0], "x": 1},
        }
    ),
    "a name twice": with_header(
        b'{"__metadata__":{"cerebro":"{\\"$\\":\\"torch\\"}"},'
        b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
        b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    ),
    "tensor not in the structure": file_of("1", **{"": ONE}),
    "tensor not in the file": file_of('{"$":"torch"}'),
    "tensor named twice": file_of(
        '{"$":"dict","v":[[0,{"$":"numpy"}],["0",{"$":"numpy"}]]}', **{"/0": ONE}
    ),
    "structure empty": file_of(""),
    "structure cut": file_of("[1"),
    "structure followed": file_of("1 2"),
    "structure too deep": file_of("[" * 3000),
    "tag unknown": file_of('{"$":"set","v":[]}'),
    "tag no string": file_of('{"$":1}'),
    "tag followed": file_of('{"$":"tuple","v":[],"w":1}'),
    "tuple without": file_of('{"$":"tuple"}'),
    "tuple no array": file_of('{"$":"tuple","v":1}'),
    "pairs no array": file_of('{"$":"dict","v":[1]}'),
    "pair short": file_of('{"$":"dict","v":[[1]]}'),
    "pair long": file_of('{"$":"dict","v":[[1,2,3]]}'),
    "prefix no string": file_of('{"$":"dict","p":1,"v":[]}'),
    "key twice": file_of('{"a":1,"a":2}'),
    "pair twice": file_of('{"$":"dict","v":[[1,2],[1,3]]}'),
    "ordered twice": file_of('{"$":"ordered","v":[["a",2],["a",3]]}'),
    "bytes odd": file_of('{"$":"bytes","v":"123"}'),
    "bytes no hex": file_of('{"$":"bytes","v":"xy"}'),
    "float unknown": file_of('{"$":"float","v":"big"}'),
    "float overflows": file_of("1e999"),
    "integer too long": file_of("9" * 30),
    "integer broken": file_of('{"$":"int","v":"zz"}'),
    "scalar short": file_of('{"$":"scalar","dtype":"float32","v":"00"}'),
    "scalar dtype": file_of('{"$":"scalar","dtype":"float3","v":"00"}'),
    "scalar long dtype": file_of('{"$":"scalar","dtype":"float3float3float3float3","v":"00"}'),
    "size of strings": file_of('{"$":"size","v":["a"]}'),
    "size of a tensor": file_of(
        '{"$":"size","v":[{"$":"torch"}]}', **{"/0": ("I64", [], bytes(8))}
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(name: str) -> None:
    with pytest.raises(CorruptDataError, match="the file is corrupt"):
        _core.unpack_state(BROKEN[name], name="the file")


def test_unhashable_keys_in_a_broken_file() -> None:
    with pytest.raises(CorruptDataError):
        _core.unpack_state(file_of('{"$":"dict","v":[[[1],2]]}'))


def test_equivalent_headers_of_other_writers_are_read() -> None:
    """Order of members, white space and escapes are free; data need not be aligned."""
    data = with_header(
        b' {"\\u002fa" : {"data_offsets":[1,5], "shape": [ 1 ],"dtype":"F32"},\n'
        b'"/b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"__metadata__":{"format":"pt","cerebro":"{\\"a\\":{\\"$\\":\\"numpy\\"},'
        b'\\"b\\":{\\"$\\":\\"numpy\\"}}"}}',
        b"\x07" + struct.pack("f", 2.5),
    )
    for copy in (True, False):
        back = _core.unpack_state(data, copy=copy)
        assert back["a"].tolist() == [2.5]
        assert back["b"].tolist() == [7]


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="unknown framework 'tf'"):
        _core.unpack_state(b"", "tf")
    with pytest.raises(TypeError):
        _core.unpack_state("text")
    with pytest.raises(TypeError):
        _core.StateBuffer()


def test_nothing_is_leaked() -> None:
    weak = []
    import weakref

    class Holder(Other):
        pass

    for _ in range(3):
        holder = Holder(np.ones(10))
        weak.append(weakref.ref(holder))
        _core.pack_state({"x": holder, "y": [torch.ones(3)]})
        with pytest.raises(StateError):
            _core.pack_state({"x": holder, "y": {1}})
        assert _core.load_into(_core.pack_state([holder.array]), [holder]) is None
        del holder
    gc.collect()
    assert all(ref() is None for ref in weak)
    counts = []
    for _ in range(4):
        for _ in range(20):
            round_trip({"a": torch.ones(3), "b": (1.5, "x"), 3: np.ones(2)})
            with pytest.raises(CorruptDataError):
                _core.unpack_state(BROKEN["tensor not in the structure"])
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[1] == counts[3]


TABLE = """
import ctypes, sys
import torch
from cerebro import _core

get = ctypes.pythonapi.PyCapsule_GetPointer
get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
table = get(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
# The header is a version and a pointer; then come the functions.
words = (ctypes.c_void_p * 8).from_address(table)
PLACE = 4  # managed_tensor_to_py_object_no_sync
Function = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
deletes = sys.argv[1] == "True"

@Function
def fails(managed, out):
    if deletes:  # version (8 bytes), manager_ctx, deleter
        deleter = ctypes.c_void_p.from_address(managed + 16).value
        Deleter(deleter)(managed)
    return -1  # without an exception, which ctypes would take away

packed = _core.pack_state({"x": torch.zeros(1000)})
before, words[PLACE] = words[PLACE], ctypes.cast(fails, ctypes.c_void_p).value
for copy in (True, False) * 50:
    try:
        _core.unpack_state(packed, "torch", copy=copy)
    except SystemError:
        pass
    else:
        sys.exit("it did not fail")
words[PLACE] = before
assert _core.unpack_state(packed, "torch")["x"].sum() == 0
"""


@pytest.mark.parametrize("deletes", [False, True])
def test_a_tensor_that_torch_cannot_make_is_freed_once(deletes: bool) -> None:
    """Whether it has called the deleter by then or not."""
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no exchange table")
    subprocess.run([sys.executable, "-c", TABLE, str(deletes)], check=True, timeout=120)

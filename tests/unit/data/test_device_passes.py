"""Batches, metrics and states of models on a GPU, with host memory in its place."""

from __future__ import annotations

import math
import random
import warnings
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest

import cerebro
import cerebro._core as _core
from cerebro.data import depots
from cerebro.data.depots import MovedBatches, move_batch
from cerebro.errors import DeviceError, UnitCancelled
from cerebro.machine import cuda
from cerebro.machine.flags import compute_settings, note_operations, operation_of
from cerebro.worker import evaluate as device_values
from cerebro.worker import gpu as device_states
from cerebro.worker.evaluate import run_batches
from cerebro.worker.gpu import StateArena
from cerebro.worker.models import make_batches

torch = pytest.importorskip("torch")


class Source:
    """Batches of 4, 4 and 3 rows."""

    def __init__(self):
        self.last_rows = 0
        self.closed = False

    def begin(self, mixes, epoch, start=0, count=None):
        self.begun = list(mixes), epoch, start

    def close(self):
        self.closed = True

    def __len__(self):
        return 3

    def __iter__(self):
        for rows in (4, 4, 3):
            self.last_rows = rows
            yield {"x": torch.arange(rows), "names": ["a"] * rows}


@pytest.fixture
def elsewhere(monkeypatch):
    """Tensors in host memory count as those of a GPU."""
    monkeypatch.setattr(
        device_values,
        "_is_scalar_elsewhere",
        lambda value: isinstance(value, torch.Tensor) and value.numel() == 1,
    )
    monkeypatch.setattr(device_states, "_is_away", lambda _, value: isinstance(value, torch.Tensor))


def values_of(kind):
    numbers = iter([0.1, 1 / 3, 7e-9])

    def step(batch):
        value = torch.tensor(next(numbers), dtype=kind)
        mean = torch.tensor([0.5], dtype=torch.float64)
        return {"loss": value, "n": 2, "pair": (mean, torch.tensor(3)), "own": (0.25, 8)}

    return step


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_deferred_sums_equal_sums_of_values_read_at_once(elsewhere, kind):
    now = run_batches(Source(), values_of(kind))
    later = run_batches(Source(), values_of(kind), device="cuda:0")
    assert later.sums == now.sums
    assert (later.rows, later.batches) == (now.rows, now.batches) == (11, 3)
    assert later.sums["pair"] == (0.5 * 9, 9.0)


def test_a_value_that_is_not_finite_is_found_with_its_batch(elsewhere):
    losses = iter([1.0, math.inf, math.nan])
    result = run_batches(Source(), lambda _: {"loss": torch.tensor(next(losses))}, device="cuda:0")
    assert result.not_finite == {"loss": (1, math.inf)}


def test_a_metrics_dict_that_the_model_reuses_is_copied(elsewhere):
    values: dict[str, float] = {}

    def step(batch):
        values["loss"] = float(len(batch["x"]))
        return values

    assert run_batches(Source(), step, device="cuda:0").sums == {"loss": (4 * 4 + 4 * 4 + 9, 11)}


@pytest.mark.parametrize("returned", [{"loss": "much"}, 3, {"loss": torch.zeros(2)}, {3: 1.0}])
def test_wrong_values_are_refused_as_on_the_cpu(elsewhere, returned):
    with pytest.raises(TypeError) as now:
        run_batches(Source(), lambda _: returned)
    with pytest.raises(TypeError) as later:
        run_batches(Source(), lambda _: returned, device="cuda:0")
    assert str(later.value) == str(now.value)


def test_a_step_may_return_nothing(elsewhere):
    result = run_batches(Source(), lambda _: None, device="cuda:0")
    assert (result.rows, result.sums) == (11, {})


def test_batches_are_counted_and_cancelled_once(elsewhere):
    page = _core.BeatPage()
    run_batches(Source(), lambda _: {"loss": 1.0}, beat=page, device="cuda:0")
    assert page.batches == 3
    page.cancel()
    with pytest.raises(UnitCancelled):
        run_batches(Source(), lambda _: {"loss": 1.0}, beat=page, device="cuda:0")


# --- batches ---------------------------------------------------------------------


def test_moved_batches_match_those_of_the_loader():
    class Iterating(Source):
        def __iter__(self):
            self._batches = super().__iter__()
            return self

        def __next__(self):
            return next(self._batches)

    source = Iterating()
    batches = MovedBatches(source, "meta")
    batches.begin([2, 0], 3, 1)
    assert source.begun == ([2, 0], 3, 1)
    iter(source)
    found = [(batches.last_rows, batch) for batch in batches]
    assert [rows for rows, _ in found] == [4, 4, 3]
    assert all(batch["x"].device.type == "meta" for _, batch in found)
    assert found[2][1]["names"] == ["a"] * 3
    assert len(batches) == 3
    batches.close()
    assert source.closed


def test_pytorch_moves_batches_without_the_cuda_runtime(tmp_path, monkeypatch, caplog):
    data = cerebro.shard({"x": np.arange(12.0)}, tmp_path / "d", shards=2)

    def unusable():
        raise DeviceError("no CUDA runtime")

    monkeypatch.setattr(cuda, "open_runtime", unusable)
    monkeypatch.setattr(depots, "find_problem", depots.find_problem.__wrapped__)
    model = SimpleNamespace(framework="torch")
    with caplog.at_level("WARNING", "cerebro.data"):
        made = make_batches(model, data, 4, "cuda:0", seed=1)
    assert isinstance(made, MovedBatches)
    assert "no CUDA runtime" in caplog.text
    model.framework = "numpy"
    assert isinstance(make_batches(model, data, 4, "cuda:0", seed=1), _core.Loader)


def test_tensors_already_on_the_device_are_not_copied():
    batch = {"x": torch.zeros(2), "y": np.zeros(2)}
    there = move_batch(batch, torch.device("cpu"))
    assert there["x"] is batch["x"] and there["y"] is batch["y"]


# --- states ----------------------------------------------------------------------


def state():
    torch.manual_seed(0)
    weight = torch.randn(6, 4).t()  # not contiguous
    return {
        "model": OrderedDict(
            weight=weight,
            channels=torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            half=torch.randn(5).to(torch.bfloat16),
            flags=torch.tensor([True, False, True]),
            counts=torch.tensor(7),
            nothing=torch.zeros(0, 3),
            twice=[weight, weight.T],
            rates=(0.1, {"betas": (0.9, 0.999)}),
        ),
        "generators": {"numpy": np.arange(9, dtype=np.uint32)},
    }


def test_a_state_through_the_arena_packs_to_the_same_bytes(elsewhere):
    tree = state()
    arena = StateArena(pin=False)
    hosted = arena.to_host(tree)
    assert bytes(_core.pack_state(hosted)) == bytes(_core.pack_state(tree))
    low = arena._memory.data_ptr()
    inside = hosted["model"]["weight"].data_ptr()
    assert low <= inside < low + arena.nbytes  # one arena for all of them
    assert type(hosted["model"]) is OrderedDict and isinstance(hosted["model"]["rates"], tuple)


def copies_to_the_arena(monkeypatch):
    """The bytes of each copy from the device to the arena, noted as it is made."""
    sizes, copy_out = [], device_states._copy_out

    def noted(place, tensor):
        sizes.append(tensor.nbytes)
        copy_out(place, tensor)

    monkeypatch.setattr(device_states, "_copy_out", noted)
    return sizes


def test_small_tensors_leave_in_one_copy_and_large_ones_by_themselves(monkeypatch, elsewhere):
    sizes = copies_to_the_arena(monkeypatch)
    large = device_states.LARGE // 4
    tree = {"first": torch.randn(large), **state(), "last": torch.randn(1, large + 1).t()}
    hosted = StateArena(pin=False).to_host(tree)
    assert bytes(_core.pack_state(hosted)) == bytes(_core.pack_state(tree))
    together, *alone = sizes
    assert alone == [4 * large, 4 * (large + 1)]
    assert together < 8 * device_states.ALIGNMENT + 3 * 4 * 96


def test_no_bit_of_a_number_changes_on_its_way(elsewhere):
    """Also of those that arithmetic changes: NaNs with a payload, and views as conjugates."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    signalling = torch.full((5,), 0x7F800001, dtype=torch.int32)
    complex_ = torch.randn(2, 3, dtype=torch.complex64)
    tree = {
        "bfloat16": bits.view(torch.bfloat16),
        "float16": bits.view(torch.float16),
        "float32": signalling.view(torch.float32),
        "float8": bits.view(torch.uint8)[:256].view(torch.float8_e5m2),
        "complex": torch.randn(3, dtype=torch.complex128),
    }
    hosted = StateArena(pin=False).to_host({**tree, "conjugate": complex_.conj()})
    for name, value in tree.items():
        assert torch.equal(hosted[name].view(torch.uint8), value.view(torch.uint8)), name
    assert torch.equal(hosted["conjugate"], complex_.conj())


def test_if_memory_is_short_each_tensor_leaves_by_itself(monkeypatch, elsewhere):
    def allocate(*_):
        raise torch.cuda.OutOfMemoryError

    sizes = copies_to_the_arena(monkeypatch)
    monkeypatch.setattr(device_states, "_allocate", allocate)
    tree = state()
    hosted = StateArena(pin=False).to_host(tree)
    assert len(sizes) == 7
    assert bytes(_core.pack_state(hosted)) == bytes(_core.pack_state(tree))


def test_a_state_without_tensors_has_nothing_to_move(elsewhere):
    tree = {"count": 3, "numbers": np.arange(3)}
    for moved in (StateArena().to_host(tree), StateArena().to_device(tree, "cpu")):
        assert moved["count"] == 3 and moved["numbers"].tolist() == [0, 1, 2]


def test_a_state_comes_back_from_a_slot_that_is_packed_into_again(tmp_path, elsewhere):
    tree = state()
    slots = _core.Slots(str(tmp_path / "0"), True)
    slots.pack(tree, attempt=1)
    slots.commit(1)
    arena = StateArena(pin=False)
    found = arena.to_device(_core.unpack_state(slots.view(), "torch", copy=None), "cpu")
    for position in (2, 3):
        slots.pack({"model": torch.full((400,), 7.0)}, attempt=1)
        slots.commit(position)
    assert bytes(_core.pack_state(found)) == bytes(_core.pack_state(tree))


def test_a_loaded_state_does_not_share_the_arenas_memory(elsewhere):
    """Adam keeps the tensors that it is given; the next state goes through the same arena."""
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(2):
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    arena = StateArena(pin=False)
    tree = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
    expected = bytes(_core.pack_state(tree))
    found = arena.to_device(_core.unpack_state(expected, "torch"), "cpu")
    optimizer.load_state_dict(found["optimizer"])
    arena.to_host({"other": torch.full((arena.nbytes // 4,), 7.0)})
    again = {"net": found["net"], "optimizer": optimizer.state_dict()}
    assert bytes(_core.pack_state(again)) == expected


def test_the_arena_grows_and_is_used_again(elsewhere):
    arena = StateArena(pin=False)
    assert arena.nbytes == 0
    arena.to_host({"a": torch.zeros(10)})
    small = arena.nbytes
    arena.to_host({"a": torch.zeros(10_000)})
    large = arena.nbytes
    place = arena._memory.data_ptr()
    arena.to_host({"a": torch.zeros(10)})
    assert small < large == arena.nbytes and arena._memory.data_ptr() == place


def test_a_state_in_host_memory_is_passed_through():
    tree = state()
    assert StateArena().to_host(tree) is tree


def test_without_pinned_memory_the_arena_uses_ordinary_memory(monkeypatch, caplog, elsewhere):
    ordinary = torch.empty

    def empty(*args, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("out of pinned memory")
        return ordinary(*args, **options)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(cuda, "_unpinned", [])
    arena = StateArena()
    for size in (5, 5000):
        assert arena.to_host({"a": torch.arange(size)})["a"].tolist() == list(range(size))
    assert caplog.text.count("no pinned host memory (out of pinned memory)") == 1


def test_without_pinned_memory_batches_are_moved_directly(monkeypatch, caplog):
    class Batch:
        device = torch.device("cpu")

        def is_pinned(self):
            return False

        def pin_memory(self):
            raise RuntimeError("out of pinned memory")

        def to(self, device, non_blocking):
            return device, non_blocking

    monkeypatch.setattr(cuda, "_unpinned", [])
    for _ in range(2):  # and the copy is waited for
        assert move_batch({"x": Batch()}, "cuda:0") == {"x": ("cuda:0", False)}
    assert caplog.text.count("no pinned host memory (out of pinned memory)") == 1


# --- settings ----------------------------------------------------------------------


def flags():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
    )


@pytest.mark.parametrize(
    ("deterministic", "device", "inside"),
    [
        ("warn", "cuda:0", (True, True, True, False)),
        (True, "cuda:0", (True, False, True, False)),
        (False, "cuda:0", (False, False, False, True)),
        ("warn", "cpu", (False, False, False, True)),
        (True, "cpu", (True, False, False, True)),
    ],
)
def test_deterministic_settings_hold_within_a_unit(monkeypatch, deterministic, device, inside):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = flags()
    with pytest.raises(ZeroDivisionError), compute_settings(1, deterministic, device):
        assert flags() == inside
        raise ZeroDivisionError
    assert flags() == before == (False, False, False, True)


LONG = (
    " does not have a deterministic implementation, but you set "
    "'torch.use_deterministic_algorithms(True, warn_only=True)'. You can file an issue."
)


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("scatter_add_cuda_kernel" + LONG, "scatter_add_cuda_kernel"),
        (
            "Memory Efficient attention defaults to a non-deterministic algorithm. To explicitly "
            "enable determinism call torch.use_deterministic_algorithms(True, warn_only=False).",
            "memory efficient attention",
        ),
        (
            "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms"
            "(True)` or `at::Context::setDeterministicAlgorithms(true)`, but this operation is not "
            "deterministic because it uses CuBLAS and you have CUDA >= 10.2.",
            "cuBLAS without CUBLAS_WORKSPACE_CONFIG",
        ),
        ("lr_scheduler.step() was called before optimizer.step()", None),
    ],
)
def test_operation_names_are_parsed_from_warnings(message, name):
    assert operation_of(message) == name


def test_only_nondeterminism_warnings_are_recorded_instead_of_shown():
    found: set[str] = set()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with note_operations(found):
            for _ in range(2):
                warnings.warn("fold_backward" + LONG, UserWarning, stacklevel=1)
            warnings.warn("something else", UserWarning, stacklevel=1)
    assert found == {"fold_backward"}
    assert [str(item.message) for item in shown] == ["something else"]


def test_an_error_warning_filter_does_not_end_the_trial():
    found: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with note_operations(found):
            warnings.warn("fold_backward" + LONG, UserWarning, stacklevel=1)
    assert found == {"fold_backward"}


@pytest.mark.parametrize("deterministic", ["warn", True, False])
def test_strict_settings(deterministic):
    """Attention is deterministic only under such: "warn_only" takes the faster version."""
    with compute_settings(1, deterministic, "cuda:0", strict=True):
        on = deterministic is not False
        assert flags()[:2] == (on, False)
        assert torch.utils.deterministic.fill_uninitialized_memory is (deterministic != "warn")
    assert flags()[:2] == (False, False)
    with compute_settings(1, "warn", "cpu", strict=True):
        assert flags()[:2] == (False, False)


def test_a_real_pytorch_warning_is_recorded():
    found: set[str] = set()
    random.seed(0)
    with compute_settings(1, "warn", "cuda:0"), note_operations(found):
        torch.zeros(3).put_(torch.tensor([1]), torch.tensor([2.0]))
    assert found == {"put_"}

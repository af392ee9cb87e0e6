"""Random generators: captured, restored, left alone; and what a model must have."""

from __future__ import annotations

import random

import numpy as np
import pytest

import cerebro._core as _core
from cerebro.errors import InputError, StateError
from cerebro.machine import generators
from cerebro.model import check_model, framework_of, get_whole_pass

torch = pytest.importorskip("torch")


def draw():
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(()).item(),
        torch.randn(3).tolist(),
    )


@pytest.fixture(autouse=True)
def leave_generators_alone():
    with generators.preserve_generators(True):
        yield


@pytest.fixture(params=["memory", "functions"])
def either_way(request, monkeypatch):
    """States of `random` and NumPy are copied as memory, or by the libraries' functions."""
    # On every Python and NumPy that are supported.
    assert generators.find_memory() is not None
    if request.param == "functions":
        monkeypatch.setattr(generators, "find_memory", lambda: None)


def functions_state():
    python, legacy = random.getstate(), np.random.get_state(legacy=False)
    spare = legacy["gauss"] if legacy["has_gauss"] else None
    return python, legacy["state"]["key"].tolist(), legacy["state"]["pos"], spare


def test_seeding_matches_the_libraries_own_functions():
    generators.seed_all(5, True)
    got = draw()
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    assert got == draw()


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("before", [0, 1, 700])
def test_restoring_gives_the_same_numbers_again(before):
    generators.seed_all(1, True)
    for _ in range(before):
        draw()
    random.gauss(0, 1), np.random.randn()  # leave a spare normal number in both
    state = generators.capture(True)
    first = [draw() for _ in range(3)]
    generators.seed_all(2, True)
    generators.restore(_core.unpack_state(_core.pack_state(state)))
    assert [draw() for _ in range(3)] == first


@pytest.mark.usefixtures("either_way")
def test_a_state_is_small_plain_and_reproducible():
    generators.seed_all(1, True)
    one, two = generators.capture(True), generators.capture(True)
    for key, value in one.items():
        if isinstance(value, np.ndarray):
            assert value.dtype in (np.uint32, np.uint8)
            assert value.tobytes() == two[key].tobytes()
        else:
            assert value is None or isinstance(value, (int, float))
    assert sum(v.nbytes for v in one.values() if isinstance(v, np.ndarray)) < 12_000
    assert "torch" not in generators.capture(False)
    random.random(), np.random.rand(), torch.rand(())
    assert all(np.array_equal(one[key], two[key]) for key in one), "a state is a copy"


def test_a_state_of_tensors_is_restored_too():
    state = generators.capture(True)
    first = draw()
    arrays = {
        k: torch.from_numpy(v.astype(np.int64)) for k, v in state.items() if hasattr(v, "dtype")
    }
    generators.restore({**state, **arrays})
    assert draw() == first


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("draws", [0, 1, 311, 312, 623, 624, 625])
def test_states_read_from_memory_equal_those_of_the_functions(monkeypatch, draws, spare):
    generators.seed_all(draws, False)
    for _ in range(draws):
        random.getrandbits(32), np.random.randint(2**32, dtype=np.uint32)
    if spare:
        random.gauss(0, 1), np.random.randn()
    copied, wanted = generators.capture(False), functions_state()
    with monkeypatch.context() as patched:
        patched.setattr(generators, "find_memory", lambda: None)
        state = generators.capture(False)
    assert bytes(_core.pack_state(copied)) == bytes(_core.pack_state(state))
    put_back = generators.make_restorer(False)
    generators.seed_all(1, False)
    random.gauss(0, 1), np.random.randn()
    generators.restore(state)
    assert functions_state() == wanted
    generators.seed_all(1, False)
    put_back()
    assert functions_state() == wanted


def test_a_bit_generator_of_the_users_is_left_alone():
    before = np.random.get_bit_generator()
    try:
        put_back = generators.make_restorer(False)
        np.random.set_bit_generator(np.random.MT19937(3))
        assert generators.find_memory() is None
        generators.seed_all(4, False)
        state, wanted = generators.capture(False), functions_state()
        np.random.rand(5)
        generators.restore(state)
        assert functions_state() == wanted
        put_back()
        assert functions_state() != wanted
    finally:
        np.random.set_bit_generator(before)
    assert generators.find_memory() is not None


@pytest.mark.usefixtures("either_way")
def test_a_preserved_block_leaves_no_trace():
    generators.seed_all(1, True)
    wanted = draw()
    generators.seed_all(1, True)
    with pytest.raises(KeyError), generators.preserve_generators(True, seed=9):
        seeded = draw()
        raise KeyError
    assert draw() == wanted
    generators.seed_all(9, True)
    assert draw() == seeded


@pytest.mark.usefixtures("either_way")
def test_a_preserved_block_keeps_the_spare_numbers():
    generators.seed_all(1, True)
    random.gauss(0, 1), np.random.randn()
    state = generators.capture(True)
    wanted = draw()
    generators.restore(state)
    with generators.preserve_generators(True, seed=3):
        draw()
    assert draw() == wanted


def test_a_seed_is_not_kept_for_devices_that_have_not_started(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch, "manual_seed", seeded.append)
    for name in ("mps", "xpu", "mtia"):
        monkeypatch.delattr(torch, name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with generators.preserve_generators(True, seed=3):
        assert not seeded
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: "state")
    monkeypatch.setattr(torch.cuda, "set_rng_state", seeded.append)
    with generators.preserve_generators(True, seed=3):
        assert seeded == [3]
    assert seeded == [3, "state"]


@pytest.mark.usefixtures("either_way")
def test_a_wrong_state_is_refused():
    state = generators.capture(False)
    far = state["python"].copy()
    far[-1] = 625
    for bad in (
        {},
        {"python": [1, 2], "python_gauss": None},
        state | {"python": far},
        state | {"python": state["python"][1:]},
        state | {"python": state["python"].astype(float)},
        state | {"python": -state["python"].astype(np.int64)},
        state | {"numpy": state["numpy"][1:]},
        state | {"numpy_position": 625},
        state | {"numpy_position": -1},
        state | {"numpy_position": "1"},
        state | {"numpy_gauss": "1"},
    ):
        wanted = functions_state()
        with pytest.raises(StateError, match="not a state of the random generators"):
            generators.restore(bad)
        assert functions_state() == wanted


class NumpyModel:
    framework = "numpy"

    def __init__(self):
        self.weights = np.zeros(3)

    def train_batch(self, batch):
        self.weights += batch["x"].mean(axis=0)

    def eval_batch(self, batch):
        return {"loss": float(self.weights.sum())}

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights[...] = state["weights"]


def test_torch_use_is_detected_from_a_models_attributes():
    model = NumpyModel()
    assert not generators.uses_torch(model)
    model.parts = [{"net": torch.nn.Linear(1, 1)}]
    assert generators.uses_torch(model)
    model.parts, model.weights = None, torch.zeros(3)
    assert generators.uses_torch(model)
    model.weights, model.framework = np.zeros(3), "torch"
    assert generators.uses_torch(model)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "returned None"),
        (torch.nn.Linear(1, 1), r"Linear, which has no train_batch .*cerebro\.torch\.Model"),
        ((1, 2), "return one object"),
        (type("M", (NumpyModel,), {"state_dict": None})(), "no state_dict method"),
        (type("M", (NumpyModel,), {"eval_batch": None})(), "no eval_batch method"),
        (type("M", (NumpyModel,), {"framework": "mxnet"})(), "framework='mxnet'"),
    ],
)
def test_an_invalid_model_is_refused(model, message):
    with pytest.raises(InputError, match=message):
        check_model(model)


def test_optional_methods_and_framework_of_a_model():
    class Whole(NumpyModel):
        def evaluate(self, batches):
            return {"loss": 0.0}

    assert get_whole_pass(NumpyModel()) is None
    assert get_whole_pass(Whole())([]) == {"loss": 0.0}
    assert framework_of(NumpyModel()) == "numpy" and framework_of(object()) == "dlpack"
    check_model(Whole())

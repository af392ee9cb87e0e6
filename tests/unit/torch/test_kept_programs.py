"""Programs are taken over by models of one architecture; states are those of ordinary steps."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")
from test_default_recording import BATCHES, data, made, train  # noqa: E402
from test_recorded_step import (  # noqa: E402
    adam,
    adamw,
    adamw_foreach,
    adamw_fused,
    cosine,
    gru,
    mlp,
    sgd_nesterov,
    with_batch_norm,
    with_dropout,
)
from torch import nn  # noqa: E402

from cerebro.torch import kept_programs as kept_module  # noqa: E402
from cerebro.torch import recorded_step  # noqa: E402
from cerebro.torch.cpu_program import Program  # noqa: E402
from cerebro.torch.cpu_recorder import Recording  # noqa: E402
from cerebro.torch.kept_programs import kept_programs  # noqa: E402
from cerebro.torch.nested_arguments import address_of  # noqa: E402


@pytest.fixture(autouse=True)
def never_timed(monkeypatch):
    monkeypatch.setattr(recorded_step, "CHECK_COST", float("-inf"))
    monkeypatch.setattr(recorded_step, "TAKE_COST", float("-inf"))
    monkeypatch.setattr(recorded_step, "LONGEST_STEP", float("inf"))


def collected(monkeypatch, kind):
    """Return a list to which every new object of a class is added."""
    found = []
    make = kind.__init__

    def collect(self, *arguments):
        found.append(self)
        make(self, *arguments)

    monkeypatch.setattr(kind, "__init__", collect)
    return found


@pytest.fixture
def built(monkeypatch):
    """Collect the programs that are made from recordings."""
    return collected(monkeypatch, Program)


def reseeded(model, seed):
    """Give a model other weights, as those of another trial."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.net.parameters():
            parameter.normal_(0, 0.3)
    return model


def pair(seed=5, **options):
    return [reseeded(made(graph, **options), seed) for graph in (None, False)]


def same(recorded, ordinary, **options):
    assert train(recorded, **options) == train(ordinary, **options)
    assert recorded._recorded[0].refusal is None and recorded._recorded[0].replays


CASES = {
    "dropout": {"net": with_dropout},
    "batch norm": {"net": with_batch_norm},
    "GRU": {"net": gru},
    "Adam": {"optimizer": adam},
    "foreach": {"optimizer": adamw_foreach},
    "fused": {"optimizer": adamw_fused},
    "SGD, clipped": {"optimizer": sgd_nesterov, "clip_norm": 0.5},
    "schedule": {"optimizer": adamw, "schedule": cosine},
    "bfloat16": {"amp": "bf16"},
}


@pytest.mark.parametrize("name", CASES)
def test_a_second_trial_takes_the_programs_over(name, built):
    train(made(None, **CASES[name]), units=2)
    first = len(built)
    one, two = pair(**CASES[name])
    same(one, two, units=2)
    assert first and len(built) == first
    # It replays from its third batch on; the last shape of a unit comes once in a unit.
    assert one._recorded[0].replays > 2 * BATCHES - 12


def test_a_program_is_taken_over_for_a_promised_step(built):
    train(made(True), units=2)
    first = len(built)
    one, two = reseeded(made(True), 5), reseeded(made(False), 5)
    same(one, two, units=2)
    assert first and len(built) == first


def test_settings_that_differ_between_trials_are_set(built):
    def slower(net):
        return torch.optim.AdamW(net.parameters(), lr=3e-4, betas=(0.8, 0.95), weight_decay=0.3)

    train(made(None, optimizer=adamw), units=2)
    first = len(built)
    same(*pair(optimizer=slower), units=2)
    assert len(built) == first


def narrow():
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 3))


def wide():
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.6), nn.Tanh(), nn.Linear(8, 3))


class Scaled(nn.Module):
    """Its factor is in a container, which no list of its plain attributes has."""

    def __init__(self, factor):
        super().__init__()
        self.net = mlp()
        self.factors = [factor]

    def forward(self, x):
        return self.net(x * self.factors[0])


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"net": narrow}, {"net": wide}),
        ({"net": lambda: Scaled(1.5)}, {"net": lambda: Scaled(0.5)}),
        ({"clip_norm": 1e6}, {"clip_norm": 0.01}),
        ({"clip_norm": 1e6}, {"clip_norm": 2e6}),  # neither clips: all results are the same
    ],
)
def test_a_trial_whose_constants_differ_records_its_own(one, two, built):
    train(made(None, **one), units=2)
    first = len(built)
    same(*pair(**two), units=2)
    assert len(built) > first


def test_trials_in_turn_do_not_disturb_each_other():
    train(made(None, net=with_dropout), units=2)
    models = [reseeded(made(graph, net=with_dropout), s) for s in (5, 6) for graph in (None, False)]
    found = [[] for _ in models]
    for unit in range(3):
        for model, values in zip(models, found, strict=True):
            torch.manual_seed(unit)
            model.begin_recorded_unit(BATCHES, 1000, training=True)
            values += [float(model.train_batch(b)["loss"]) for b in data(unit)]
            assert model.end_recorded_unit(training=True) is None
            model.end_unit()
    assert found[0] == found[1] and found[2] == found[3] and found[0] != found[2]
    assert models[0]._recorded[0].replays and models[2]._recorded[0].replays


def test_a_program_does_not_keep_its_first_model_alive():
    model = made(None)
    train(model)
    assert model._recorded[0].replays
    weights = [weakref.ref(parameter) for parameter in model.net.parameters()]
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.net.parameters()}
    held = kept_programs.held_bytes
    del model
    gc.collect()
    assert held > 0 and kept_programs.held_bytes == held
    assert [ref() for ref in weights] == [None] * len(weights)
    for _, kept in kept_programs._order.values():
        used = [t for item in kept.program._items if isinstance(item, tuple) for t in item[1]]
        assert (
            not {t.untyped_storage().data_ptr() for t in used if isinstance(t, torch.Tensor)}
            & storages
        )


def test_shared_memory_is_counted_once_and_few_programs_are_kept(monkeypatch):
    monkeypatch.setattr(kept_module, "MOST_KEPT", 2)
    one, two = made(None), made(None)
    train(one)
    train(two)
    assert one.held_bytes == two.held_bytes == 0
    assert one.shared_bytes == two.shared_bytes == kept_programs.held_bytes > 0
    train(made(None, net=narrow))
    assert len(kept_programs._order) == 2
    assert one.held_bytes > 0  # its programs are its own now


def test_another_thread_keeps_its_own(built):
    train(made(None))
    first = len(built)
    thread = threading.Thread(target=lambda: train(made(None)))
    thread.start()
    thread.join()
    assert len(built) == 2 * first


def test_addresses_of_recorded_tensors_are_known():
    recording = Recording([])
    x = torch.randn(4, 4)
    with recording:
        y = (x.t() @ x).relu()
    tensors = [tensor for call in recording.calls for tensor in call.tensors()]
    assert len(tensors) > 5
    for tensor in [*tensors, x, y, torch.zeros(1)]:
        assert recording.address_of(tensor) == address_of(tensor)
    assert recording.external(x) and not recording.external(y)

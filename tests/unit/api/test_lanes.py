"""How many trials a GPU trains at once by default, and what is said of it."""

from __future__ import annotations

import pytest

import cerebro
from cerebro.api.lanes import choose_lanes, describe_lanes, usable_memory
from cerebro.machine import devices
from cerebro.machine.devices import Device, Found
from cerebro.model import shares_gpu
from cerebro.worker.messages import ModelFacts

GB = 10**9
TWO = Found((Device("cuda:0", "A", 80 * GB, "0"), Device("cuda:1", "B", 40 * GB, "1")))


def facts(lane_bytes, *, shares=True, usable=0):
    return ModelFacts(shares_gpu=shares, lane_bytes=lane_bytes, usable_bytes=usable)


@pytest.mark.parametrize(
    ("lane_bytes", "usable", "trials", "lanes"),
    [
        (1, 80 * GB, None, 16),
        (1, 80 * GB, 100, 16),
        (1, 80 * GB, 16, 16),
        (1, 80 * GB, 15, 15),
        (1, 80 * GB, 1, 1),
        (1, 80 * GB, 0, 1),
        (5 * GB, 80 * GB, 100, 8),  # as many as fit in half
        (5 * GB + 1, 80 * GB, 100, 7),
        (5 * GB, 80 * GB, 3, 3),
        (40 * GB, 80 * GB, 100, 1),
        (41 * GB, 80 * GB, 100, 1),  # at least one, which may fail for want of memory
        (2_500_000_000, 80 * GB, None, 16),
        (2_500_000_001, 80 * GB, None, 15),
        (0, 80 * GB, 100, 1),  # unknown
        (1, 0, 100, 1),
    ],
)
def test_a_gpu_has_as_many_lanes_as_trials_that_fit(lane_bytes, usable, trials, lanes):
    assert choose_lanes(facts(lane_bytes), usable, trials) == lanes


def test_models_that_gain_nothing_have_one_lane():
    assert choose_lanes(facts(1, shares=False), 80 * GB, 100) == 1


def test_only_models_that_overlap_and_replay_graphs_share_a_gpu():
    def model(**attributes):
        return type("Model", (), attributes)()

    assert shares_gpu(model(overlaps=True, replays_graphs=True)) is True
    assert shares_gpu(model(overlaps=True)) is False
    assert shares_gpu(model(replays_graphs=True)) is False
    assert shares_gpu(model()) is False
    assert shares_gpu(cerebro.native.Model((1, 4, 4), 2)) is False


def test_a_torch_model_on_the_cpu_replays_no_graphs():
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for graph in (None, True):
        model = cerebro.torch.Model(
            net, optimizer=optimizer, loss=torch.nn.functional.mse_loss, graph=graph
        )
        assert model.replays_graphs is False


def test_memory_is_what_a_worker_saw_and_at_most_the_smallest_gpus(monkeypatch):
    monkeypatch.setattr(devices, "lookup", lambda: TWO)
    assert usable_memory(facts(1), ["cuda:0"]) == 80 * GB
    assert usable_memory(facts(1, usable=30 * GB), ["cuda:0", "cuda:1"]) == 30 * GB
    assert usable_memory(facts(1, usable=70 * GB), ["cuda:0", "cuda:1"]) == 40 * GB
    assert usable_memory(facts(1, usable=70 * GB), ["cuda:0"]) == 70 * GB


@pytest.mark.parametrize(
    ("workers", "gpus", "text"),
    [
        (1, 1, None),
        (2, 2, None),
        (1, 2, None),
        (16, 1, "16 lanes on the GPU"),
        (4, 2, "2 lanes on each GPU"),
        (3, 2, "up to 2 lanes on each GPU"),
    ],
)
def test_lanes_are_described_if_there_are_several(workers, gpus, text):
    names = [f"cuda:{number}" for number in range(gpus)]
    assert describe_lanes(workers, names) == text
    assert describe_lanes(workers, ["cpu"]) is None

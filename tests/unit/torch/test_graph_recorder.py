"""Captures of CUDA graphs over a stand-in for `torch.cuda`: memory, garbage, failures."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from cerebro.torch import graph_recorder  # noqa: E402
from cerebro.torch.graph_recorder import CudaRecorder  # noqa: E402

CPU = torch.device("cpu")


class Cuda:
    """Stands for the allocator: it knows which pool each graph was captured into."""

    def __init__(self):
        self.pools = []
        self.graphs = weakref.WeakKeyDictionary()  # the pool of each graph that is alive
        self.kept = []  # what a captured step keeps, besides its results
        self.checked = []
        self.stream = 0
        self.reserved = 5_000
        self.collects = []

    def new_pool(self):
        self.pools.append((0, len(self.pools) + 1))
        return self.pools[-1]

    @contextlib.contextmanager
    def capture(self, graph, pool=None, stream=None, capture_error_mode=""):
        assert pool is None or pool == self.pools[-1] or pool in self.graphs.values()
        self.collects.append(gc.isenabled())
        yield
        if pool is not None:
            self.graphs[graph] = pool
            self.reserved += 2_000

    def holds(self, device, pool, places):
        self.checked.append((pool, places))
        return not self.kept


class Graph:
    def replay(self):
        pass

    def raw_cuda_graph_exec(self):
        return 4242


@pytest.fixture
def cuda(monkeypatch):
    fake = Cuda()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", fake.new_pool)
    for name in ("synchronize", "set_stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    current = lambda _: SimpleNamespace(cuda_stream=fake.stream)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: fake.reserved)
    monkeypatch.setattr(torch.cuda, "graph", fake.capture)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):  # with CUDA they are there
        monkeypatch.setattr(torch._C, name, None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_checkPoolLiveAllocations", fake.holds, raising=False)
    monkeypatch.setattr(graph_recorder, "_streams", {})
    monkeypatch.setattr(graph_recorder, "_pools", {})
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: fake.collects.append(gc.isenabled()))
    return fake


def capture(work=dict):
    return CudaRecorder(CPU).capture(work)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_during_a_capture(cuda, enabled, fails):
    """It may hold an older graph, whose end on a GPU makes the capture invalid."""

    def work():
        cuda.collects.append(gc.isenabled())
        if fails:
            raise ValueError("in a step")
        return {}

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ValueError, match="in a step") if fails else contextlib.nullcontext():
            assert capture(work).held_bytes == 2_000
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert set(cuda.collects) == {False}


def test_graphs_of_one_stream_share_their_memory_and_those_of_others_do_not(cuda):
    one, two = capture(), capture()
    cuda.stream = 7
    three = capture()
    assert len(set(cuda.graphs.values())) == 2 and len(cuda.pools) == 2
    assert one is not two and three.handle == 4242


def test_a_pool_whose_graphs_are_all_gone_is_not_used_again(cuda):
    """PyTorch has freed it, and takes its old handle for an error."""
    one = capture()
    two = capture()
    del one
    gc.collect()
    three = capture()
    assert len(cuda.pools) == 1
    del two, three
    gc.collect()
    assert not cuda.graphs
    capture()
    assert len(cuda.pools) == 2


def test_the_last_graph_of_a_pool_does_not_end_while_another_is_captured(cuda):
    kept = [capture()]

    def work():
        kept.clear()
        gc.collect()  # as PyTorch does when a capture begins, in some versions
        assert len(cuda.graphs) == 1
        return {}

    capture(work)
    assert len(cuda.pools) == 1


def test_a_step_that_keeps_a_tensor_gets_memory_of_its_own(cuda):
    first = capture()
    cuda.kept.append("a tensor")
    second = capture()
    pools = dict(zip(map(id, cuda.graphs), cuda.graphs.values(), strict=True))
    assert sorted(pools.values()) == cuda.pools and len(pools) == 2
    cuda.kept.clear()
    third = capture()
    assert len(cuda.pools) == 2  # the shared one goes on
    assert len({first, second, third}) == 3 == len(cuda.graphs)


def test_without_a_way_to_look_each_graph_has_memory_of_its_own(cuda, monkeypatch):
    monkeypatch.delattr(torch._C, "_cuda_checkPoolLiveAllocations")
    graphs = [capture(), capture()]
    assert len(set(cuda.graphs.values())) == len(graphs) == 2


def test_graphs_after_a_failed_capture_do_not_share_its_memory(cuda):
    first = capture()
    with pytest.raises(ZeroDivisionError):
        capture(lambda: 1 / 0)
    second = capture()
    assert len(set(cuda.graphs.values())) == 2 and first is not second


def test_a_version_that_does_not_tell_the_address_of_a_graph(cuda, monkeypatch):
    monkeypatch.delattr(Graph, "raw_cuda_graph_exec")
    assert capture().handle is None

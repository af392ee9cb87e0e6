"""Units that run by graphs on a fake GPU, in processes of tests/core/test_lane_runs.py."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from graphed_units import Graph, Unit, checked, runtime

import cerebro._core as _core
import cerebro.data
from cerebro.errors import DeviceError, UnitCancelled
from cerebro.transforms import Scale
from cerebro.worker.evaluate import run_batches

ROWS, SIZE = 1003, 16
WARM_UP = 3  # ordinary steps before graphs are recorded
CALLS = [
    *["cudaGraphLaunch", "cuLaunchKernel", "cudaMemcpyAsync", "cudaEventRecord"],
    *["cudaEventSynchronize", "cuEventQuery", "cudaStreamWaitEvent", "cudaStreamIsCapturing"],
    *["cuCtxPushCurrent", "cudaThreadExchangeStreamCaptureMode", "cudaStreamSynchronize"],
    *["cudaMalloc", "cudaEventCreateWithFlags"],
]


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    """Check that nothing forbidden by CUDA was done, and that everything is freed."""
    runtime.standin_reset()
    yield
    gc.collect()
    assert runtime.standin_faults() == 0, runtime.standin_fault()
    for kind in (b"device", b"pinned", b"stream", b"event", b"graph", b"exec"):
        assert runtime.standin_left(kind) == 0, kind


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    random = np.random.default_rng(0)
    columns = {
        "x": random.integers(0, 256, (ROWS, 5), np.uint8),
        "y": np.arange(ROWS),
        "v": random.normal(size=(ROWS, 7)).astype(np.float32),
    }
    made = cerebro.data.shard(columns, tmp_path_factory.mktemp("data") / "d", shards=3)
    return made.with_transforms({"x": [Scale(1 / 255)]})


@pytest.fixture
def make_unit(data: Any) -> Iterator[Callable[..., Unit]]:
    made: list[Unit] = []

    def make(**options: Any) -> Unit:
        made.append(Unit(options.pop("data", data), **options))
        return made[-1]

    yield make
    runtime.standin_fail(None, 1 << 31, 0)
    for unit in made:
        unit.close()
    made.clear()


Found = tuple[Any, ...]


def facts(unit: Unit, result: Any) -> Found:
    return result.rows, result.batches, result.sums, result.not_finite, unit.state


@pytest.fixture
def ordinary(make_unit: Callable[..., Unit]) -> Found:
    """A pass with ordinary steps alone."""
    unit = make_unit()
    return facts(unit, unit.run())


def run_by_graphs(unit: Unit, **options: Any) -> Found:
    step = unit.step_and_record(WARM_UP)
    result = unit.run(step=step, **options)
    return facts(unit, result)


# --- bits --------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("residence", ["auto", "streamed"])
def test_a_unit_by_graphs_is_the_ordinary_unit(
    make_unit: Callable[..., Unit], ordinary: Found, residence: str, threads: int
) -> None:
    unit = make_unit(residence=residence, threads=threads)
    assert run_by_graphs(unit) == ordinary
    launches = sum(replay.runs for replay in unit.replays)
    assert len(unit.graphs) == len(unit.replays) == 2  # two sizes of batches
    assert all(replay.runs > 0 for replay in unit.replays)
    assert launches + unit.taken == ordinary[1] and unit.taken < launches
    assert sum(unit.prepared) == launches and unit.entered == unit.left == len(unit.prepared)
    assert unit.loader.last_rows == ROWS // 3 // ((ROWS // 3 + SIZE // 2) // SIZE)


def test_several_epochs_and_mixes(make_unit: Callable[..., Unit]) -> None:
    one, two = make_unit(), make_unit()
    for epoch, mixes in enumerate(([[0, 1, 2]], [[2], [0], [1]], [[0, 2]])):
        expected = facts(one, one.run(epoch, mixes))
        result = two.run(epoch, mixes, step=two.step_and_record(WARM_UP))
        assert facts(two, result) == expected


def test_streamed_and_resident_mixes_in_one_pass(
    make_unit: Callable[..., Unit], ordinary: Found
) -> None:
    unit = make_unit()
    unit.depot.limit = 30_000  # some of the shards
    assert run_by_graphs(unit) == ordinary
    assert 0 < unit.loader.resident_shards < 3 or unit.loader.resident_shards == 0


def test_rates_that_stay_are_not_set(make_unit: Callable[..., Unit]) -> None:
    one, two = make_unit(), make_unit()
    for unit in (one, two):
        unit.rate_of = lambda step: np.float32(0.25)  # type: ignore[method-assign]
    expected = facts(one, one.run())

    def step(batch: Any) -> Any:
        values = two.step(batch)
        two.record(prepare=stay)
        return values

    def stay(n: int) -> None:
        two.prepared.append(n)

    assert facts(two, two.run(step=step)) == expected
    assert two.prepared


def test_sums_continue_and_wait_for_their_turn(
    make_unit: Callable[..., Unit], ordinary: Found
) -> None:
    """What is kept is summed later, in its place among the values of ordinary steps."""
    unit = make_unit()
    entries: list[Any] = []
    rows: list[int] = []
    step = unit.step_and_record(WARM_UP)

    def note(batch: Any) -> None:
        entries.append(step(batch))
        rows.append(unit.loader.last_rows)

    def keep(metrics: _core.RunMetrics) -> None:
        entries.append(metrics)
        rows.append(0)

    first = unit.run(step=note, keep=keep)
    assert first.batches == unit.taken and first.sums == {}

    class Kept:
        last_rows = 0

        def __iter__(self) -> Iterator[Any]:
            for self.last_rows, entry in zip(rows, entries, strict=True):
                yield entry

    assert facts(unit, _core.run_unit(Kept(), lambda entry: entry)) == ordinary


def test_the_worker_reads_the_metrics_of_graphs(
    make_unit: Callable[..., Unit], ordinary: Found
) -> None:
    unit = make_unit()
    take = unit.step_and_record(WARM_UP)

    class Model:
        def train_batch(self, batch: Any) -> Any:
            return take(batch)

        def replays_for(self, step: Any) -> Any:
            return unit.replays

    unit.loader.begin([[0], [1, 2]], 0)
    result = run_batches(unit.loader, Model().train_batch, device="cuda:0")
    assert facts(unit, result) == ordinary
    assert sum(replay.runs for replay in unit.replays) > 20


# --- what runs when -------------------------------------------------------------------


def test_no_python_code_runs_during_a_run(make_unit: Callable[..., Unit]) -> None:
    unit = make_unit()
    inside: list[str] = []

    def watch(frame: Any, event: str, argument: Any) -> None:
        if unit.entered > unit.left:
            inside.append(f"{event} {frame.f_code.co_name}")

    step = unit.step_and_record(WARM_UP)
    unit.loader.begin([[0], [1, 2]], 0)
    sys.setprofile(watch)
    try:
        _core.run_unit(unit.loader, step, replays=unit.replays)
    finally:
        sys.setprofile(None)
    assert unit.entered > 0
    # The end of entering the context, and the start of leaving it.
    entering = {"return context", "c_return __enter__", "return __enter__", "c_return next"}
    leaving = {"c_call __exit__", "call __exit__", "c_call next", "call context"}
    assert set(inside) <= entering | leaving
    assert len(inside) <= 8 * unit.entered


def test_a_batch_takes_few_calls(make_unit: Callable[..., Unit]) -> None:
    """A kernel for each column, the graph, one kernel; the rest is for several batches."""
    unit = make_unit()
    unit.run(step=unit.step_and_record(WARM_UP))
    runtime.standin_reset()
    unit.steps = 0
    result = unit.run(1, step=None)
    assert sum(replay.runs for replay in unit.replays) > result.batches
    calls = runtime.standin_calls(None)
    assert runtime.standin_calls(b"cudaGraphLaunch") == result.batches
    assert runtime.standin_calls(b"cuLaunchKernel") == 4 * result.batches + 1
    assert runtime.standin_calls(b"cuCtxPushCurrent") <= 12
    assert calls < 7 * result.batches + 60


def test_launches_of_pytorch(make_unit: Callable[..., Unit], ordinary: Found) -> None:
    unit = make_unit()
    launched: list[int] = []

    def launcher(graph: Graph) -> Callable[[], None]:
        def launch() -> None:
            launched.append(graph.handle)
            checked(runtime.cudaGraphLaunch(graph.handle, unit.stream))

        return launch

    assert run_by_graphs_with(unit, launch=launcher) == ordinary
    assert len(launched) == sum(replay.runs for replay in unit.replays) > 20
    assert len(set(launched)) == 2


def run_by_graphs_with(unit: Unit, **how: Any) -> Found:
    return facts(unit, unit.run(step=unit.step_and_record(WARM_UP, **how)))


def test_prepare_may_take_fewer(make_unit: Callable[..., Unit], ordinary: Found) -> None:
    unit = make_unit()
    asked: list[int] = []

    def prepare(n: int) -> Any:
        asked.append(n)
        if len(asked) == 1:
            return 0
        return 5 if n > 5 and len(asked) < 6 else unit.prepare(n)

    assert run_by_graphs_with(unit, prepare=prepare) == ordinary
    assert 5 in asked and max(asked) > 5


@pytest.mark.parametrize(
    "wrong", [b"", np.zeros(3, np.float32), "text", 10**30, -1, lambda n: np.zeros(n, np.int32)]
)
def test_wrong_rates_are_refused(make_unit: Callable[..., Unit], wrong: Any) -> None:
    unit = make_unit()
    with pytest.raises(ValueError, match=r"prepare\(\d+\) must return a C-contiguous buffer"):
        run_by_graphs_with(unit, prepare=lambda n: wrong(n) if callable(wrong) else wrong)


def test_batches_that_no_graph_fits_take_ordinary_steps(
    make_unit: Callable[..., Unit], ordinary: Found
) -> None:
    unit = make_unit(size=17)
    unit.run()
    unit.record()
    other = make_unit()
    other.replays = unit.replays
    assert facts(other, other.run())[:2] == ordinary[:2]


def test_graphs_are_left_alone_if_pytorch_does_not_tell_its_stream(
    make_unit: Callable[..., Unit], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older versions name it with each tensor; a PyTorch for the CPU takes none from a GPU."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", None, raising=False)
    recorded, unit = make_unit(), make_unit(framework="torch")
    recorded.run()
    recorded.record()
    unit.replays = recorded.replays
    with pytest.raises((AssertionError, RuntimeError)):
        unit.run()
    assert sum(replay.runs for replay in unit.replays) == 0


@pytest.mark.parametrize("how", ["metrics", "prepare"])
def test_graphs_that_do_not_belong_together_are_not_mixed(
    make_unit: Callable[..., Unit], ordinary: Found, how: str
) -> None:
    """As those of a step that reports other metrics for small batches."""
    unit = make_unit()
    unit.run()
    unit.steps = 0
    for address in (unit.weight, unit.loss, unit.sum):
        unit._put(address, bytes(8))
    unit.record()
    _, other = unit.graphs.values()
    unit.replays[1] = _core.GraphReplay(
        unit.depot.device,
        other.handle,
        other.inputs,
        [] if how == "metrics" else unit.metrics_for(1),
        [unit.rate],
        unit._prepare if how == "metrics" else lambda n: unit.prepare(n),
        unit._context,
    )
    unit.taken = 0
    assert facts(unit, unit.run()) == ordinary
    assert unit.replays[0].runs > 20 and unit.replays[1].runs == 0
    assert unit.taken == ordinary[1] - unit.replays[0].runs > 0


# --- failures -----------------------------------------------------------------------


class MyError(Exception):
    pass


def test_an_exception_of_a_launch_ends_the_unit(make_unit: Callable[..., Unit]) -> None:
    unit = make_unit()
    left = [20]

    def launcher(graph: Graph) -> Callable[[], None]:
        def launch() -> None:
            left[0] -= 1
            if left[0] == 0:
                raise MyError
            checked(runtime.cudaGraphLaunch(graph.handle, unit.stream))

        return launch

    with pytest.raises(MyError):
        run_by_graphs_with(unit, launch=launcher)
    assert sum(replay.runs for replay in unit.replays) == 19
    assert unit.entered == unit.left


def test_an_exception_of_prepare_ends_the_unit(make_unit: Callable[..., Unit]) -> None:
    unit = make_unit()

    def prepare(n: int) -> None:
        raise MyError

    with pytest.raises(MyError):
        run_by_graphs_with(unit, prepare=prepare)
    assert unit.entered == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_cancelled_unit_ends(make_unit: Callable[..., Unit], late: bool) -> None:
    unit, page = make_unit(), _core.BeatPage()
    left = [10]

    def prepare(n: int) -> Any:
        if not late:
            page.cancel()
        return unit.prepare(n)

    def launcher(graph: Graph) -> Callable[[], None]:
        def launch() -> None:
            left[0] -= 1
            if left[0] == 0:
                page.cancel()
            checked(runtime.cudaGraphLaunch(graph.handle, unit.stream))

        return launch

    step = unit.step_and_record(WARM_UP, prepare=prepare, launch=launcher)
    with pytest.raises(UnitCancelled):
        unit.run(step=step, beat=page)
    launches = sum(replay.runs for replay in unit.replays)
    assert launches == (10 if late else 0)
    assert page.batches == unit.taken + launches


def test_the_beat_counts_batches_and_rows(make_unit: Callable[..., Unit]) -> None:
    unit, page = make_unit(), _core.BeatPage()
    result = unit.run(step=unit.step_and_record(WARM_UP), beat=page)
    assert (page.batches, page.rows) == (result.batches, result.rows)


@pytest.mark.parametrize("residence", ["auto", "streamed"])
@pytest.mark.parametrize("call", CALLS)
def test_a_failing_call_is_named(make_unit: Callable[..., Unit], call: str, residence: str) -> None:
    """Each call of a run in turn; what the unit used is free afterwards."""
    failures = 0
    for nth in [*range(1, 12), 40]:
        unit = make_unit(residence=residence)
        unit.run()
        unit.record()
        unit.loader.begin([[0], [1, 2]], 1)
        runtime.standin_fail(call.encode(), nth, 1)
        try:
            _core.run_unit(unit.loader, unit.step, replays=unit.replays)
        except (DeviceError, AssertionError) as error:
            failures += 1
            assert runtime.standin_failed() == call.encode()
            if isinstance(error, DeviceError):
                assert f"cuda:0: {call}: cudaErrorOfTheStandIn" in str(error)
        runtime.standin_fail(None, 1 << 31, 0)
        unit.close()
        unit.graphs.clear()
        unit._memory.clear()
        gc.collect()
    if call in ("cudaGraphLaunch", "cuLaunchKernel", "cudaMemcpyAsync", "cudaEventRecord"):
        assert failures > 1


def test_a_lane_stays_in_its_process(make_unit: Callable[..., Unit]) -> None:
    """A forked child calls CUDA neither for a run nor when the loader ends."""
    unit = make_unit()
    unit.run(step=unit.step_and_record(WARM_UP))
    fresh = make_unit()
    fresh.replays = unit.replays  # it has no lane yet
    for used in (unit, fresh):
        used.loader.begin([[0]], 1)
    runtime.standin_reset()
    child = os.fork()
    if child == 0:
        refused = 0
        for used in (unit, fresh):
            try:
                _core.run_unit(used.loader, used.step, replays=used.replays)
            except ValueError as error:
                refused += "stayed in the parent process" in str(error)
            used.loader.close()
            del used.loader
        os._exit(0 if refused == 2 and runtime.standin_calls(None) == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0


# --- several lanes ---------------------------------------------------------------------


def run_in_threads(units: list[Unit], runs: list[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(units)
    barrier = threading.Barrier(len(units))

    def work(number: int) -> None:
        barrier.wait()
        try:
            results[number] = runs[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(units))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("lanes", [2, 16])
def test_lanes_do_not_change_each_other(
    make_unit: Callable[..., Unit], ordinary: Found, lanes: int
) -> None:
    units = [
        make_unit(residence="streamed" if i % 5 == 3 else "auto", threads=2 if i % 4 == 1 else 0)
        for i in range(lanes)
    ]
    results = run_in_threads(units, [partial(run_by_graphs, unit) for unit in units])
    assert results == [ordinary] * lanes


def test_a_lane_that_fails_leaves_the_others_alone(
    make_unit: Callable[..., Unit], ordinary: Found
) -> None:
    units = [make_unit() for _ in range(4)]

    def failed(unit: Unit) -> Any:
        def launcher(graph: Graph) -> int:
            return 0xBAD0  # not a graph: the stand-in refuses it

        return run_by_graphs_with(unit, launch=launcher)

    results = run_in_threads(
        units,
        [
            lambda: run_by_graphs(units[0]),
            lambda: failed(units[1]),
            lambda: run_by_graphs(units[2]),
            lambda: run_by_graphs(units[3]),
        ],
    )
    assert results[0] == results[2] == results[3] == ordinary
    assert isinstance(results[1], DeviceError) and "cudaGraphLaunch" in str(results[1])
    assert runtime.standin_fault() == b"cudaGraphLaunch of what is not a graph"
    runtime.standin_reset()


@pytest.mark.parametrize("call", ["cudaGraphLaunch", "cuLaunchKernel", "cuEventQuery"])
@pytest.mark.parametrize("nth", [1, 5, 30, 90])
def test_one_failing_call_fails_one_lane(
    make_unit: Callable[..., Unit], call: str, nth: int
) -> None:
    units = [make_unit() for _ in range(3)]
    for unit in units:
        unit.run()
        unit.record()
    warm = make_unit()
    warm.run()
    warm.record()
    expected = [find_state(warm)]
    runtime.standin_fail(call.encode(), nth, 1)
    results = run_in_threads(units, [partial(find_state, unit) for unit in units])
    wrong = [result for result in results if isinstance(result, BaseException)]
    assert len(wrong) == (runtime.standin_failed() is not None) and len(wrong) <= 1
    assert all(call in str(error) for error in wrong)
    assert [r for r in results if not isinstance(r, BaseException)] == expected * (3 - len(wrong))


def find_state(unit: Unit) -> tuple[float, float]:
    unit.run(1)
    return unit.state


# --- arguments -------------------------------------------------------------------------


def test_invalid_arguments_are_refused(make_unit: Callable[..., Unit]) -> None:
    unit = make_unit()
    device = unit.depot.device
    rest: tuple[Any, ...] = ([], [], [], None, unit.context)
    with pytest.raises(TypeError, match="launch must be a graph's handle, an int, or a callable"):
        _core.GraphReplay(device, "graph", *rest)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="launch is 0"):
        _core.GraphReplay(device, 0, *rest)
    with pytest.raises(TypeError, match="expected a Device"):
        _core.GraphReplay(3, 1, *rest)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="prepare must be a callable or None"):
        _core.GraphReplay(device, 1, [], [], [], 3, unit.context)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _core.RunMetrics()


if __name__ == "__main__":
    os._exit(pytest.main([__file__, *sys.argv[1:]]))

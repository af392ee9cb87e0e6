"""run_unit, UnitResult and BeatPage."""

from __future__ import annotations

import gc
import math
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cerebro._core as _core
from cerebro.errors import UnitCancelled

torch = pytest.importorskip("torch")


class Batches:
    """A loader as run_unit sees one: an iterable that knows its last rows."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        self.last_rows = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i, rows in enumerate(self.rows):
            self.last_rows = rows
            yield {"i": i}


def run(values: list[Any], rows: list[int] | None = None, **options: Any) -> _core.UnitResult:
    """One unit whose i-th batch has values[i] as its metric "m"."""
    batches = Batches(rows or [1] * len(values))
    return _core.run_unit(batches, lambda batch: {"m": values[batch["i"]]}, **options)


def test_means_are_weighted_by_rows() -> None:
    result = run([1.0, 2.0, 4.0], [10, 20, 5])
    assert result.rows == 35
    assert result.batches == 3
    assert result.sums == {"m": (1.0 * 10 + 2.0 * 20 + 4.0 * 5, 35.0)}
    assert result.seconds >= 0


def test_sums_are_added_in_batch_order_in_float64() -> None:
    values = [0.1, 1e16, -1e16, 0.3, 1e-9]
    expected = 0.0
    for value in values:
        expected += value * 3.0
    assert run(values, [3] * 5).sums["m"][0] == expected


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    ],
)
@pytest.mark.parametrize("value", [0, 1, 100, -3, 0.1, 6e-8, math.inf])
def test_torch_scalars_are_read_exactly(dtype: torch.dtype, value: float) -> None:
    if not dtype.is_floating_point and (value != int(min(value, 1000)) or value < 0):
        value = 1
    tensor = torch.tensor(value, dtype=dtype)
    assert run([tensor]).sums["m"][0] == float(tensor)
    assert run([tensor.reshape(1, 1)]).sums["m"][0] == float(tensor)


def test_every_float16_is_read_exactly() -> None:
    values = torch.arange(-32768, 32768).to(torch.int16).view(torch.float16)
    values = values[~torch.isnan(values)]
    got = [run([v]).sums["m"][0] for v in values[::61]]
    assert got == values[::61].double().tolist()


@pytest.mark.parametrize(
    "value",
    [
        3,
        True,
        0.5,
        np.float32(0.5),
        np.float64(0.5),
        np.int64(7),
        np.bool_(True),
        np.array(0.25),
        np.array([2], dtype=np.int32),
        torch.nn.Parameter(torch.tensor(0.5)),
        torch.ones(2, dtype=torch.complex64).conj().imag[0] - 1,
    ],
)
def test_numbers_of_all_kinds(value: Any) -> None:
    number = float(value.item() if hasattr(value, "item") else value)
    assert run([value]).sums["m"] == (number, 1.0)


def test_a_negative_view_is_read_as_its_value() -> None:
    view = torch.tensor([1 + 2j]).conj().imag[0]
    assert view.is_neg()
    assert run([view]).sums["m"][0] == -2.0


def test_mean_and_weight() -> None:
    result = run([(2.0, 3), (torch.tensor(4.0), torch.tensor(1))], [100, 100])
    assert result.sums == {"m": (10.0, 4.0)}


def test_nan_and_infinity_are_summed_as_they_are() -> None:
    assert run([math.inf]).sums["m"][0] == math.inf
    assert math.isnan(run([1.0, math.nan, 2.0]).sums["m"][0])


def test_a_mean_of_weight_0_does_not_count() -> None:
    result = run([(math.nan, 0), (3.0, 2.0), (math.inf, torch.tensor(0))])
    assert result.sums == {"m": (6.0, 2.0)} and result.not_finite == {}
    assert run([(math.nan, 0.0)]).sums == {"m": (0.0, 0.0)}  # it has a name, but no mean


def test_no_metrics() -> None:
    result = _core.run_unit(Batches([4, 4]), lambda batch: None)
    assert (result.rows, result.batches, result.sums) == (8, 2, {})


def test_an_empty_unit() -> None:
    result = _core.run_unit(Batches([]), lambda batch: None)
    assert (result.rows, result.batches, result.sums) == (0, 0, {})


def test_metrics_may_vary_and_keep_their_order() -> None:
    steps = [{"b": 1.0}, {"a": 2.0, "b": 3.0}, {"c": 1.0, "a": 1.0}, None, {"ü": 1.0}]
    result = _core.run_unit(Batches([1] * 5), lambda batch: steps[batch["i"]])
    assert list(result.sums) == ["b", "a", "c", "ü"]
    assert result.sums["b"] == (4.0, 2.0)
    assert result.sums["a"] == (3.0, 2.0)


def test_sums_continue_from_earlier_sums() -> None:
    rows = [3, 4, 5, 6]
    values = [0.1, 0.2, 0.3, 0.7]
    whole = run(values, rows)
    first = run(values[:2], rows[:2])
    second = run(values[2:], rows[2:], sums=first.sums)
    assert second.sums == whole.sums
    assert first.sums != whole.sums


def test_sums_that_change_while_they_are_read() -> None:
    class Clears:
        def __float__(self) -> float:
            sums.clear()
            self.reused = ["x" * 3000 for _ in range(50)]  # the memory of the name
            return 1.0

    sums: dict[str, Any] = {"name" * len("x" * 750): (Clears(), 2.0)}
    result = _core.run_unit(Batches([]), print, sums=sums)
    assert result.sums == {"name" * 750: (1.0, 2.0)}
    with pytest.raises(TypeError, match="name to"):
        _core.run_unit(Batches([]), print, sums={"a": 1.0})


@pytest.mark.parametrize("special", ["is_neg", "__float__"])
def test_a_value_that_changes_while_it_is_read(special: str) -> None:
    class Other(torch.Tensor):
        pass

    def change(self: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            self.untyped_storage().resize_(4 << 20)
        return 2.5 if special == "__float__" else False

    changing = type("Changing", (Other,), {special: change})
    value = torch.tensor([1.5]).as_subclass(changing)
    assert run([value]).sums["m"] == (1.5, 1.0)


@pytest.mark.parametrize(
    "value",
    ["0.5", b"1", None, [1.0], np.ones(2), torch.ones(2), torch.ones(0), 1j, (1.0,), (1.0, "x")],
)
def test_the_error_names_a_metric_that_is_no_number(value: Any) -> None:
    with pytest.raises(TypeError, match="the metric 'm' must be a number"):
        run([value])


def test_the_error_names_the_shape_of_a_metric() -> None:
    with pytest.raises(TypeError, match=r"not Tensor of shape torch.Size\(\[2\]\)"):
        run([torch.ones(2)])


def test_wrong_results_of_step() -> None:
    with pytest.raises(TypeError, match="must return a dict of metrics or None, not float"):
        _core.run_unit(Batches([1]), lambda batch: 0.5)
    with pytest.raises(TypeError, match="name of a metric must be a str, not 3"):
        _core.run_unit(Batches([1]), lambda batch: {3: 0.5})


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError):
        _core.run_unit(3, print)
    with pytest.raises(AttributeError, match="last_rows"):
        _core.run_unit(iter([{}]), print)
    with pytest.raises(TypeError, match="BeatPage"):
        _core.run_unit(Batches([1]), print, beat=3)
    with pytest.raises(TypeError):
        _core.run_unit(Batches([1]), print, sums={"m": 3})


def test_exceptions_of_step_and_loader_come_through() -> None:
    error = KeyError("mine")

    def step(batch: Any) -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        _core.run_unit(Batches([1]), step)
    assert caught.value is error

    def broken() -> Iterator[Any]:
        yield {}
        raise OSError("disk")

    class Broken(Batches):
        __iter__ = staticmethod(broken)

    with pytest.raises(OSError, match="disk"):
        _core.run_unit(Broken([1]), lambda batch: None)


def test_a_batch_is_let_go_before_the_next_one_is_made() -> None:
    class Batch(dict):  # type: ignore[type-arg]
        pass

    class Iter:
        """No generator, which would hold a reference of its own."""

        last_rows = 1

        def __init__(self) -> None:
            self.refs: list[Any] = []
            self.alive: list[bool] = []

        def __iter__(self) -> Iter:
            return self

        def __next__(self) -> Batch:
            self.alive += [ref() is not None for ref in self.refs[-1:]]
            if len(self.refs) == 3:
                raise StopIteration
            batch = Batch()
            self.refs.append(weakref.ref(batch))
            return batch

    loader = Iter()
    _core.run_unit(loader, lambda batch: None)
    assert loader.alive == [False, False, False]


def test_the_page_counts_and_cancels() -> None:
    page = _core.BeatPage()

    def step(batch: Any) -> None:
        if batch["i"] == 2:
            page.cancel()

    with pytest.raises(UnitCancelled):
        _core.run_unit(Batches([5] * 10), step, beat=page)
    assert (page.batches, page.rows, page.cancelled) == (3, 15, True)
    with pytest.raises(UnitCancelled):
        _core.run_unit(Batches([5]), step, beat=page)
    assert page.batches == 3
    page.clear()
    assert not page.cancelled
    _core.run_unit(Batches([5, 6]), lambda batch: None, beat=page)
    assert (page.batches, page.rows) == (5, 26)


CHILD = """
import sys
from cerebro import _core
page = _core.BeatPage(int(sys.argv[1]))
page.start_beating(1)
while not page.cancelled:
    pass
"""


def test_the_page_is_shared_and_the_thread_ends_with_the_process() -> None:
    page = _core.BeatPage()
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(page.fd)], pass_fds=[page.fd])
    try:
        while page.beats < 5:
            assert child.poll() is None
        page.cancel()
        assert child.wait(30) == 0
    finally:
        child.kill()
        child.wait()


def test_beating_starts_and_stops() -> None:
    page = _core.BeatPage()
    page.stop()
    page.start_beating(1)
    page.start_beating(2)
    while page.beats < 3:
        pass
    page.stop()
    beats = page.beats
    page.start_beating(100000)
    page.start_beating(1)
    while page.beats < beats + 3:
        pass
    page.stop()
    with pytest.raises(ValueError, match="at least 1"):
        page.start_beating(0)


def test_a_task_has_a_clock() -> None:
    page = _core.BeatPage()
    other = _core.BeatPage(page.fd)
    assert other.task_seconds is None
    page.begin_task()
    seconds = other.task_seconds
    assert seconds is not None and 0 <= seconds < 3600
    page.begin_task(grace=1000)
    seconds = other.task_seconds
    assert seconds is not None and -1000 <= seconds < 0
    page.begin_task()
    page.postpone_task(1000)
    seconds = other.task_seconds
    assert seconds is not None and -1000 <= seconds < 0
    page.postpone_task(-1000)
    seconds = other.task_seconds
    assert seconds is not None and 0 <= seconds < 3600
    page.end_task()
    page.postpone_task(10)  # no task
    assert other.task_seconds is None
    with pytest.raises(ValueError, match="seconds"):
        page.postpone_task(math.nan)
    for grace in (-1.0, math.nan, 1e6):
        with pytest.raises(ValueError, match="grace"):
            page.begin_task(grace)


WATCHED = """
import os, sys, time
from cerebro import _core
page = _core.BeatPage(int(sys.argv[1]))
page.start_beating(5, coordinator=int(sys.argv[2]))
while True:
    pass
"""


def test_a_process_ends_with_its_socket_and_leaves_its_group_alone() -> None:
    page = _core.BeatPage()
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, "-c", WATCHED, str(page.fd), str(theirs.fileno())],
        pass_fds=[page.fd, theirs.fileno()],
    )
    theirs.close()
    while page.beats < 3:
        assert child.poll() is None
    ours.close()  # it does not lead a group: this process is in it and stays
    assert child.wait(30) == -signal.SIGKILL
    with pytest.raises(ValueError, match="coordinator"):
        page.start_beating(5, coordinator=-1)


def test_a_page_that_is_dropped_closes_its_descriptor() -> None:
    page = _core.BeatPage()
    fd = page.fd
    other = _core.BeatPage(fd)
    assert not os.get_inheritable(fd)  # a worker gets it by pass_fds, and no other process
    del other
    os.fstat(fd)
    del page
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(fd)


def test_a_descriptor_that_is_no_page(tmp_path: Any) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file, pytest.raises(ValueError, match="not a beat page"):
        _core.BeatPage(file.fileno())
    path.write_bytes(b"")
    with path.open("r+b") as file, pytest.raises(ValueError, match="not a beat page"):
        _core.BeatPage(file.fileno())
    with pytest.raises(ValueError, match="descriptor"):
        _core.BeatPage(-5)
    with pytest.raises(OSError):
        _core.BeatPage(1023)

"""Units on a fake GPU whose step is a CUDA graph, for tests and benchmarks of lanes.

The step is the stand-in's (`standin_train`): a weight that depends on every byte of the batches, on
their order and on the learning rates.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from dlpack_structs import describe

import cerebro._core as _core
from cerebro.machine import cuda
from cerebro.transforms import compile as compile_plan

TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3
POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t

runtime = ctypes.CDLL(os.environ[cuda.OVERRIDE])
runtime.standin_left.restype = SIZE
runtime.standin_fault.restype = runtime.standin_failed.restype = ctypes.c_char_p
runtime.standin_log_line.restype = ctypes.c_char_p
runtime.standin_log_line.argtypes = (ctypes.c_uint,)
runtime.standin_calls.argtypes = (ctypes.c_char_p,)
runtime.standin_fail.argtypes = (ctypes.c_char_p, ctypes.c_uint, ctypes.c_int)
runtime.standin_train.argtypes = (POINTER, POINTER)
runtime.cudaMalloc.argtypes = (POINTER, SIZE)
runtime.cudaFree.argtypes = (POINTER,)
runtime.cudaMemcpyAsync.argtypes = (POINTER, POINTER, SIZE, ctypes.c_int, POINTER)
runtime.cudaStreamSynchronize.argtypes = (POINTER,)
runtime.cudaStreamDestroy.argtypes = (POINTER,)
runtime.cudaStreamBeginCapture.argtypes = (POINTER, ctypes.c_int)
runtime.cudaStreamEndCapture.argtypes = (POINTER, POINTER)
runtime.cudaGraphInstantiate.argtypes = (POINTER, POINTER, ctypes.c_ulonglong)
runtime.cudaGraphLaunch.argtypes = (POINTER, POINTER)
runtime.cudaGraphExecDestroy.argtypes = (POINTER,)
runtime.cudaGraphDestroy.argtypes = (POINTER,)


def checked(code: int) -> None:
    assert code == 0, code


class Step(ctypes.Structure):
    """A `standin_step`."""

    _fields_ = (
        ("inputs", POINTER * 4),
        ("bytes", ctypes.c_uint64 * 4),
        *((name, POINTER) for name in ("weight", "loss", "sum", "rate")),
    )


class Unit:
    """A loader with a stream of its own, and a model: its memory and a graph for each size."""

    def __init__(
        self,
        data: Any,
        *,
        size: int = 16,
        residence: str = "auto",
        threads: int = 0,
        framework: Any = "dlpack",
    ):
        self.depot = _core.Depot(cuda.open_device("cuda:0"))
        self.stream: int = self.depot.stream
        self.loader = _core.Loader(
            data.view.loader_parts(),
            compile_plan(data.columns, data.transforms),
            batch_size=size,
            seed=5,
            framework=framework,
            first_rows=data.shards.first_rows,
            depot=self.depot,
            residence=residence,
            threads=threads,
        )
        self._memory: list[int] = []
        self.weight, self.loss, self.sum, self.rate = (self._allocate(8) for _ in range(4))
        for address in (self.weight, self.loss, self.sum):
            self._put(address, bytes(8))
        self.graphs: dict[int, Graph] = {}
        self.taken = 0  # ordinary steps
        self.steps = 0  # of the schedule
        self.prepared: list[int] = []
        self.entered = self.left = 0
        self.replays: list[Any] = []
        self._recorded: set[int] = set()
        self._prepare, self._context = self.prepare, self.context  # always the same objects

    # --- memory --------------------------------------------------------------------

    def _allocate(self, size: int) -> int:
        address = POINTER()
        checked(runtime.cudaMalloc(ctypes.byref(address), size))
        assert address.value is not None
        self._memory.append(address.value)
        return address.value

    def _put(self, address: int, value: bytes) -> None:
        checked(runtime.cudaMemcpyAsync(address, value, len(value), TO_DEVICE, self.stream))

    def read(self, address: int, kind: str) -> float:
        host = np.empty(1, kind)
        checked(
            runtime.cudaMemcpyAsync(host.ctypes.data, address, host.nbytes, TO_HOST, self.stream)
        )
        checked(runtime.cudaStreamSynchronize(self.stream))
        return float(host[0])

    @property
    def state(self) -> tuple[float, float]:
        return self.read(self.weight, "f4"), self.read(self.sum, "f8")

    def close(self) -> None:
        self.loader.close()
        self.replays.clear()
        for graph in self.graphs.values():
            graph.close()
        for address in self._memory:
            checked(runtime.cudaFree(address))

    # --- steps ---------------------------------------------------------------------

    def rate_of(self, step: int) -> Any:
        return np.float32(0.5 / (1 + step))

    def views_of(self, batch: dict[str, Any]) -> list[Any]:
        capsules = [tensor.__dlpack__(stream=self.stream) for tensor in batch.values()]
        tensors = batch.values()
        return [(c, describe(c)[1], tensor) for c, tensor in zip(capsules, tensors, strict=True)]

    def step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Take an ordinary step: copy the batch, set the rate, launch, and read the metrics."""
        views = self.views_of(batch)
        rows = views[0][2].shape[0]
        graph = self.graph_for(views)
        for (_, view, tensor), (address, *_rest) in zip(views, graph.inputs, strict=True):
            checked(
                runtime.cudaMemcpyAsync(address, view.data, tensor.nbytes, ON_DEVICE, self.stream)
            )
        self._put(self.rate, self.rate_of(self.steps).tobytes())
        checked(runtime.cudaGraphLaunch(graph.handle, self.stream))
        self.steps += 1
        self.taken += 1
        loss, total = self.read(self.loss, "f4"), self.read(self.sum, "f8")
        return {"loss": loss, "weighted": (total, loss), "rows": (float(rows), 1.0)}

    def step_and_record(self, after: int, **options: Any) -> Callable[[Any], dict[str, Any]]:
        """Return `step`, which fills `replays` once it has been called `after` times."""

        def step(batch: dict[str, Any]) -> dict[str, Any]:
            values = self.step(batch)
            if self.taken >= after:
                self.record(**options)
            return values

        return step

    def graph_for(self, views: list[Any]) -> Graph:
        rows = views[0][2].shape[0]
        if rows not in self.graphs:
            shapes = [(tensor.shape, tensor.dtype, tensor.nbytes) for _, _, tensor in views]
            self.graphs[rows] = Graph(self, shapes)
        return self.graphs[rows]

    # --- replays -------------------------------------------------------------------

    def prepare(self, n: int) -> Any:
        self.prepared.append(n)
        self.steps += n
        return np.array([self.rate_of(i) for i in range(self.steps - n, self.steps)], np.float32)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        self.entered += 1
        yield
        self.left += 1

    def metrics_for(self, rows: int) -> list[Any]:
        """Return the metrics of a step as a GraphReplay's."""
        return [
            ("loss", (self.loss, "float32"), None),
            ("weighted", (self.sum, "float64"), (self.loss, "float32")),
            ("rows", float(rows), 1.0),
        ]

    def record(self, launch: Callable[[Graph], Any] | None = None, prepare: Any = None) -> None:
        """Put a GraphReplay for each graph into `replays`, unless it is there."""
        for rows, graph in self.graphs.items():
            if rows in self._recorded:
                continue
            self._recorded.add(rows)
            self.replays.append(
                _core.GraphReplay(
                    self.depot.device,
                    graph.handle if launch is None else launch(graph),
                    graph.inputs,
                    self.metrics_for(rows),
                    [self.rate],
                    self._prepare if prepare is None else prepare,
                    self._context,
                )
            )

    def run(self, epoch: int = 0, mixes: Any = None, step: Any = None, **options: Any) -> Any:
        self.loader.begin([[0], [1, 2]] if mixes is None else mixes, epoch)
        return _core.run_unit(
            self.loader, self.step if step is None else step, replays=self.replays, **options
        )


class Graph:
    """A captured step for batches of one size."""

    def __init__(self, unit: Unit, shapes: list[Any]) -> None:
        step = Step(weight=unit.weight, loss=unit.loss, sum=unit.sum, rate=unit.rate)
        self.inputs = []
        for number, (shape, dtype, size) in enumerate(shapes):
            address = unit._allocate(max(size, 1))
            strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
            self.inputs.append((address, str(dtype), tuple(shape), strides))
            step.inputs[number], step.bytes[number] = address, size
        stream = POINTER()
        checked(runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), 1))
        captured, made = POINTER(), POINTER()
        checked(runtime.cudaStreamBeginCapture(stream, 1))
        checked(runtime.standin_train(stream, ctypes.byref(step)))
        checked(runtime.cudaStreamEndCapture(stream, ctypes.byref(captured)))
        checked(runtime.cudaGraphInstantiate(ctypes.byref(made), captured, 0))
        checked(runtime.cudaGraphDestroy(captured))
        checked(runtime.cudaStreamDestroy(stream))
        assert made.value is not None
        self.handle = made.value

    def close(self) -> None:
        checked(runtime.cudaGraphExecDestroy(self.handle))

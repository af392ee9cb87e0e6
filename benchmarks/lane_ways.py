"""What plain PyTorch makes of many small networks: the ways that `benchmarks.gpu_lanes` compares.

A way is a function that takes one step of all networks. Those of graphs and of the eager loop keep
every network apart, with its own bits; those that fuse the networks do not.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.lane_models import CLASSES, GroupedCnns, Make

WARM_UP = 3  # steps before a capture
Step = Callable[[], None]


@dataclass
class Place:
    """A device, and how long to measure there."""

    device: str
    seconds: float  # of a measurement

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def time(self, work: Step) -> float:
        """Return the median seconds of `work`, after one that does not count."""
        work()
        self.wait()
        end, taken = time.perf_counter() + self.seconds, []
        while len(taken) < 3 or time.perf_counter() < end:
            begun = time.perf_counter()
            work()
            self.wait()
            taken.append(time.perf_counter() - begun)
        return statistics.median(taken)

    def adam(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=lr, fused=True, capturable=self.is_gpu)


@dataclass
class Rows:
    """Resident data, and the rows of a batch."""

    x: torch.Tensor
    y: torch.Tensor
    chosen: torch.Tensor

    @classmethod
    def draw(cls, x: torch.Tensor, y: torch.Tensor, batch: int) -> Rows:
        return cls(x, y, torch.randint(len(x), (batch,), device=x.device))

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x.index_select(0, self.chosen), self.y.index_select(0, self.chosen)


@dataclass
class Network:
    """A network with its optimizer, stream and, once captured, graph."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    rows: Rows
    stream: Any = None
    graph: Any = None

    def step(self) -> None:
        x, y = self.rows.batch()
        self.optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(self.net(x), y).backward()
        self.optimizer.step()

    def replay(self) -> None:
        with torch.cuda.stream(self.stream):
            self.graph.replay()


def capture(step: Step) -> tuple[Any, Any]:
    """Return a graph of a step, and the stream on which it was captured."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        step()
    torch.cuda.synchronize()
    return graph, stream


@dataclass
class Found:
    """Seconds of one step of all networks, and of what comes before the first one."""

    step: float
    before: float
    keeps_bits: bool = True


@dataclass
class Ways:
    """The plain ways of one kind of network."""

    place: Place
    make: Make
    rows: Rows
    count: int
    _networks: list[Network] = field(default_factory=list)
    _built: float = 0.0

    def measure(self) -> Iterator[tuple[str, Callable[[], Found]]]:
        """Yield the name of each way, and a function that measures it."""
        yield "eager loop, fused Adam", self._eager
        if self.place.is_gpu:
            yield "a graph each, one stream", self._one_stream
            yield f"a graph each, {self.count} streams, one thread", self._streams
        yield "fused by vmap, eager", lambda: self._fused(self._vmap, graph=False)
        if self.place.is_gpu:
            yield "fused by vmap, a graph", lambda: self._fused(self._vmap, graph=True)

    def _eager(self) -> Found:
        begun = time.perf_counter()
        for number in range(self.count):
            net = self.make().to(self.place.device)
            optimizer = self.place.adam(net.parameters(), 1e-3 * (1 + number / self.count))
            self._networks.append(Network(net, optimizer, self.rows))
        self.place.wait()
        self._built = time.perf_counter() - begun
        step = self.place.time(lambda: [network.step() for network in self._networks] and None)
        return Found(step, self._built)

    def _one_stream(self) -> Found:
        begun = time.perf_counter()
        for network in self._networks:
            network.graph, network.stream = capture(network.step)
        self._built += time.perf_counter() - begun

        def step() -> None:
            for network in self._networks:
                network.graph.replay()

        return Found(self.place.time(step), self._built)

    def _streams(self) -> Found:
        steps = 20  # are launched before a wait, as in training

        def step() -> None:
            for _ in range(steps):
                for network in self._networks:
                    network.replay()

        return Found(self.place.time(step) / steps, self._built)

    def _vmap(self) -> Step:
        nets = [self.make().to(self.place.device) for _ in range(self.count)]
        for net in nets:  # running means cannot be updated in place there
            torch.func.replace_all_batch_norm_modules_(net)
        stacked, buffers = torch.func.stack_module_state(nets)
        base = copy.deepcopy(nets[0]).to("meta")
        optimizer = self.place.adam(stacked.values(), 1e-3)

        def call(parameters: Any, buffers: Any, x: torch.Tensor) -> Any:
            return torch.func.functional_call(base, (parameters, buffers), (x,))

        outputs_of = torch.func.vmap(call, in_dims=(0, 0, None))

        def step() -> None:
            x, y = self.rows.batch()
            optimizer.zero_grad(set_to_none=True)
            sum_of_losses(outputs_of(stacked, buffers, x), y).backward()
            optimizer.step()

        return step

    def _fused(self, make_step: Callable[[], Step], *, graph: bool) -> Found:
        begun = time.perf_counter()
        step = make_step()
        run = capture(step)[0].replay if graph else step
        built = time.perf_counter() - begun
        return Found(self.place.time(run), built, keeps_bits=False)

    def grouped(self, width: int) -> Iterator[tuple[str, Callable[[], Found]]]:
        """Yield the same of grouped convolutions, which only a CNN has."""
        for is_half in (False, True):
            name = "grouped convolutions" + (", channels_last, bf16" if is_half else "")
            make_step = partial(self._grouped, width, is_half=is_half)
            yield name, partial(self._fused, make_step, graph=self.place.is_gpu)

    def _grouped(self, width: int, *, is_half: bool) -> Step:
        layout = torch.channels_last if is_half else torch.contiguous_format
        net = GroupedCnns(width, self.count).to(self.place.device)
        net.blocks.to(memory_format=layout)
        optimizer = self.place.adam(net.parameters(), 1e-3)
        kind = torch.device(self.place.device).type

        def step() -> None:
            x, y = self.rows.batch()
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(kind, torch.bfloat16, enabled=is_half):
                outputs = net(x.contiguous(memory_format=layout))
            sum_of_losses(outputs.float(), y).backward()
            optimizer.step()

        return step


def sum_of_losses(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the sum of the networks' losses, from outputs of shape (networks, rows, classes)."""
    many = y.repeat(len(outputs))
    return functional.cross_entropy(outputs.reshape(-1, CLASSES), many, reduction="sum") / len(y)


def have_same_bits(one: nn.Module, other: nn.Module) -> bool:
    states: Sequence[dict[str, Any]] = (one.state_dict(), other.state_dict())
    pairs = ((states[0][name].cpu(), states[1][name].cpu()) for name in states[0])
    return all(torch.equal(here, there) for here, there in pairs)

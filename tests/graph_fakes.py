"""Stand-ins for CUDA graphs and for the C core that replays them, on the CPU.

`Again` does the work again when it replays, into the tensors that the capture has returned, with
the host's random numbers as they were when it captured: what Python decided stays decided.
`drive` is the loop of `_core.run_unit`, with what the core is given: addresses, and what to launch.
"""

from __future__ import annotations

import ctypes
import random
import threading
from unittest import mock

import numpy as np
import torch
from torch.nn import functional

import cerebro.torch
from cerebro.torch import graph_replay
from cerebro.torch.graph_rates import Rates
from cerebro.torch.graph_recorder import Captured

ROWS, SHORT = 6, 4
HELD = 12_345  # bytes of a recorded step


class Again:
    """Stands for a recorder of CUDA graphs; with `tells`, graphs have addresses."""

    def __init__(self, tells=True):
        self.replays = self.captures = 0
        self.tells = tells
        self.handles = {}
        self.groups = []  # of the optimizers, whose settings are constants of a graph

    def warm(self, work):
        return work()

    def run_watched(self, work):
        return self.warm(work), None

    def capture(self, work):
        self.captures += 1
        host = random.getstate(), np.random.get_state()
        constants = [dict(group) for group in self.groups]
        static = work()

        def replay():
            self.replays += 1
            now = random.getstate(), np.random.get_state()
            settings = [dict(group) for group in self.groups]
            for group, constant in zip(self.groups, constants, strict=True):
                group.update(constant)
            random.setstate(host[0])
            np.random.set_state(host[1])
            with mock.patch.object(Rates, "fill", lambda _: None):  # Python that does not run
                values = work()
            for name, value in values.items():
                fill(static[name], value)
            random.setstate(now[0])
            np.random.set_state(now[1])
            for group, setting in zip(self.groups, settings, strict=True):
                group.update(setting)

        handle = len(self.handles) + 1
        self.handles[handle] = replay
        return Captured(static, replay, HELD, handle if self.tells else None)


def fill(static, value):
    if isinstance(static, tuple):
        for one, other in zip(static, value, strict=True):
            fill(one, other)
    elif isinstance(static, torch.Tensor):
        static.copy_(value)


class Refuses(Again):
    """A device on which nothing can be captured."""

    def capture(self, work):
        work()
        raise RuntimeError("operation not permitted when stream is capturing\nCUDA error")


class Given:
    """A graph as the core gets it."""

    def __init__(self, device, launch, static, values, rates, prepare):
        self.launch, self.prepare, self.rates = launch, prepare, rates
        self.inputs = [graph_replay.describe_input(value) for value in static.values()]
        self.metrics = [graph_replay.describe_metric(*item) for item in values.items()]
        self.runs = 0

    def fits(self, batch):
        found = [graph_replay.describe_input(value) for value in batch.values()]
        return [form[1:] for form in found] == [form[1:] for form in self.inputs]

    def run(self, recorder, batch, rates):
        """Replay in another thread, as the one that drives all lanes; return the metrics."""
        for tensor, (address, *_) in zip(batch.values(), self.inputs, strict=True):
            ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes)
        for rate, address in zip(() if rates is None else rates, self.rates, strict=False):
            ctypes.c_float.from_address(address).value = rate
        launch = self.launch if callable(self.launch) else recorder.handles[self.launch]
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
        self.runs += 1
        return {
            name: read(value) if weight is None else (read(value), read(weight))
            for name, value, weight in self.metrics
        }


def read(value):
    if not isinstance(value, tuple):
        return float(value)
    address, name = value
    size = np.dtype(name).itemsize
    return float(np.frombuffer(ctypes.string_at(address, size), name)[0])


def drive(a_model, some, *, training=True):
    """Train or evaluate in one unit; return the metrics, and the batches that the core replayed."""
    step = a_model.train_batch if training else a_model.eval_batch
    recorder = a_model._recorded[0]._capturer._recorder
    a_model.begin_recorded_unit(training=training)
    replays = a_model.replays_for(step)
    found, replayed = [], []

    def fitting(batch):
        return next((one for one in replays or () if one.fits(batch)), None)

    while len(found) < len(some):
        rest = some[len(found) :]
        n = next((i for i, batch in enumerate(rest) if fitting(batch) is None), len(rest))
        rates = None
        while n:
            rates = fitting(rest[0]).prepare(n)
            if not isinstance(rates, int):
                break
            assert rates < n
            n = rates
        for i in range(n):
            row = None if rates is None else rates[i]
            replayed.append(len(found))
            found.append(fitting(rest[i]).run(recorder, rest[i], row))
        if not n:
            found += floats([step(rest[0])])
    assert a_model.end_recorded_unit(training=training) is None
    if training:
        a_model.end_unit()
    return found, replayed


def floats(values):
    return [
        {k: tuple(map(float, v)) if isinstance(v, tuple) else float(v) for k, v in one.items()}
        for one in values
    ]


# --- models ------------------------------------------------------------------------


def network(dropout=0.3):
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(dropout),
        torch.nn.Linear(8, 3),
    )  # fmt: skip


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=0.01)


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def rmsprop(net):
    return torch.optim.RMSprop(net.parameters(), lr=0.01)


def model(recorder=None, optimizer=adam, schedule=None, **options):
    """A model whose steps are recorded; by None: captured nowhere."""
    net = options.pop("net", None) or network()
    made = optimizer(net)
    if schedule is not None:
        options |= {"scheduler": schedule(made), "scheduler_step": "batch"}
    metrics = {"accuracy": accuracy, "pair": lambda o, t: (accuracy(o, t), len(t))}
    arguments = {"loss": functional.cross_entropy, "metrics": metrics, **options}
    result = cerebro.torch.Model(net, optimizer=made, graph=True, **arguments)
    recorder = Refuses() if recorder is None else recorder
    recorder.groups = made.param_groups
    result.capture(recorder)
    return result


def batches(count=12, short=(7,)):
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "x": torch.randn(SHORT if i in short else ROWS, 5, generator=generator),
            "y": torch.randint(0, 3, (SHORT if i in short else ROWS,), generator=generator),
        }
        for i in range(count)
    ]


def train(a_model, some=None):
    torch.manual_seed(3)
    random.seed(3)
    return [a_model.train_batch(batch) for batch in (some or batches())]

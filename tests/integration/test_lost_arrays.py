"""Arrays and tensors that a hop loses: in containers of all kinds, and first changed late."""

from __future__ import annotations

import array
import collections
import queue
import types
import warnings

import numpy as np
import pytest

import cerebro
from cerebro.errors import StateError

torch = pytest.importorskip("torch")
F = torch.nn.functional

LATE = 7
"""The check before a search trains on four batches."""


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, 4)).astype("f4")
    columns = {"x": x, "y": (x[:, 0] > 0).astype("i8")}
    return cerebro.shard(columns, tmp_path / "data", shards=2, progress=False)


class Slots:
    __slots__ = ("value",)

    def __init__(self, value=None):
        self.value = value


class Holder:
    def __init__(self, value=None):
        self.value = value


class Net(torch.nn.Linear):
    """A layer that keeps the means of its outputs; from batch `use` on it depends on them."""

    def __init__(self, since=0, use=1):
        super().__init__(4, 2)
        self.since, self.use = since, use
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.begin()

    def forward(self, x):
        output = super().forward(x)
        if not self.training:
            return output
        self.steps += 1
        step = int(self.steps)
        if step > self.since:
            self.keep(output.detach().mean(0))
        return output - self.kept() if step > self.use else output

    def begin(self):
        self.bank = None


class Plain(Net):
    def keep(self, mean):
        self.bank = mean if self.bank is None else 0.9 * self.bank + mean

    def kept(self):
        return 0 if self.bank is None else self.bank


class Numpy(Net):
    def begin(self):
        self.bank = np.zeros(2, "f4")

    def keep(self, mean):
        self.bank[:] += mean.numpy()

    def kept(self):
        return torch.from_numpy(self.bank)


class Gathered(Net):
    def keep(self, mean):
        self.bank.append(mean)

    def kept(self):
        return torch.stack(list(self.bank)).mean(0) if len(self.bank) else 0


class Deque(Gathered):
    def begin(self):
        self.bank = collections.deque(maxlen=50)


class List(Gathered):
    def begin(self):
        self.bank = []


class UserList(Gathered):
    def begin(self):
        self.bank = collections.UserList()


class Set(Gathered):
    def begin(self):
        self.bank = set()

    def keep(self, mean):
        self.bank.add(mean)

    def kept(self):
        return sum(sorted(mean.sum().item() for mean in self.bank))


class FrozenSet(Set):
    def begin(self):
        self.bank = frozenset()

    def keep(self, mean):
        self.bank = self.bank | {mean}


class Numbers(Set):
    def keep(self, mean):
        self.bank.add(float(mean.sum()))

    def kept(self):
        return sum(sorted(self.bank))


class Queue(Gathered):
    def begin(self):
        self.bank = queue.Queue()

    def keep(self, mean):
        self.bank.put(mean)

    def kept(self):
        means = list(self.bank.queue)
        return torch.stack(means).mean(0) if means else 0


class Bytes(Net):
    def begin(self):
        self.bank = bytearray(b"\0")

    def keep(self, mean):
        self.bank[0] = (self.bank[0] + 1) % 256

    def kept(self):
        return self.bank[0] / 10


class Array(Bytes):
    def begin(self):
        self.bank = array.array("B", [0])


class Attribute(Net):
    def begin(self):
        self.bank = self.holder(torch.zeros(2))

    def keep(self, mean):
        self.bank.value = 0.9 * self.bank.value + mean

    def kept(self):
        return self.bank.value


class InSlots(Attribute):
    holder = Slots


class InObject(Attribute):
    holder = Holder


class InNamespace(Attribute):
    def begin(self):
        self.bank = types.SimpleNamespace(value=torch.zeros(2))


class Mapping(Net):
    kind = dict

    def begin(self):
        self.bank = self.kind()

    def keep(self, mean):
        self.bank["v"] = self.bank.get("v", 0) + mean

    def kept(self):
        return self.bank.get("v", 0)


class Ordered(Mapping):
    kind = collections.OrderedDict


class Default(Mapping):
    def begin(self):
        self.bank = collections.defaultdict(list)

    def keep(self, mean):
        self.bank["v"].append(mean)

    def kept(self):
        return sum(self.bank["v"])


KINDS = [
    (Plain, "bank"),
    (Numpy, "bank"),
    (Deque, "bank[0]"),
    (List, "bank[0]"),
    (UserList, "bank.data[0]"),
    (Set, "bank[0]"),
    (FrozenSet, "bank[0]"),
    (Numbers, "bank["),
    (Queue, "bank.queue[0]"),
    (Bytes, "bank"),
    (Array, "bank"),
    (InSlots, "bank.value"),
    (InObject, "bank.value"),
    (InNamespace, "bank.value"),
    (Mapping, "bank['v']"),
    (Ordered, "bank['v']"),
    (Default, "bank['v'][0]"),
]


def searched(data, run, make, *, workers=0, **changes):
    def build(config):
        net = make()
        made = torch.optim.SGD(net.parameters(), lr=config["lr"])
        return cerebro.torch.Model(net, optimizer=made, loss=F.cross_entropy)

    options = {"searcher": "grid", "epochs": 3, "batch_size": 16, "progress": False} | changes
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        result = cerebro.search(
            build, {"lr": [0.1, 0.2]}, data, validation=0.25, run=run, workers=workers, **options
        )
    assert [trial.status for trial in result.trials] == ["finished", "finished"]
    return [str(warning.message) for warning in shown]


@pytest.mark.parametrize(("kind", "path"), KINDS)
def test_the_error_names_a_lost_tensor_in_any_container(data, tmp_path, kind, path):
    with pytest.raises(StateError) as caught:
        searched(data, tmp_path / "run", kind)
    assert f"model.net.{path}" in str(caught.value)
    assert "is lost by a hop" in str(caught.value)


@pytest.mark.parametrize("kind", [kind for kind, _ in KINDS if kind not in (Numbers, Bytes, Array)])
def test_a_warning_names_tensors_first_stored_after_the_check(data, tmp_path, kind):
    shown = searched(data, tmp_path / "run", lambda: kind(LATE, LATE))
    assert shown
    assert all("a hop loses model.net.bank" in text for text in shown)


@pytest.mark.parametrize("kind", [Plain, Deque])
def test_workers_warn_of_tensors_first_stored_after_the_check(data, tmp_path, kind):
    shown = searched(data, tmp_path / "run", lambda: kind(LATE, LATE), workers=2, live_models=1)
    assert shown
    assert all("a hop loses model.net.bank" in text for text in shown)


@pytest.mark.parametrize("kind", [Plain, Deque, Mapping])
def test_a_warning_names_tensors_used_long_after_they_were_stored(data, tmp_path, kind):
    shown = searched(data, tmp_path / "run", lambda: kind(LATE, 2 * LATE), epochs=4)
    assert shown
    assert all("a hop loses model.net.bank" in text for text in shown)


# --- what is not lost -------------------------------------------------------------------


class Cache(Net):
    """Keeps what it computes anew if it is missing; a smaller batch comes late."""

    def begin(self):
        self.bank = {}

    def forward(self, x):
        if len(x) not in self.bank:
            self.bank[len(x)] = torch.arange(len(x), dtype=torch.float32)[:, None] / 100
        return torch.nn.Linear.forward(self, x) + self.bank[len(x)]


class LastOutput(Net):
    """Keeps its last output for a look at it."""

    def forward(self, x):
        self.bank = torch.nn.Linear.forward(self, x)
        return self.bank


class Registered(Net):
    """Has references to its parameters and buffers in a list."""

    def begin(self):
        self.register_buffer("mean", torch.zeros(2))
        self.bank = [self.weight, self.mean]

    def keep(self, mean):
        self.mean.mul_(0.9).add_(mean)

    def kept(self):
        return self.mean


class Generator(Net):
    """Draws from its own generator, which is put back to the start of every batch."""

    def begin(self):
        self.bank = torch.Generator()

    def keep(self, mean):
        self.noise = torch.randn(2, generator=self.bank.manual_seed(int(self.steps)))

    def kept(self):
        return self.noise


@pytest.mark.parametrize("kind", [Cache, LastOutput, Registered, Generator])
def test_tensors_that_a_hop_does_not_lose_cause_no_warning(data, tmp_path, kind):
    assert searched(data, tmp_path / "run", kind, batch_size=13) == []

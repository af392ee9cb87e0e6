"""`cerebro.torch.features`: outputs of layers, identity, plan, and the whole network."""

from __future__ import annotations

import itertools
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cerebro

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from cerebro.torch import feature_plan, frozen_trunk  # noqa: E402
from cerebro.torch.feature_plan import LayerCost, choose_layers  # noqa: E402
from cerebro.transforms import Scale, ToCHW  # noqa: E402
from cerebro.worker.models import make_batches  # noqa: E402

ROWS = 40


def make_net() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3),
        nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> cerebro.Dataset:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 255, (ROWS, 6, 6, 3), np.uint8)
    folder = tmp_path_factory.mktemp("images")
    data = cerebro.shard({"x": x, "y": rng.integers(0, 3, ROWS)}, folder / "images", shards=3)
    return data.with_transforms({"x": [Scale(1 / 255), ToCHW()]})


def make(images: cerebro.Dataset, net: Any, path: Any, **options: Any) -> cerebro.torch.Features:
    options = {"layers": ["1", "4"], "batch_size": 16} | options
    return cerebro.torch.features(images, net, path=path, **options)


def pixels(images: cerebro.Dataset) -> Any:
    return torch.cat([batch["x"].clone() for batch in images.in_order(16, "torch")])


def column(data: cerebro.Dataset, name: str) -> Any:
    arrays = [data.shard(shard)[name] for shard in range(data.num_shards)]
    return torch.from_numpy(np.concatenate(arrays))


def test_several_layers_in_one_pass(images: cerebro.Dataset, tmp_path: Path) -> None:
    net = make_net()
    net[3].eval()
    made = make(images, net, tmp_path / "made")
    assert list(made.columns) == ["y", "1", "4"] and made.layers == {"1": "1", "4": "4"}
    assert made.same_bits == {"1": True, "4": True}
    assert net.training and not net[3].training  # as they were
    assert not any(part._forward_hooks for part in net.modules())
    x = pixels(images)
    with torch.no_grad():
        assert torch.equal(column(made, "1"), net.eval()[:2](x))  # before ReLU works in place
        assert torch.equal(column(made, "4"), net(x))
    assert torch.equal(column(made, "y"), column(images, "y"))
    train, _ = made.split(0.5, 0.5)
    assert type(train) is cerebro.Dataset


def test_columns_are_named_after_their_layers(images: cerebro.Dataset, tmp_path: Path) -> None:
    layers = {"early": "0", "pool": "4.1", "whole": ""}
    made = make(images, make_net(), tmp_path / "a", layers=layers, keep=[])
    assert list(made.columns) == ["early", "pool", "whole"]
    assert made.columns["pool"].shape == (6, 1, 1)
    made = make(images, make_net(), tmp_path / "b", layers=[""], dtypes="bfloat16")
    assert made.columns["output"].dtype == "bfloat16"


def test_a_pass_ends_after_the_deepest_layer(images: cerebro.Dataset, tmp_path: Path) -> None:
    net, calls = make_net(), []
    net[4].register_forward_hook(lambda *_: calls.append(1))
    make(images, net, tmp_path / "made", layers=["0"])
    assert len(calls) == 1  # the pass that shows that each layer runs once


def test_complete_joins_trunk_and_head(images: cerebro.Dataset, tmp_path: Path) -> None:
    made = make(images, make_net(), tmp_path / "made")
    torch.manual_seed(0)
    head = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    model = cerebro.torch.Model(
        head,
        optimizer=torch.optim.SGD(head.parameters(), lr=0.1),
        loss=nn.functional.cross_entropy,
        inputs="4",
    )
    whole, x = made.complete(model), pixels(images)
    assert not whole.training
    with torch.no_grad():
        wanted = model.predict(made)
        assert torch.equal(whole(x), wanted)
        program = torch.export.export(whole, (x,))
        assert torch.equal(program.module()(x), wanted)
    assert {name.partition(".")[0] for name in whole.state_dict()} == {"trunk", "head"}
    both = nn.Bilinear(4, 6, 3)
    pooled = {"a": "4.1", "b": "4"}
    made = make(images, make_net(), tmp_path / "two", layers=pooled)
    with pytest.raises(cerebro.InputError, match="name the head's input"):
        made.complete(both)
    with pytest.raises(cerebro.InputError, match="'y', which is not an output of the trunk"):
        made.complete(both, inputs=["b", "y"])
    low = make(images, make_net(), tmp_path / "low", layers=["4"], dtypes="float16")
    stored = column(low, "4").float()
    with torch.no_grad():
        assert torch.equal(low.complete(head)(x), head(stored))


def test_existing_features_are_found_by_hash(images: cerebro.Dataset) -> None:
    first = make(images, make_net(), None)
    assert first.path.parent == images.path.parent
    stamp = (first.path / "manifest.json").stat().st_mtime_ns
    again = make(images, make_net(), None)
    assert again.path == first.path
    assert (again.path / "manifest.json").stat().st_mtime_ns == stamp
    assert make(images, make_net(), None, layers=["4"]).path != first.path


def counted(net: Any) -> list[Any]:
    """Return a list with an entry for each pass that the network begins, now none."""
    calls: list[Any] = []
    net.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def test_a_url_is_refused_before_the_network_runs(
    images: cerebro.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net = make_net()
    calls = counted(net)
    match = "path must be a path on this machine, not the URL 's3://bucket/features'"
    with pytest.raises(cerebro.InputError, match=match):
        make(images, net, "s3://bucket/features")
    with pytest.raises(cerebro.InputError, match="path must be a path, not 7"):
        make(images, net, 7)
    assert calls == [] and list(tmp_path.iterdir()) == []


def test_images_in_object_storage_need_a_path(
    images: cerebro.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside their copy is the cache, which removes what no process uses."""
    pytest.importorskip("fsspec")
    monkeypatch.setenv("CEREBRO_CACHE", str(tmp_path / "cache"))
    shutil.copytree(images.path, tmp_path / "bucket" / "images")
    url = f"file://{tmp_path}/bucket/images"
    stored = cerebro.Dataset(url).with_transforms(images.transforms)
    net = make_net()
    calls = counted(net)
    for view in (stored, stored.split(0.5, 0.5)[0]):
        with pytest.raises(cerebro.InputError, match=rf"storage \({url}\).*: give path="):
            make(view, net, None)
    assert calls == []
    made = make(stored, net, tmp_path / "made")
    assert made.path == tmp_path / "made"
    assert made.checksum == make(images, net, tmp_path / "here").checksum
    folders = [path.name for path in (tmp_path / "cache" / "data").iterdir() if path.is_dir()]
    assert folders == [cerebro.Dataset(url).checksum]


# --- the disk ---------------------------------------------------------------------

ROW_BYTES = 8 + 4 * 36 * 4 + 6 * 4  # y and both layers
SHARD_ROWS = 14, 13, 13


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the disk have so many free bytes, as far as one asks."""
    usage = shutil.disk_usage("/")

    def set_free(nbytes: int) -> None:
        monkeypatch.setattr(
            "cerebro.data.derive.shutil.disk_usage", lambda _: usage._replace(free=nbytes)
        )

    return set_free


def test_a_full_disk_is_found_before_the_first_shard(
    images: cerebro.Dataset, tmp_path: Path, free: Callable[[int], None]
) -> None:
    free(ROWS * ROW_BYTES - 1)
    with pytest.raises(cerebro.InputError, match=r"columns take 24.3 kB, but .* has room for 24.3"):
        make(images, make_net(), tmp_path / "made")
    assert list(tmp_path.iterdir()) == []
    free(ROWS * ROW_BYTES)
    assert make(images, make_net(), tmp_path / "made").num_rows == ROWS


@pytest.mark.parametrize("damaged", [False, True])
def test_finished_shards_need_no_more_room(
    images: cerebro.Dataset, tmp_path: Path, free: Callable[[int], None], damaged: bool
) -> None:
    whole = make(images, make_net(), tmp_path / "whole").checksum
    net = make_net()
    calls = counted(net)

    def stop(*_: Any) -> None:
        if len(calls) == 7:  # two passes for halves, two for the first rows, one for each shard
            raise KeyboardInterrupt

    handle = net.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        make(images, net, tmp_path / "made")
    (part,) = tmp_path.glob(".made.part-*")
    if damaged:
        file = part / "shard-00001" / "4.npy"
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    missing = SHARD_ROWS[1:] if damaged else SHARD_ROWS[2:]
    calls.clear()
    free(sum(missing) * ROW_BYTES - 1)
    with pytest.raises(cerebro.InputError, match=r"shards that are missing take .* has room for"):
        make(images, net, tmp_path / "made")
    assert len(calls) == 4
    calls.clear()
    handle.remove()
    free(sum(missing) * ROW_BYTES)
    made = make(images, net, tmp_path / "made")
    assert len(calls) == 4 + len(missing) and made.checksum == whole


# --- refused ----------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Any) -> Any:
        return x * self.by


def test_another_trunk_or_version_is_refused(
    images: cerebro.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def net(by: float = 1.0, kind: Any = Scaled) -> Any:
        return nn.Sequential(*make_net(), kind(by))

    path = tmp_path / "made"
    made = make(images, net(), path)

    def refuse(match: str, net: Any, data: Any = images, **options: Any) -> None:
        with pytest.raises(cerebro.InputError, match=f"made' .*{match}"):
            make(data, net, path, **options)

    other = net()
    with torch.no_grad():
        other[0].bias[0] += 1e-6
    refuse("was made with another trunk: its parameters or buffers", other)
    other = net()
    other[1].running_mean[0] += 1
    refuse("was made with another trunk: its parameters or buffers", other)
    refuse("was made with another trunk: its modules, their settings", net(2.0))

    class Other(Scaled):
        def forward(self, x: Any) -> Any:
            return x * self.by  # the same numbers from other source

    Other.__qualname__, Other.__module__ = Scaled.__qualname__, Scaled.__module__
    refuse("was made with another trunk: its modules, their settings or their", net(1.0, Other))
    refuse("was derived with layers=", net(), layers=["4"])
    refuse("was derived with batch_size=14, not 8", net(), batch_size=8)
    refuse("was derived with threads=1, not 2", net(), threads=2)
    refuse("from other data, rows or transforms", net(), images.select(slice(1, None)))
    rescaled = images.with_transforms({"x": [Scale(1 / 254), ToCHW()]})
    refuse("from other data, rows or transforms", net(), rescaled)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "__version__", "1.0")
        refuse("was derived with torch=", net())
    assert make(images, net(), path).checksum == made.checksum


class OfBatch(nn.Module):
    def forward(self, x: Any) -> Any:
        return x - x.mean(0)


class Drops(nn.Module):
    def forward(self, x: Any) -> Any:
        return nn.functional.dropout(x, 0.5, training=True)


class Pair(nn.Module):
    def forward(self, x: Any) -> Any:
        return x, x


class ColumnsFirst(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.transpose(0, 1)


class RowsByRows(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.zeros(len(x), len(x))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x: Any) -> Any:
        return self.act(self.act(x))


@pytest.mark.parametrize(
    ("net", "options", "match"),
    [
        (nn.Sequential(OfBatch()), {}, "depends on the other rows of its batch"),
        (nn.Sequential(Drops()), {}, "depends on the other rows|computed again"),
        (
            nn.Sequential(ColumnsFirst()),
            {},
            r"'0' returns .* shape \(3, 14, 6, 6\)",
        ),
        (nn.Sequential(RowsByRows()), {}, r"'0' have the shape \(14,\) in a batch of 14 rows"),
        (nn.Sequential(nn.ReLU()), {"dtypes": {"1": "float16"}}, "column '1', but the new .* 0"),
        (nn.ReLU(), {}, "no module '0': it has only its own output, \"\""),
        (nn.Sequential(Pair()), {}, "'0' returns tuple, not a tensor"),
        (Twice(), {"layers": ["act"]}, "'act' runs 2 times"),
        (nn.Sequential(nn.ReLU()), {"layers": ["1"]}, "no module '1': it has '0'"),
        (nn.Sequential(nn.ReLU()), {"layers": "0"}, r'give a list of names, such as \["0"\]'),
        (nn.Sequential(nn.ReLU()), {"layers": []}, "layers is empty"),
        (nn.Sequential(nn.ReLU()), {"budget": "1kB"}, "17.6 kB, more than the budget of 1 kB"),
        (
            nn.Sequential(nn.ReLU()),
            {"budget": "much"},
            "give a number of bytes, or a string such as '20GB'",
        ),
        (nn.Sequential(nn.ReLU()), {"inputs": "q"}, "no column 'q'"),
        (len, {}, "net must be a torch.nn.Module"),
    ],
)
def test_bad_arguments(
    images: cerebro.Dataset, tmp_path: Path, net: Any, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(cerebro.InputError, match=match):
        make(images, net, tmp_path / "made", **({"layers": ["0"]} | options))
    assert list(tmp_path.iterdir()) == []


def test_a_budget_is_checked_before_the_network_runs(
    images: cerebro.Dataset, tmp_path: Path
) -> None:
    net = nn.Sequential(nn.ReLU())
    with pytest.raises(cerebro.InputError, match="more than the budget of 1 kB"):
        make(images, net, tmp_path, layers=["0"], budget="1kB")
    calls = counted(net)
    with pytest.raises(
        cerebro.InputError, match="give a number of bytes, or a string such as '20GB'"
    ):
        make(images, net, tmp_path, layers=["0"], budget="much")
    assert calls == [] and list(tmp_path.iterdir()) == []
    made = make(images, net, tmp_path, layers=["0"])
    assert make(images, net, made.path, layers=["0"], budget="1kB").path == made.path  # it exists


def test_plain_arrays_are_refused() -> None:
    net, arrays = nn.ReLU(), {"x": np.zeros((4, 2), np.float32)}
    with pytest.raises(cerebro.InputError, match="not dict: write arrays"):
        cerebro.torch.features(arrays, net, layers=[""])
    with pytest.raises(cerebro.InputError, match="not dict: write arrays"):
        cerebro.torch.plan_features(arrays, net, layers=[""], trials=1, epochs=1)


def test_a_plan_requires_one_output_row_per_input_row(images: cerebro.Dataset) -> None:
    net = nn.Sequential(ColumnsFirst())
    with pytest.raises(cerebro.InputError, match="choose a layer whose first dimension"):
        cerebro.torch.plan_features(images, net, layers=["0"], trials=1, epochs=1)


def test_nan_and_infinity_are_equal_to_themselves(images: cerebro.Dataset, tmp_path: Path) -> None:
    """A row that has them does not depend on other rows for that reason."""

    class Logarithms(nn.Module):
        def forward(self, x: Any) -> Any:
            return (x - 0.5).log() - (x == 0.0) / 0.0

    made = make(images, Logarithms(), tmp_path / "made", layers=[""])
    assert made.same_bits == {"output": True} and bool(column(made, "output").isnan().any())


# --- the plan ---------------------------------------------------------------------


def simulated(costs: dict[str, LayerCost], kept: set[str], epochs: int) -> float:
    """Add up the seconds of every pass, one after the other."""
    seconds = max((costs[name].compute for name in kept), default=0.0)
    for name, cost in costs.items():
        for _ in range(cost.trials * epochs):
            seconds += cost.load if name in kept else cost.compute
    return seconds


def test_the_plan_is_the_best_of_all_sets() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        computes = np.cumsum(rng.random(5))
        costs = {
            f"layer{i}": LayerCost(
                float(compute), float(rng.random()), int(rng.integers(1, 9)), int(rng.integers(4))
            )
            for i, compute in enumerate(computes)
        }
        budget, epochs = int(rng.integers(0, 25)), int(rng.integers(1, 4))
        keep, seconds = choose_layers(costs, epochs, budget)
        sets = [set(each) for n in range(6) for each in itertools.combinations(costs, n)]
        fitting = [s for s in sets if sum(costs[name].nbytes for name in s) <= budget]
        best = min(simulated(costs, kept, epochs) for kept in fitting)
        assert set(keep) in fitting and all(costs[name].trials for name in keep)
        assert seconds == pytest.approx(best)
        assert simulated(costs, set(keep), epochs) == pytest.approx(best)


def test_plan_features(images: cerebro.Dataset) -> None:
    options: dict[str, Any] = {"layers": ["4", "0"], "batch_size": 16, "epochs": 1000}
    plan = cerebro.torch.plan_features(images, make_net(), trials={"4": 16}, **options)
    assert plan.keep == ("4",) and list(plan.layers) == ["0", "4"]  # in the network's order
    assert {name: cost.nbytes for name, cost in plan.layers.items()} == {
        "0": ROWS * 4 * 36 * 4,
        "4": ROWS * 6 * 4,
    }
    assert plan.nbytes == ROWS * 24 and plan.seconds < plan.seconds_without
    assert plan.layers["0"].compute <= plan.layers["4"].compute
    plan = cerebro.torch.plan_features(images, make_net(), trials=8, budget="1 kB", **options)
    assert plan.keep == ("4",) and "a budget of 1 kB" in str(plan)
    none = cerebro.torch.plan_features(images, make_net(), trials=8, budget=0, **options)
    assert none.keep == () and none.seconds == none.seconds_without
    with pytest.raises(cerebro.InputError, match="'5' is not one of the layers"):
        cerebro.torch.plan_features(images, make_net(), trials={"5": 1}, **options)


class Gpu:
    """A GPU that works only while it is waited for, and a clock that goes only then."""

    def __init__(self) -> None:
        self.now, self.queued = 0.0, 0.0

    def launch(self, seconds: float) -> None:
        self.queued += seconds

    def synchronize(self, device: Any) -> None:
        assert str(device) == "cuda:1"
        self.now, self.queued = self.now + self.queued, 0.0


class Launched(nn.Module):
    """A layer that returns at once, but keeps the GPU busy for some seconds."""

    def __init__(self, gpu: Gpu, seconds: float) -> None:
        super().__init__()
        self.gpu, self.seconds = gpu, seconds

    def forward(self, x: Any) -> Any:
        self.gpu.launch(self.seconds)
        return x


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A stand-in for the GPU that all trunks are said to be on."""
    gpu = Gpu()
    clock = SimpleNamespace(perf_counter=lambda: gpu.now)
    monkeypatch.setattr(frozen_trunk, "time", clock)
    monkeypatch.setattr(feature_plan, "time", clock)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(frozen_trunk.Trunk, "device", "cuda:1")
    return gpu


def test_a_layer_on_a_gpu_is_timed_until_it_is_computed(gpu: Gpu) -> None:
    net = nn.Sequential(Launched(gpu, 2.0), Launched(gpu, 3.0), Launched(gpu, 4.0))
    timed = frozen_trunk.Trunk(net, ["1", "0"], "x", 1)
    gpu.launch(100.0)  # by others, before the pass
    timed.measure({"x": torch.zeros(4, 2)}, timed=True)
    assert timed.order == ["0", "1"] and timed.seconds == {"0": 2.0, "1": 5.0}


def test_a_gpu_plan_counts_copy_and_compute_time(
    images: cerebro.Dataset, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loading:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            gpu.launch(7.0)  # the copy to the GPU
            yield {"x": torch.zeros(10, 2)}

    monkeypatch.setattr(
        frozen_trunk,
        "make_derivation",
        lambda *_, **options: SimpleNamespace(batches=lambda rows, shard, copy: Loading()),
    )
    net = nn.Sequential(Launched(gpu, 2.0), Launched(gpu, 3.0), Launched(gpu, 90.0))
    plan = cerebro.torch.plan_features(images, net, layers=["0", "1"], trials=1, epochs=1)
    passes = ROWS / 10
    assert {name: cost.compute for name, cost in plan.layers.items()} == {
        "0": (7.0 + 2.0) * passes,
        "1": (7.0 + 2.0 + 3.0) * passes,
    }
    assert plan.seconds_without == 21.0 * passes


def test_a_network_on_the_cpu_waits_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("there is no GPU"))
    timed = frozen_trunk.Trunk(make_net(), ["4", "0"], "x", 1)
    timed.measure({"x": torch.zeros(4, 3, 6, 6)}, timed=True)
    assert timed.order == ["0", "4"] and 0 < timed.seconds["0"] < timed.seconds["4"]


# --- columns that are read --------------------------------------------------------


def test_a_model_gathers_only_the_columns_it_reads(images: cerebro.Dataset, tmp_path: Path) -> None:
    made = make(images, make_net(), tmp_path / "made")
    head = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    head(torch.zeros(2, 6))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)

    def columns_of(**options: Any) -> set[str]:
        model = cerebro.torch.Model(head, optimizer=optimizer, **options)
        loader = make_batches(model, made, 8, "cpu", seed=0)
        loader.begin([[0]], 0)
        return set(next(iter(loader)))

    loss = nn.functional.cross_entropy
    assert columns_of(loss=loss, inputs="4") == {"4", "y"}
    assert columns_of(loss=loss, inputs=["1"], target=None) == {"1"}
    assert columns_of(loss=loss, inputs="x") == {"1", "4", "y"}  # missing: the error lists all
    assert columns_of(loss=loss, inputs="4", augment=lambda batch: batch) == {"1", "4", "y"}
    assert columns_of(step=lambda net, batch: {"loss": 0.0}) == {"1", "4", "y"}


def test_a_network_on_a_gpu_is_sent_through_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """And arrives on the only GPU that a worker sees. The device "meta" stands for both."""
    net = nn.Linear(3, 2).to("meta")
    sent = frozen_trunk.Trunk(net, [""], "x", 1)
    monkeypatch.setattr(frozen_trunk, "is_gpu", lambda name: name == "meta")
    monkeypatch.setattr(frozen_trunk, "IN_WORKER", "cpu")
    moved: list[str] = []
    monkeypatch.setattr(nn.Module, "cpu", lambda self: moved.append("host") or self)
    monkeypatch.setattr(nn.Module, "to", lambda self, device: moved.append(device) or self)
    arrived = pickle.loads(pickle.dumps(sent))
    assert moved == ["host", "cpu"]
    assert (
        sent.net is net
        and arrived.layers == sent.layers
        and vars(arrived)
        == {
            **vars(sent),
            "net": arrived.net,
            "_get": arrived._get,
        }
    )


def test_a_network_on_the_cpu_is_sent_as_it_is() -> None:
    sent = frozen_trunk.Trunk(make_net(), ["0", "4"], "x", 1)
    arrived = pickle.loads(pickle.dumps(sent))
    assert arrived.identity() == sent.identity()

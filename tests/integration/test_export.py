"""Exported models: each format opens without Cerebro, and gives what the trained model gives."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import cerebro  # noqa: E402
import cerebro.cli as cli  # noqa: E402
import cerebro.transforms as transforms  # noqa: E402
from cerebro import InputError  # noqa: E402
from cerebro.machine.imports import install_hint  # noqa: E402

ROWS = 60


def columns() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(ROWS, 6)).astype("float32"),
        "image": rng.integers(0, 256, size=(ROWS, 4, 4, 3), dtype=np.uint8),
        "tokens": [rng.integers(1, 20, size=rng.integers(2, 9)) for _ in range(ROWS)],
        "y": rng.integers(0, 2, size=ROWS),
    }


@pytest.fixture
def data(tmp_path: Path) -> cerebro.Dataset:
    return cerebro.shard(columns(), tmp_path / "data", shards=2, progress=False)


def search(build: Any, data: Any, folder: Path, **more: Any) -> Any:
    arguments: dict[str, Any] = {"epochs": 2, "batch_size": 16, "validation": 0.25, "n_trials": 1}
    return cerebro.search(
        build,
        {"lr": cerebro.uniform(0.01, 0.1)},
        data,
        run=folder,
        workers=0,
        progress=False,
        **(arguments | more),
    )


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)
    )


def model(network: nn.Module, config: Any, **more: Any) -> Any:
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=config["lr"])
    arguments = {"loss": nn.functional.cross_entropy} | more
    return cerebro.torch.Model(network, optimizer=optimizer, **arguments)


def without_cerebro(code: str, folder: Path) -> str:
    """Run a program in which nothing can import Cerebro."""
    program = f"import sys; sys.modules['cerebro'] = None\n{code}"
    out = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, check=False, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    return out.stdout


NET = (
    "import torch; from torch import nn\n"
    "net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), "
    "nn.Linear(8, 2))\n"
)
SAME = (
    "net.load_state_dict(loaded); net.eval()\n"
    "given = torch.load('given.pt', weights_only=True)\n"
    "print(torch.equal(net(given['x']), given['out']))\n"
)


@pytest.mark.parametrize(
    ("format", "load"),
    [
        ("safetensors", "from safetensors.torch import load_file; loaded = load_file('net')\n"),
        ("torch", "loaded = torch.load('net', weights_only=True)\n"),
    ],
)
def test_weights_open_without_cerebro(data, tmp_path, format, load):
    pytest.importorskip("safetensors")
    best = search(lambda config: model(net(), config), data, tmp_path / "run").best
    trained = best.load().net
    x = torch.randn(5, 6)
    with torch.no_grad():
        torch.save({"x": x, "out": trained(x)}, tmp_path / "given.pt")
    best.export(tmp_path / "net", format)
    assert without_cerebro(NET + load + SAME, tmp_path) == "True\n"


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_weights_need_neither_build_nor_data(data, tmp_path, format):
    """As from the command line: build was defined in another program, and the data is gone."""
    search(lambda config: model(net(), config), data, tmp_path / "run")
    shutil.rmtree(data.path)
    found = cerebro.open(tmp_path / "run").best
    with pytest.raises(InputError):
        found.load()
    found.export(tmp_path / "net", format)
    assert (tmp_path / "net").stat().st_size > 4 * (6 * 8 + 8 + 5 * 8 + 8 * 2 + 2)


def test_any_kept_epoch_is_exported(data, tmp_path):
    best = search(lambda config: model(net(), config), data, tmp_path / "run", keep="all").best
    for epoch in (0, 1):
        path = best.export(tmp_path / f"{epoch}.pt", "torch", epoch=epoch)
        loaded = torch.load(path, weights_only=True)
        weights = best.load(epoch).net.state_dict()
        assert list(loaded) == list(weights)
        assert all(torch.equal(loaded[name], value) for name, value in weights.items())
    with pytest.raises(InputError, match="has no state of epoch 7"):
        best.export(tmp_path / "7.pt", "torch", epoch=7)


class Odd(nn.Module):
    """Names with special letters, tied weights, other types, a buffer without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a/b": nn.Linear(6, 6), "~1": nn.Linear(6, 6), "#0": nn.ReLU()})
        self.parts["~1"].weight = self.parts["a/b"].weight
        self.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Any) -> Any:
        x = self.parts["~1"](self.parts["a/b"](x)) + self.low.sum().float()
        return self.head(x)


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_export_keeps_names_dtypes_and_tied_weights(data, tmp_path, format):
    torch_files = pytest.importorskip("safetensors.torch")
    best = search(lambda config: model(Odd(), config), data, tmp_path / "run").best
    path = best.export(tmp_path / "net", format)
    load = torch_files.load_file if format == "safetensors" else torch.load
    loaded, weights = load(path), best.load().net.state_dict()
    assert loaded.keys() == weights.keys()
    assert "parts.a/b.weight" in loaded
    for name, value in weights.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value)
    Odd().load_state_dict(loaded)
    if format == "torch":  # one tensor, not the state's whole memory with it
        assert path.stat().st_size < best.state_path().stat().st_size


class Extra(nn.Module):
    """A state with something that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Any) -> Any:
        return self.head(x)

    def get_extra_state(self) -> Any:
        return {"words": ["a", "b"]}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"words": ["a", "b"]}


def test_the_error_names_values_that_safetensors_cannot_hold(data, tmp_path):
    best = search(lambda config: model(Extra(), config), data, tmp_path / "run").best
    with pytest.raises(InputError, match=r"state_dict has _extra_state: use format='torch'"):
        best.export(tmp_path / "net.safetensors")
    assert not (tmp_path / "net.safetensors").exists()
    loaded = torch.load(best.export(tmp_path / "net.pt", "torch"), weights_only=True)
    Extra().load_state_dict(loaded)


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_frozen_weights_come_from_build(data, tmp_path, format):
    """`state="trainable"` leaves them out of states, so the model is built."""
    torch_files = pytest.importorskip("safetensors.torch")

    def build(config: Any) -> Any:
        network = net()
        network[0].requires_grad_(False)
        return model(network, config, state="trainable")

    best = search(build, data, tmp_path / "run").best
    assert b"/model/net/0.weight" not in best.state_path().read_bytes()
    path = best.export(tmp_path / "net", format)
    loaded = (torch_files.load_file if format == "safetensors" else torch.load)(path)
    fresh = net()
    fresh.load_state_dict(loaded)
    assert torch.equal(fresh[0].weight, net()[0].weight)
    assert torch.equal(loaded["4.weight"], best.load().net[4].weight)
    with pytest.raises(InputError, match=r"pass it as build="):
        cerebro.open(tmp_path / "run").best.export(tmp_path / "other", format)
    cerebro.open(tmp_path / "run").best.export(tmp_path / "other", format, build=build)
    assert (tmp_path / "other").read_bytes() == path.read_bytes() or format == "torch"


def test_each_fold_is_exported(data, tmp_path):
    folds = cerebro.KFold(3)
    result = search(lambda c: model(net(), c), data, tmp_path / "run", validation=folds)
    with pytest.raises(InputError, match=r"has 3 folds, each with its own model"):
        result.best.export(tmp_path / "net.pt", "torch")
    for fold in result.best.folds:
        path = fold.export(tmp_path / f"{fold.fold}.pt", "torch")
        assert torch.equal(torch.load(path)["0.weight"], fold.load().net[0].weight)


class Two:
    """Four methods, two networks: what of the state are weights is not known."""

    framework = "torch"

    def __init__(self, lr: float) -> None:
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 2), nn.Linear(6, 2)
        self.optimizer = torch.optim.SGD([*self.a.parameters(), *self.b.parameters()], lr, 0.9)

    def train_batch(self, batch: Any) -> Any:
        output = self.a(batch["x"]) + self.b(batch["x"])
        loss = nn.functional.cross_entropy(output, batch["y"])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach()}

    def eval_batch(self, batch: Any) -> Any:
        with torch.no_grad():
            output = self.a(batch["x"]) + self.b(batch["x"])
            return {"loss": nn.functional.cross_entropy(output, batch["y"])}

    def state_dict(self) -> Any:
        parts = {"a": self.a, "b": self.b, "optimizer": self.optimizer}
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, state: Any) -> None:
        for name, part in state.items():
            getattr(self, name).load_state_dict(part)


def test_custom_models_export_their_whole_state(data, tmp_path):
    torch_files = pytest.importorskip("safetensors.torch")
    best = search(lambda config: Two(config["lr"]), data, tmp_path / "run").best
    trained = best.load()
    loaded = torch_files.load_file(best.export(tmp_path / "net.safetensors"))
    assert torch.equal(loaded["/a/weight"], trained.a.weight)
    assert "/optimizer/state/0/momentum_buffer" in loaded
    state = torch.load(best.export(tmp_path / "net.pt", "torch"), weights_only=True)
    Two(0.1).load_state_dict(state)
    assert torch.equal(state["b"]["weight"], trained.b.weight)
    with pytest.raises(InputError, match=r"needs a cerebro\.torch\.Model, not a model of another"):
        best.export(tmp_path / "net.onnx", "onnx")


def test_scikit_learns_models_are_exported_as_arrays(data, tmp_path):
    linear = pytest.importorskip("sklearn.linear_model")
    arrays = pytest.importorskip("safetensors.numpy")

    def build(config: Any) -> Any:
        return cerebro.sklearn.Model(linear.SGDClassifier(loss="log_loss"))

    best = search(build, data, tmp_path / "run").best
    loaded = arrays.load_file(best.export(tmp_path / "net.safetensors"))
    estimator = best.load().estimator
    assert np.array_equal(loaded["/attributes/coef_"], estimator.coef_)
    with pytest.raises(InputError, match=r"PyTorch's tensors; at '/attributes/.*ndarray.*safeten"):
        best.export(tmp_path / "net.pt", "torch")
    with pytest.raises(InputError, match=r"torch\.Model, not a cerebro\.sklearn\.Model"):
        best.export(tmp_path / "net.onnx", "onnx")


# --- ONNX ---------------------------------------------------------------------


class Sum(nn.Module):
    """Several inputs, by position or by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 2), nn.Linear(48, 2)

    def forward(self, first: Any, second: Any) -> Any:
        return self.left(first) + self.right(second.flatten(1))


class Bag(nn.Module):
    """Padded sequences and their mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 4), nn.Linear(4, 2)

    def forward(self, tokens: Any, mask: Any) -> Any:
        weight = mask.unsqueeze(2).to(torch.float32)
        return self.head((self.words(tokens) * weight).sum(1) / weight.sum(1))


def outputs_of(path: Path, feeds: list[dict[str, Any]]) -> list[Any]:
    """What onnxruntime gives, in a process without Cerebro."""
    folder = path.parent
    for index, feed in enumerate(feeds):
        np.savez(folder / f"{index}.npz", **feed)
    code = (
        "import numpy as np, onnxruntime\n"
        "onnxruntime.set_default_logger_severity(3)\n"
        f"session = onnxruntime.InferenceSession({path.name!r}, "
        "providers=['CPUExecutionProvider'])\n"
        f"for index in range({len(feeds)}):\n"
        "    feed = dict(np.load(f'{index}.npz'))\n"
        "    assert [each.name for each in session.get_inputs()] == list(feed)\n"
        "    np.save(f'{index}.npy', session.run(None, feed)[0])\n"
    )
    without_cerebro(code, folder)
    return [np.load(folder / f"{index}.npy") for index in range(len(feeds))]


CASES = {
    "one column": (net, "x", {"x": "x"}),
    "a list": (Sum, ["x", "image"], {"x": "x", "image": "image"}),
    "a mapping": (Sum, {"second": "image", "first": "x"}, {"second": "image", "first": "x"}),
    "ragged": (
        Bag,
        {"tokens": "tokens", "mask": "tokens_mask"},
        {"tokens": "tokens", "mask": "tokens_mask"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_onnx_gives_the_same_outputs_for_any_number_of_rows(data, tmp_path, case):
    for module in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(module)
    make, inputs, named = CASES[case]
    data = data.with_transforms({"image": [transforms.Scale(1 / 255)]})
    result = search(lambda c: model(make(), c, inputs=inputs), data, tmp_path / "run")
    path = result.best.export(tmp_path / "net.onnx", "onnx")
    batches = [next(iter(data.batches(rows, seed=rows))) for rows in (1, 9)]
    feeds = [{name: b[column].numpy() for name, column in named.items()} for b in batches]
    trained = result.best.load()
    for batch, found in zip(batches, outputs_of(path, feeds), strict=True):
        assert found.shape == (len(batch["y"]), 2)
        expected = trained.predict_batch(batch).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_onnx_holds_one_file_in_evaluation_mode(data, tmp_path):
    """Dropout is gone, and the statistics of batch norm are those of training."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    best = search(lambda config: model(net(), config), data, tmp_path / "run").best
    state = torch.random.get_rng_state()
    (tmp_path / "out").mkdir()
    path = best.export(tmp_path / "out" / "net.onnx", "onnx")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert list((tmp_path / "out").iterdir()) == [path]
    graph = onnx.load(path).graph
    assert [entry.name for entry in graph.input] == ["x"]
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert "Dropout" not in {node.op_type for node in graph.node}


def test_onnx_takes_data_that_have_been_moved(data, tmp_path):
    pytest.importorskip("onnxscript")
    result = search(lambda config: model(net(), config), data, tmp_path / "run")
    shutil.move(data.path, tmp_path / "moved")
    best = cerebro.open(tmp_path / "run", build=lambda config: model(net(), config)).best
    with pytest.raises(InputError, match=r"without the run's data .*moved, give data="):
        best.export(tmp_path / "net.onnx", "onnx")
    assert not (tmp_path / "net.onnx").exists()
    best.export(tmp_path / "net.onnx", "onnx", data=tmp_path / "moved")
    assert (tmp_path / "net.onnx").exists()
    assert result.best.number == 0


def test_onnx_of_a_fold_takes_the_folds_rows(data, tmp_path):
    pytest.importorskip("onnxscript")
    folds = cerebro.KFold(2)
    result = search(lambda c: model(net(), c), data, tmp_path / "run", validation=folds)
    assert result.best.folds[1].export(tmp_path / "net.onnx", "onnx").exists()


class Unexportable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Any) -> Any:
        return self.head(x) if float(x.sum()) > 0 else self.head(-x)


def test_the_error_names_a_network_that_onnx_cannot_hold(data, tmp_path):
    pytest.importorskip("onnxscript")
    best = search(lambda config: model(Unexportable(), config), data, tmp_path / "run").best
    with pytest.raises(InputError, match=r"^PyTorch cannot export the Unexportable to ONNX: \S"):
        best.export(tmp_path / "net.onnx", "onnx")


def test_onnx_with_a_step_needs_inputs(data, tmp_path):
    """The step calls the network itself; nothing says with what."""
    pytest.importorskip("onnxscript")

    def step(network: Any, batch: Any) -> Any:
        output = network(batch["image"].flatten(1).float())
        return {"loss": nn.functional.cross_entropy(output, batch["y"])}

    best = search(
        lambda c: model(nn.Linear(48, 2), c, step=step, inputs="pixels", loss=None),
        data,
        tmp_path / "run",
    ).best
    with pytest.raises(InputError, match=r"inputs names the column 'pixels', but the data has x"):
        best.export(tmp_path / "net.onnx", "onnx")


def test_the_error_names_a_missing_package(data, tmp_path, monkeypatch):
    best = search(lambda config: model(net(), config), data, tmp_path / "run").best
    for module in ("onnx", "onnxscript"):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, module, None)
            with pytest.raises(InputError) as raised:
                best.export(tmp_path / "net.onnx", "onnx")
            assert str(raised.value).endswith(
                f"{module} halted; None in sys.modules): {install_hint('onnx')}"
            )


def test_safetensors_needs_no_package(data, tmp_path, monkeypatch):
    best = search(lambda config: model(net(), config), data, tmp_path / "run").best
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert best.export(tmp_path / "net.safetensors").exists()


# --- the command --------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import cerebro
from test_export import model, net

def build(config):
    return model(net(), config)

if __name__ == "__main__":
    folds = cerebro.KFold(2) if sys.argv[1:] == ["folds"] else 0.25
    cerebro.search(build, {{"lr": [0.1]}}, "data", epochs=1, batch_size=16, validation=folds,
                   run="run", workers=0, progress=False, searcher="grid")
"""


@pytest.fixture
def trained(data, tmp_path, monkeypatch) -> Any:
    """Train by a script, and go where it is."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield lambda *arguments: subprocess.run([sys.executable, script, *arguments], check=True)
    sys.modules.pop("train", None)


def test_the_command_exports_what_a_script_has_trained(trained, capsys):
    """Weights need no `build`; ONNX takes the script's, or --build, and --data."""
    pytest.importorskip("onnxscript")
    trained()
    for out in ("w.safetensors", "w.pt"):
        assert cli.main(["export", "run", "--out", out]) == 0
        assert capsys.readouterr() == (f"{out}\n", "")
    script = Path("train.py")
    text = script.read_text(encoding="utf-8")
    script.write_text(text + "# edited\n", encoding="utf-8")
    assert cli.main(["export", "run", "--out", "w.onnx"]) == 1
    assert "train.py, which has changed since" in capsys.readouterr().err
    script.write_text(text, encoding="utf-8")
    assert cli.main(["export", "run", "--out", "v.onnx"]) == 0
    assert capsys.readouterr().out == "v.onnx\n"
    built = ["export", "run", "--build", "train.py"]
    assert cli.main([*built, "--out", "w.onnx"]) == 0
    assert capsys.readouterr().out == "w.onnx\n"
    shutil.move("data", "moved")
    assert cli.main([*built, "--format", "onnx"]) == 1
    assert "--data PATH" in capsys.readouterr().err
    assert cli.main([*built, "--format", "onnx", "--data", "moved"]) == 0
    assert capsys.readouterr().out == "run/trial-0.onnx\n"


def test_the_command_asks_for_a_fold(trained, capsys):
    trained("folds")
    assert cli.main(["export", "run"]) == 1
    assert capsys.readouterr().err == (
        "error: trial 0 has 2 folds, each with its own model: "
        "choose one with --fold 0 to --fold 1\n"
    )
    assert cli.main(["export", "run", "--fold", "1"]) == 0
    assert capsys.readouterr().out == "run/trial-0-fold-1.safetensors\n"

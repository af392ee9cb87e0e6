"""cerebro.native.Model: against PyTorch, against itself, and what it says of bad input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro
import cerebro._core as _core
from cerebro.cli import doctor as proof
from cerebro.errors import InputError, StateError
from cerebro.model import check_model
from cerebro.native import Model

SHAPE, CLASSES, FILTERS, ROWS = (3, 10, 7), 5, (4, 6), 9
# Of float32 sums over at most some hundred terms in another order, relative to the largest value.
TOLERANCE = 2e-6


def make_model(**settings: Any) -> Model:
    return Model(SHAPE, CLASSES, **{"filters": FILTERS, "seed": 3, **settings})


def make_batches(count: int = 6) -> list[dict[str, Any]]:
    generator = np.random.RandomState(7)
    return [
        {
            "x": generator.standard_normal((ROWS, *SHAPE)).astype(np.float32),
            "y": generator.randint(0, CLASSES, ROWS),
        }
        for _ in range(count)
    ]


def state_bytes(model: Model) -> bytes:
    return bytes(_core.pack_state(model.state_dict()))


def test_the_model_follows_the_protocol() -> None:
    model = make_model()
    check_model(model)
    assert cerebro.native.Model is Model
    assert [v.shape for v in model.state_dict()["values"].values()] == [
        (4, 3, 3, 3),
        (4,),
        (6, 4, 3, 3),
        (6,),
        (5, 6 * 2 * 1),
        (5,),
    ]


# --- against PyTorch ----------------------------------------------------------


def torch_twin(model: Model) -> Any:
    torch = pytest.importorskip("torch")
    nn = torch.nn
    net = nn.Sequential(
        nn.Conv2d(SHAPE[0], FILTERS[0], 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(FILTERS[0], FILTERS[1], 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(FILTERS[1] * 2 * 1, CLASSES),
    )
    with torch.no_grad():
        for own, value in zip(net.parameters(), model.state_dict()["values"].values(), strict=True):
            own.copy_(torch.from_numpy(value))
    return net


def assert_near(ours: Any, theirs: Any, tolerance: float = TOLERANCE) -> None:
    theirs = theirs.detach().numpy()
    assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max()


def test_scores_and_gradients_match_pytorch() -> None:
    torch = pytest.importorskip("torch")
    model = make_model(lr=0.0)
    net = torch_twin(model)
    batch = make_batches(1)[0]
    scores = net(torch.from_numpy(batch["x"]))
    loss = torch.nn.functional.cross_entropy(scores, torch.from_numpy(batch["y"]))
    loss.backward()
    assert_near(model.predict_batch(batch), scores)
    values = model.train_batch(batch)
    assert values["loss"] == pytest.approx(loss.item(), rel=TOLERANCE)
    assert values["accuracy"] == (scores.argmax(1).numpy() == batch["y"]).mean()
    assert model.eval_batch(batch) == values
    # At a learning rate of 0 the first momenta are the gradients.
    for own, parameter in zip(
        model.state_dict()["momenta"].values(), net.parameters(), strict=True
    ):
        assert_near(own, parameter.grad)


def test_training_matches_pytorch() -> None:
    torch = pytest.importorskip("torch")
    model = make_model(lr=0.02, momentum=0.8)
    net = torch_twin(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.8)
    for batch in make_batches():
        optimizer.zero_grad()
        scores = net(torch.from_numpy(batch["x"]))
        torch.nn.functional.cross_entropy(scores, torch.from_numpy(batch["y"])).backward()
        optimizer.step()
        model.train_batch(batch)
    for own, parameter in zip(model.state_dict()["values"].values(), net.parameters(), strict=True):
        assert_near(own, parameter, 10 * TOLERANCE)


# --- exactness ----------------------------------------------------------------


def test_the_same_batches_give_the_same_bits() -> None:
    first, second = make_model(), make_model()
    for batch in make_batches():
        first.train_batch(batch)
        first.predict_batch({"x": batch["x"][:2]})  # leaves nothing behind
        second.train_batch(batch)
    assert state_bytes(first) == state_bytes(second)
    other = make_model(momentum=0.8)
    for batch in make_batches():
        other.train_batch(batch)
    assert state_bytes(other) != state_bytes(first)


def test_a_loaded_state_continues_training_exactly() -> None:
    straight, before = make_model(), make_model()
    batches = make_batches()
    for batch in batches[:3]:
        straight.train_batch(batch)
        before.train_batch(batch)
    after = make_model(seed=99)
    after.load_state_dict(_core.unpack_state(_core.pack_state(before.state_dict()), "numpy"))
    for batch in batches[3:]:
        straight.train_batch(batch)
        after.train_batch(batch)
    assert state_bytes(straight) == state_bytes(after)


def test_a_state_is_loaded_in_place() -> None:
    model, other = make_model(), make_model(seed=99)
    tree = _core.load_into(_core.pack_state(other.state_dict()), model.state_dict())
    assert tree is not None
    model.load_state_dict(tree)
    assert state_bytes(model) == state_bytes(other)


def test_initial_values_depend_on_the_seed() -> None:
    np.random.seed(11)
    first = make_model(seed=None)
    np.random.seed(11)
    assert state_bytes(make_model(seed=None)) == state_bytes(first)
    assert state_bytes(make_model(seed=None)) != state_bytes(first)
    assert state_bytes(make_model(seed=11)) == state_bytes(first)
    for name, value in first.state_dict()["values"].items():
        most = np.sqrt(6 / value[0].size) if value.ndim == 4 else 1 / np.sqrt(value[0].size)
        assert not value.any() if name.endswith("bias") else 0 < np.abs(value).max() <= most


def test_any_host_array_is_accepted_as_a_batch(tmp_path: Any) -> None:
    batch = make_batches(1)[0]
    scores = make_model().predict_batch(batch)
    metrics = make_model().eval_batch(batch)
    data = cerebro.shard(batch, tmp_path / "data", shards=1, shuffle=False, progress=False)
    (ours,) = data.batches(ROWS, framework="dlpack", shuffle=False)
    assert isinstance(ours["x"], _core.Tensor)
    strided = {"x": np.asfortranarray(batch["x"]), "y": batch["y"].astype(np.uint8)}
    for other in (ours, strided):
        assert make_model().predict_batch(other).tobytes() == scores.tobytes()
        assert make_model().eval_batch(other) == metrics


def test_divergence_shows_in_loss_and_values() -> None:
    model = make_model()
    batch = make_batches(1)[0]
    batch["x"][2, 0, 3, 3] = np.nan
    assert np.isnan(model.train_batch(batch)["loss"])
    assert all(np.isnan(value).any() for value in model.state_dict()["values"].values())


# --- bad input ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shape": (3, 10)}, r"shape must be 3 whole numbers, not \(3, 10\)"),
        ({"shape": (3, 10.5, 7)}, "shape must be 3 whole numbers"),
        ({"shape": (3, 3, 7)}, "height must be from 4 to 65536, not 3"),
        ({"shape": (-1, 8, 7)}, "channels must be"),
        ({"classes": 1}, "classes must be from 2 to 65536, not 1"),
        ({"classes": "ten"}, "classes must be a whole number, not str"),
        ({"filters": 8}, "filters must be 2 whole numbers, not 8"),
        ({"filters": (4, 0)}, "the second of filters must be from 1 to 65536"),
        ({"lr": -0.1}, "lr must be at least 0, not -0.1"),
        ({"lr": float("nan")}, "lr must be a number"),
        ({"lr": "fast"}, "lr must be a number"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, not 1.0"),
        ({"seed": -1}, "seed: "),
        ({"device": "gpu"}, "device must be 'cpu', 'cuda' or 'cuda:0' and so on, not 'gpu'"),
        ({"inputs": ["x"]}, r"inputs must be the name of a column, not \['x'\]"),
    ],
)
def test_invalid_arguments_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Model(**{"shape": SHAPE, "classes": CLASSES, **settings})


PICTURES = np.zeros((2, *SHAPE), np.float32)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"y": [0, 1]}, r"inputs names the column 'x', but the data has \['y'\]"),
        ({"x": PICTURES}, r"target names the column 'y', but the data has \['x'\]"),
        ({"x": PICTURES.astype("u1"), "y": [0, 1]}, r"'x' must be float32, not uint8: .*Scale"),
        ({"x": PICTURES[:, :, 1:], "y": [0, 1]}, r"'x' must have the shape \(rows, 3, 10, 7\)"),
        ({"x": PICTURES[0], "y": [0, 1]}, r"'x' must have the shape .* not \(3, 10, 7\)"),
        ({"x": PICTURES[:0], "y": []}, "'x' must have the shape .* with at least one row"),
        ({"x": PICTURES, "y": [0.0, 1.0]}, r"'y' must be integers of shape \(rows,\), not float64"),
        ({"x": PICTURES, "y": [[0], [1]]}, "'y' must be integers of shape"),
        ({"x": PICTURES, "y": [0]}, "2 rows of 'x', but 1 of 'y'"),
        ({"x": PICTURES, "y": [0, 5]}, "target 'y': the label of row 1 is 5, .* 5 classes, from 0"),
        ({"x": PICTURES, "y": [-1, 0]}, "target 'y': the label of row 0 is -1"),
    ],
)
def test_batches_of_no_use_change_nothing(batch: dict[str, Any], message: str) -> None:
    model = make_model()
    before = state_bytes(model)
    for method in (model.train_batch, model.eval_batch):
        with pytest.raises(InputError, match=message):
            method(batch)
    assert state_bytes(model) == before


def test_states_of_other_networks_are_refused() -> None:
    model = make_model()
    before = state_bytes(model)
    wider = Model(SHAPE, CLASSES, filters=(4, 7), seed=3)
    with pytest.raises(StateError, match=r"conv2.weight: the state has float32 of shape \(7, 4,"):
        model.load_state_dict(wider.state_dict())
    with pytest.raises(StateError, match=r"has momenta of conv1.weight, conv1.bias"):
        model.load_state_dict({"values": model.state_dict()["values"]})
    assert state_bytes(model) == before


def test_the_core_takes_dense_arrays_alone() -> None:
    net = _core.NativeNet(*SHAPE, *FILTERS, CLASSES)
    labels = np.zeros(2, np.int64)
    for pictures in (PICTURES[:, :, :, ::-1], PICTURES.astype(">f4"), PICTURES[:0], [1.0]):
        with pytest.raises(ValueError, match=r"dense float32 array of shape \(rows, 3, 10, 7\)"):
            net.evaluate(pictures, labels)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="dense float32"):
            net.predict(pictures)  # type: ignore[arg-type]
    for wrong in (labels[:1], labels.astype(np.int32), labels[:, None], None):
        with pytest.raises(ValueError, match=r"dense int64 array of shape \(2,\)"):
            net.differentiate(PICTURES, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind must be 'values', 'momenta' or 'gradients'"):
        net.parts("weights")  # type: ignore[arg-type]


def test_parts_outlive_the_network() -> None:
    net = _core.NativeNet(*SHAPE, *FILTERS, CLASSES)
    part = np.asarray(net.parts("gradients")["linear.bias"])
    net.evaluate(PICTURES, np.zeros(2, np.int64))
    net.differentiate(PICTURES, np.zeros(2, np.int64))
    expected = part.copy()
    del net
    assert part.tobytes() == expected.tobytes() and part.any()


# --- on a GPU, over the stand-ins for CUDA and cuDNN ----------------------------

ON_DEVICE = """
import numpy as np
import cerebro
from cerebro import _core; from cerebro.cli import doctor as proof
from cerebro.native import Model

data = proof.draw_pictures(48)
batches = [
    {"x": data["x"][i : i + 16] / np.float32(255), "y": data["y"][i : i + 16]}
    for i in range(0, 48, 16)
]
def make(device, seed=3):
    return Model((1, 16, 16), 4, filters=(3, 5), lr=0.05, seed=seed, device=device)

def bits(model):
    return bytes(_core.pack_state(model.state_dict()))

host, gpu, first = make("cpu"), make("cuda"), make("cuda:0")
assert bits(host) == bits(gpu)
for batch in batches:
    want, have = host.train_batch(batch), gpu.train_batch(batch)
    assert abs(want["loss"] - have["loss"]) < 1e-4 and want["accuracy"] == have["accuracy"]
    first.train_batch(batch)
assert bits(gpu) == bits(first)
np.testing.assert_allclose(
    gpu.predict_batch(batches[0]), host.predict_batch(batches[0]), atol=1e-4
)
assert abs(gpu.eval_batch(batches[1])["loss"] - host.eval_batch(batches[1])["loss"]) < 1e-4

hopped = make("cuda", seed=9)  # a state travels, in place and not
tree = _core.load_into(_core.pack_state(gpu.state_dict()), hopped.state_dict())
hopped.load_state_dict(tree)
other = make("cuda", seed=8)
other.load_state_dict(_core.unpack_state(_core.pack_state(gpu.state_dict()), "numpy"))
for model in (gpu, hopped, other):
    model.train_batch(batches[0])
assert bits(gpu) == bits(hopped) == bits(other)

proof.EPOCHS, proof.LEARNED, proof.SPACE = 1, 0.0, {"lr": [0.01, 0.05], "filters": [2]}
raise SystemExit(proof.self_test())
"""


def test_gpu_training_matches_the_host(
    cudart_standin: Path, cudnn_standin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agrees with the host, hops, and `doctor --train` trains there too."""
    monkeypatch.setenv("CEREBRO_CUDART", str(cudart_standin))
    monkeypatch.setenv("CEREBRO_CUDNN", str(cudnn_standin))
    done = subprocess.run([sys.executable, "-c", ON_DEVICE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "reproduces its bits: yes, all 2 states on cpu are the same" in done.stdout
    assert "reproduces its bits: yes, all 2 states on cuda:0 are the same" in done.stdout


def test_without_cudnn_the_gpu_is_refused(
    cudart_standin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CEREBRO_CUDART", str(cudart_standin))
    monkeypatch.setenv("CEREBRO_CUDNN", str(cudart_standin))
    code = "from cerebro.native import Model; Model((1, 8, 8), 2, device='cuda')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "lacks cudnnGetVersion, so it is not cuDNN 9" in done.stderr


# --- the pictures of doctor --train -------------------------------------------


def test_pictures_are_reproducible_and_show_every_figure() -> None:
    first, second = proof.draw_pictures(40), proof.draw_pictures(40)
    assert first["x"].tobytes() == second["x"].tobytes()
    assert first["x"].shape == (40, 1, 16, 16) and first["x"].dtype == np.uint8
    assert np.bincount(first["y"]).tolist() == [10] * len(proof.FIGURES)


def test_the_first_difference_is_found() -> None:
    assert proof.find_difference({"a": "1", "b": "2"}, {"a": "1", "b": "2"}) is None
    assert proof.find_difference({"a": "1", "b": "2"}, {"a": "1", "b": "3"}) == "b"
    assert proof.find_difference({"a": "1"}, {"a": "1", "b": "3"}) == "b"


@pytest.mark.parametrize(
    ("inline", "line"),
    [
        (({"trial 0 after epoch 0": "0"}, 1.0), "reproduces its bits: no, on cpu trial 0 after"),
        (
            ({"trial 0 after epoch 0": "f"}, 0.5),
            "does not learn: on cpu the best accuracy is 0.500",
        ),
    ],
)
def test_a_failed_proof_reports_its_cause(
    monkeypatch: pytest.MonkeyPatch, inline: tuple[dict[str, str], float], line: str
) -> None:
    hopped = ({"trial 0 after epoch 0": "f"}, 1.0)
    monkeypatch.setattr(proof, "choose_devices", lambda: (["cpu"], ""))
    monkeypatch.setattr(
        proof, "train_states", lambda data, run, workers, device: [inline, hopped][workers > 0]
    )
    lines: list[str] = []
    assert proof.self_test(lines.append) == 1
    assert lines[-1].startswith(line)

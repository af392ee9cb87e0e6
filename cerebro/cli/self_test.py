"""``python -m cerebro doctor --train``: check that this installation trains reproducibly.

A small search with the network of `cerebro.native` runs on generated images, with two workers and
once inline. Both must end in the same states, bit for bit, and the best model must have learned its
task. With cuDNN, the same test runs on each GPU. It needs neither a framework nor a download.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cerebro
from cerebro.errors import DeviceError
from cerebro.machine import cuda

SIDE = 16  # pixels
FIGURES = ("disc", "square", "cross", "stripes")
ROWS = 1200
SHARDS = 4
EPOCHS = 4
WORKERS = 2
# The accuracy that the best model must reach; guessing gives 0.25, and 1.0 is usual.
LEARNED = 0.9
SPACE = {"lr": [0.01, 0.05], "filters": [4, 8]}


def draw_pictures(rows: int = ROWS) -> dict[str, NDArray[Any]]:
    """Draw noisy figures: ``x``, uint8 (rows, 1, 16, 16), and ``y``, an index into `FIGURES`."""
    generator = np.random.RandomState(0)
    y = np.arange(rows) % len(FIGURES)
    size = generator.uniform(3.0, 6.0, rows)[:, None, None]
    centre = generator.uniform(6.0, SIDE - 7.0, (2, rows))[:, :, None, None]
    down, right = np.mgrid[:SIDE, :SIDE][:, None] - centre
    far = np.maximum(abs(down), abs(right))
    figures = [
        down**2 + right**2 <= size**2,
        far <= size,
        (np.minimum(abs(down), abs(right)) <= 1) & (far <= size),
        (far <= size) & (np.floor(down) % 3 == 0),
    ]
    bright = generator.uniform(0.5, 1.0, rows)[:, None, None]
    ground = generator.uniform(0.0, 0.3, (rows, SIDE, SIDE))
    values = np.maximum(np.choose(y[:, None, None], figures) * bright, ground)
    return {"x": np.round(values * 255).astype(np.uint8)[:, None], "y": y}


def build(config: dict[str, Any]) -> Any:
    filters = (config["filters"], 2 * config["filters"])
    return cerebro.native.Model(
        (1, SIDE, SIDE), len(FIGURES), filters=filters, lr=config["lr"], device=config["device"]
    )


def train_states(
    data: cerebro.Dataset, run: Path, workers: int, device: str = "cpu"
) -> tuple[dict[str, str], float]:
    """Run a search; return the state hashes of all trials and epochs, and the best accuracy."""
    train, valid = data.split(0.8, 0.2)
    result = cerebro.search(
        build,
        {**SPACE, "device": device},
        train,
        epochs=EPOCHS,
        validation=valid,
        searcher="grid",
        metric="accuracy",
        batch_size=32,
        workers=workers,
        devices="cpu",
        run=str(run),
        progress=False,
    )
    hashes = {
        f"trial {trial.number} after epoch {epoch}": record["state_hash"]
        for trial in result.trials
        for epoch, record in enumerate(trial.history)
    }
    return hashes, float(result.best.metrics["accuracy"])


def find_difference(first: dict[str, str], second: dict[str, str]) -> str | None:
    """Return the name of the first state that differs between two searches; None if all agree."""
    for name in sorted(first.keys() | second.keys()):
        if first.get(name) != second.get(name):
            return name
    return None


def devices() -> tuple[list[str], str]:
    """Return the devices to train on, and why an existing GPU is left out."""
    try:
        count = len(cuda.describe_devices())
    except DeviceError:
        return ["cpu"], ""
    try:
        if cuda.cudnn_path() is None:
            return ["cpu"], "there is no cuDNN 9 (pip install nvidia-cudnn-cu13, or -cu12)"
    except DeviceError as error:
        return ["cpu"], str(error)
    return ["cpu", *(f"cuda:{index}" for index in range(count))], ""


def prove(data: cerebro.Dataset, place: Path, device: str, say: Callable[[str], object]) -> bool:
    """Train on one device with and without workers; return whether bits match and it learns."""
    hopped, accuracy = train_states(data, place / "hopped", WORKERS, device)
    say(f"  {device}, {WORKERS} workers: accuracy {accuracy:.3f}")
    inline, accuracy = train_states(data, place / "inline", 0, device)
    say(f"  {device}, in this process: accuracy {accuracy:.3f}")
    difference = find_difference(hopped, inline)
    if difference is not None:
        say(f"reproduces its bits: no, on {device} {difference} differs with {WORKERS} workers")
        return False
    say(f"reproduces its bits: yes, all {len(hopped)} states on {device} are the same")
    if accuracy < LEARNED:
        say(f"does not learn: on {device} the best accuracy is {accuracy:.3f}, below {LEARNED}")
        return False
    return True


def main(say: Callable[[str], object] = print) -> int:
    """Train, compare, and `say` the results; return 0 if models learn and states agree, else 1."""
    names, problem = devices()
    with tempfile.TemporaryDirectory(prefix="cerebro-doctor-") as folder:
        place = Path(folder)
        data = cerebro.shard(draw_pictures(), place / "data", shards=SHARDS, progress=False)
        data = data.with_transforms({"x": [cerebro.transforms.Scale(1 / 255)]})
        say(f"training 4 small networks on {ROWS} drawn images, {EPOCHS} epochs:")
        if problem:
            say(f"  not on the GPU: {problem}")
        good = [prove(data, place / name.replace(":", "-"), name, say) for name in names]
    return 0 if all(good) else 1

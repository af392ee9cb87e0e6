"""``doctor``: print what this machine has and what is missing; check that it trains reproducibly.

For ``--train``, a small search with the network of `cerebro.native` runs on generated images, with
two workers and once inline. Both must end in the same states, bit for bit, and the best model must
have learned its task. With cuDNN, the same test runs on each GPU. It needs neither a framework nor
a download.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cerebro
import cerebro._core as _core
from cerebro.cli.options import json_option, new_command, print_json
from cerebro.errors import DeviceError
from cerebro.machine import cuda, environment, files, resources
from cerebro.machine.devices import has_driver
from cerebro.machine.imports import install_hint
from cerebro.machine.libraries import TORCH
from cerebro.report import format as fmt


def add(commands: Any) -> None:
    parser = new_command(commands, "doctor", main, "print what this machine offers")
    parser.add_argument("path", nargs="?", default=".", help="the folder for data and runs (.)")
    parser.add_argument(
        "--train",
        action="store_true",
        help="also train small networks, with workers and without, and compare their bits",
    )
    json_option(parser)


def main(options: argparse.Namespace) -> int:
    """Print what this machine has; return 1 if ``--train`` finds different bits, else 0."""
    if options.json:
        return _print_json(options)
    print(report(options.path))
    if not options.train:
        return 0
    print(flush=True)
    return self_test()


def _print_json(options: argparse.Namespace) -> int:
    rows = _describe_machine(options.path)
    findings: dict[str, Any] = {"gpus": [text for name, text in rows if name == "gpu"]}
    findings |= {name: text for name, text in rows if name != "gpu"}
    findings["extras"] = {
        extra: {"purpose": purpose, "missing": _find_missing(modules)}
        for extra, (purpose, modules) in EXTRAS.items()
    }
    status = 0
    if options.train:
        lines: list[str] = []
        status = self_test(lines.append)
        findings["train"] = {"passed": status == 0, "lines": lines}
    print_json(findings)
    return status


# For each extra: its purpose, and the modules that it installs.
EXTRAS = {
    "torch": ("PyTorch models", ("torch",)),
    "sklearn": ("scikit-learn models", ("sklearn",)),
    "jax": ("JAX models", ("jax", "optax")),
    "keras": ("Keras models", ("keras",)),
    "parquet": ("Parquet and Arrow files", ("pyarrow", "pandas")),
    "images": ("folders of images", ("PIL",)),
    "plots": ("plots of runs", ("matplotlib",)),
    "search": ("quasi-random search", ("scipy",)),
    "optuna": ("Optuna's samplers and studies", ("optuna",)),
    "ray": ("Ray Tune and clusters", ("ray",)),
    "cluster": ("agents on several machines", ("zmq",)),
    "dask": ("agents on a Dask cluster", ("distributed", "zmq")),
    "spark": ("agents on Spark", ("pyspark", "zmq")),
    "onnx": ("export to ONNX", ("onnx", "onnxscript")),
    "storage": ("data and runs in object storage", ("fsspec", "s3fs")),
    "tensorboard": ("logs for TensorBoard", ("tensorboard",)),
    "mlflow": ("logs to MLflow", ("mlflow",)),
    "wandb": ("logs to Weights & Biases", ("wandb",)),
    "completion": ("shell completion", ("shtab",)),
}

LOW_DISK_BYTES = 5_000_000_000


def report(path: str | os.PathLike[str] = ".") -> str:
    """Describe the machine as text; `path` is the folder for data and runs."""
    rows = [*_describe_machine(path), *_describe_extras()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _describe_machine(path: str | os.PathLike[str]) -> list[tuple[str, str]]:
    record, cpu = environment.describe(), environment.cpu()
    packages = ", ".join(f"{name} {version}" for name, version in record["packages"].items())
    core, cores = Path(str(_core.__file__)).name, resources.usable_cores()
    total = os.cpu_count() or cores
    rows = [
        ("cerebro", f"{record['cerebro']}, C core {core}; no compiler is needed to run"),
        ("python", f"{record['python']} ({sys.executable})"),
        ("packages", packages),
        ("cpu", f"{cpu['model']}, {cpu['instruction_set']}"),
        ("cores", f"{cores}" if cores == total else f"{cores} usable of {total}"),
        ("memory", fmt.size(resources.total_memory())),
    ]
    if environment.is_importable("torch"):
        rows.append(("torch", _describe_torch()))
    rows += _describe_gpus()
    set_variables = environment.describe()["variables"]
    if set_variables:
        names = ", ".join(f"{k}={v}" for k, v in set_variables.items())
        rows.append(("variables", f"{names} (these change the bits of results)"))
    return rows + _describe_disk(Path(path))


def _describe_torch() -> str:
    try:
        import torch
    except Exception as error:  # a broken installation may raise anything
        return f"does not import: {error}"
    flags, built_for = TORCH.present(), torch.version.cuda
    build = "built without CUDA" if built_for is None else f"built for CUDA {built_for}"
    if built_for is None and has_driver():
        build += ", but a driver is loaded: install PyTorch's build for CUDA"
    return (
        f"{torch.get_num_threads()} threads by default (a worker uses 1 unless threads= says "
        f"otherwise), {flags['default_dtype']}, {torch.backends.cpu.get_cpu_capability()}, {build}"
    )


def _describe_gpus() -> list[tuple[str, str]]:
    """Return rows about CUDA, after initializing it on every GPU in this process."""
    try:
        runtime = cuda.open_runtime()
        devices = cuda.describe_devices()
    except DeviceError as error:
        return [("gpu", f"not usable: {error}")]
    rows = [("gpu", _describe_gpu(i, about)) for i, about in enumerate(devices)]
    versions = [cuda.version_text(runtime[name]) for name in ("version", "driver")]
    rows.append(("cuda", f"runtime {versions[0]} ({runtime['path']}), driver for {versions[1]}"))
    mps = "running: processes that share a device compute at the same time"
    if not (any(about["mps"] for about in devices) or cuda.is_mps_running()):
        mps = "not running: processes that share a device, as on a cluster, take turns; "
        mps += "nvidia-cuda-mps-control -d starts it"
    rows.append(("mps", mps))
    rows.append(("cudnn", _describe_cudnn(runtime["version"])))
    return rows


def _describe_gpu(index: int, about: Mapping[str, Any]) -> str:
    """Describe one GPU after checking it again, as before its first use; the result is stored."""
    name = f"cuda:{index}"
    major, minor = about["capability"]
    text = (
        f"{name}, {about['name']}, {fmt.size(about['memory'])}, compute capability "
        f"{major}.{minor}, {about['multiprocessors']} multiprocessors"
    )
    try:
        problem = cuda.find_problem(name, anew=True)
        if not problem:  # also checked in this process
            device = cuda.open_device(name)
            device.check()
            free, _ = device.memory()
    except (DeviceError, MemoryError) as error:
        problem = str(error)
    if problem:
        return f"{text}; DOES NOT WORK: {problem}; PyTorch moves batches to it, if it can use it"
    text += f"; works, {fmt.size(free)} free"
    if device.unpinned is not None:
        text += f"; no pinned host memory ({device.unpinned}): copies are slower"
    return text


def _describe_cudnn(runtime: int) -> str:
    major = runtime // 1000
    install = f"pip install nvidia-cudnn-cu{major}"
    try:
        library = cuda.find_cudnn()
    except DeviceError as error:
        return str(error)
    if library is None:
        return f"missing; only cerebro.native needs it: {install}"
    version = library["version"]
    text = (
        f"{version // 10000}.{version % 10000 // 100}.{version % 100} for CUDA "
        f"{cuda.version_text(library['cuda'])} ({library['path']})"
    )
    if library["cuda"] // 1000 != major:
        text += f", which is not this runtime's: {install}"
    return text


def _describe_disk(path: Path) -> list[tuple[str, str]]:
    place = path.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    kind = files.file_system(place)
    low = "; low: data and states need space" if free < LOW_DISK_BYTES else ""
    rows = [("disk", f"{fmt.size(free)} free on {kind} at {place}{low}")]
    if files.is_network_file_system(place):
        rows.append(
            ("network", f"{kind} is a network file system: slower; a local disk is better for runs")
        )
    return rows


def _describe_extras() -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for extra, (purpose, modules) in EXTRAS.items():
        missing = _find_missing(modules)
        state, cure = ("missing", f": {install_hint(extra)}") if missing else ("present", "")
        rows.append(("" if rows else "extras", f"{extra:<8} {state}  for {purpose}{cure}"))
    return rows


def _find_missing(modules: Sequence[str]) -> list[str]:
    return [module for module in modules if not environment.is_importable(module)]


# --- doctor --train ----------------------------------------------------------

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
    names = sorted(first.keys() | second.keys())
    return next((name for name in names if first.get(name) != second.get(name)), None)


def choose_devices() -> tuple[list[str], str]:
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


def self_test(say: Callable[[str], object] = print) -> int:
    """Train, compare, and `say` the results; return 0 if models learn and states agree, else 1."""
    names, problem = choose_devices()
    with tempfile.TemporaryDirectory(prefix="cerebro-doctor-") as folder:
        place = Path(folder)
        data = cerebro.shard(draw_pictures(), place / "data", shards=SHARDS, progress=False)
        data = data.with_transforms({"x": [cerebro.transforms.Scale(1 / 255)]})
        say(f"training 4 small networks on {ROWS} drawn images, {EPOCHS} epochs:")
        if problem:
            say(f"  not on the GPU: {problem}")
        good = [prove(data, place / name.replace(":", "-"), name, say) for name in names]
    return 0 if all(good) else 1

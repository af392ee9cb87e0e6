"""``doctor``: print what this machine has and what is missing."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    from cerebro.cli import self_test

    if options.json:
        return _print_json(options)
    print(report(options.path))
    if not options.train:
        return 0
    print(flush=True)
    return self_test.main()


def _print_json(options: argparse.Namespace) -> int:
    findings: dict[str, Any] = {"gpus": []}
    for name, text in _machine_rows(options.path):
        if name == "gpu":
            findings["gpus"].append(text)
        else:
            findings[name] = text
    findings["extras"] = {
        extra: {"purpose": purpose, "missing": _find_missing(modules)}
        for extra, (purpose, modules) in EXTRAS.items()
    }
    status = 0
    if options.train:
        from cerebro.cli import self_test

        lines: list[str] = []
        status = self_test.main(lines.append)
        findings["train"] = {"passed": status == 0, "lines": lines}
    print_json(findings)
    return status


# For each extra: its purpose, and the modules that it installs.
EXTRAS = {
    "torch": ("PyTorch models", ("torch",)),
    "sklearn": ("scikit-learn models", ("sklearn",)),
    "jax": ("JAX models", ("jax", "optax")),
    "keras": ("Keras models", ("keras",)),
    "parquet": ("Parquet and Arrow files, pandas tables", ("pyarrow", "pandas")),
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
    rows = _machine_rows(path)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in [*rows, *_describe_extras(width)])


def _machine_rows(path: str | os.PathLike[str]) -> list[tuple[str, str]]:
    return [*_describe_software(), *_describe_machine(), *_describe_disk(Path(path))]


def _describe_software() -> list[tuple[str, str]]:
    record = environment.describe()
    packages = ", ".join(f"{name} {version}" for name, version in record["packages"].items())
    return [
        ("cerebro", f"{record['cerebro']}, {_describe_core()}"),
        ("python", f"{record['python']} ({sys.executable})"),
        ("packages", packages),
    ]


def _describe_core() -> str:
    try:
        import cerebro._core as core
    except ImportError as error:
        return f"the C core does not load ({error}): pip install -e . builds it"
    return f"C core {Path(str(core.__file__)).name}; no compiler is needed to run"


def _describe_machine() -> list[tuple[str, str]]:
    cpu = environment.cpu()
    cores = resources.usable_cores()
    total = os.cpu_count() or cores
    usable = f"{cores}" if cores == total else f"{cores} usable of {total}"
    rows = [
        ("cpu", f"{cpu['model']}, {cpu['instruction_set']}"),
        ("cores", usable),
        ("memory", fmt.size(resources.total_memory())),
    ]
    if environment.is_importable("torch"):
        rows.append(("torch", _describe_torch()))
    rows += _describe_gpus()
    set_variables = environment.describe()["variables"]
    if set_variables:
        names = ", ".join(f"{k}={v}" for k, v in set_variables.items())
        rows.append(("variables", f"{names} (these change the bits of results)"))
    return rows


def _describe_torch() -> str:
    try:
        import torch
    except Exception as error:  # a broken installation may raise anything
        return f"does not import: {error}"
    flags = TORCH.present()
    return (
        f"{torch.get_num_threads()} threads by default (a worker uses 1 unless threads= says "
        f"otherwise), {flags['default_dtype']}, {torch.backends.cpu.get_cpu_capability()}, "
        f"{_describe_torch_build(torch)}"
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
    rows.append(("mps", _describe_mps(devices)))
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


def _describe_mps(devices: Sequence[Mapping[str, Any]]) -> str:
    if any(about["mps"] for about in devices) or cuda.is_mps_running():
        return "running: workers of one device compute at the same time"
    return (
        "not running: with workers_per_device above 1, workers take turns; "
        "nvidia-cuda-mps-control -d starts it"
    )


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


def _describe_torch_build(torch: Any) -> str:
    """Return the CUDA version of PyTorch's build, and a fix if PyTorch cannot use the GPU."""
    if torch.version.cuda is not None:
        return f"built for CUDA {torch.version.cuda}"
    if has_driver():
        return "built without CUDA, but a driver is loaded: install PyTorch's build for CUDA"
    return "built without CUDA"


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


def _describe_extras(width: int) -> list[tuple[str, str]]:
    rows = []
    for i, (extra, (purpose, modules)) in enumerate(EXTRAS.items()):
        missing = _find_missing(modules)
        state, cure = ("missing", f": {install_hint(extra)}") if missing else ("present", "")
        text = f"{extra:<8} {state}  for {purpose}{cure}"
        rows.append(("extras" if i == 0 else "", text))
    return rows


def _find_missing(modules: Sequence[str]) -> list[str]:
    return [module for module in modules if not environment.is_importable(module)]

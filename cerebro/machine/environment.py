"""Describe the environment of a run, besides code and data: versions, CPU, threads, flags.

The same configuration gives the same bits only on the same kind of machine, with the same library
versions, instruction set and thread count. :func:`describe` returns these for the run's record,
:func:`list_differences` compares two records, and ``python -m cerebro doctor`` prints them. torch
is examined only if it is already imported; nothing here imports it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np

from cerebro.machine.imports import DISTRIBUTION, find_whole_module
from cerebro.machine.libraries import JAX, KERAS, TORCH
from cerebro.machine.mappings import flatten
from cerebro.machine.resources import usable_cores

# Packages whose versions can change the bits of a run, or determine which data can be read.
PACKAGES = (
    "numpy", "torch", "torchvision", "jax", "jaxlib", "optax", "scikit-learn", "scipy", "mkl",
    "pandas", "pyarrow", "pillow", "cloudpickle",
)  # fmt: skip

# NVIDIA's libraries, whose packages can be replaced independently of PyTorch: a different version
# chooses different kernels. Also the plugins that install them for JAX.
CUDA_LIBRARIES = ("cublas", "cudnn", "cufft", "curand", "cusolver", "cusparse", "cuda-runtime")

CUDA_PACKAGES = (
    *(f"nvidia-{name}{cuda}" for name in CUDA_LIBRARIES for cuda in ("", "-cu12", "-cu13")),
    *(f"jax-cuda{major}-plugin" for major in (12, 13)),
)

BACKEND_VARIABLE = "KERAS_BACKEND"

HASH_SEED = "PYTHONHASHSEED"
"""The variable on which the order of a set of strings depends."""

DEFAULT_HASH_SEED = "0"
"""The seed of workers if the user has not chosen one: then Python draws one for every process."""

# Variables that make libraries choose other kernels or orders, and so change the bits.
VARIABLES = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA", "GLIBC_TUNABLES", BACKEND_VARIABLE, "KMP_DETERMINISTIC_REDUCTION",
    "LD_PRELOAD", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "MKL_DYNAMIC", "MKL_ENABLE_INSTRUCTIONS",
    "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", "NVIDIA_TF32_OVERRIDE", "OMP_DYNAMIC",
    "OMP_SCHEDULE", "OMP_THREAD_LIMIT", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE", HASH_SEED, "XLA_FLAGS",
)  # fmt: skip

# Set to `threads` in workers, and unchanged in the caller's process. XLA reads the last one when
# JAX first computes in a process.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC")

# Patterns of library versions in PyTorch's description of its build.
TORCH_LIBRARIES = {
    "mkl": r"Math Kernel Library Version (\S+)",
    "onednn": r"(?:MKL-DNN|oneDNN) v(\S+)",
    "openmp": r"OpenMP (\S+)",
    "lapack": r"LAPACK is enabled \((.*)\)",
    "blas": r"BLAS_INFO=(\w+)",
    "compiler": r"GCC (\S+)",
}

# Vector instruction sets by the Linux kernel's names, best first.
INSTRUCTION_SETS = {
    "amx_tile": "AMX",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "avx": "AVX",
    "sse4_2": "SSE4.2",
    "sve": "SVE",
    "asimd": "NEON",
}

VECTOR_FEATURES = ("amx", "avx", "f16c", "fma", "sse4", "sve", "asimd", "bf16", "i8mm")


def version() -> str:
    return package_version(DISTRIBUTION) or "unknown"


def package_version(name: str) -> str | None:
    """Return the version of an installed package, or None, without importing the package."""
    from importlib import metadata  # slow to import, because it imports the email package

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def cpu() -> dict[str, str]:
    """Return the CPU's ``model``, its best vector ``instruction_set``, and all ``features``.

    The features are the names of its vector and matrix instructions, separated by spaces.
    """
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip().lower(), value.strip())
    model = fields.get("model name") or platform.processor() or platform.machine()
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    names = [name for flag, name in INSTRUCTION_SETS.items() if flag in flags]
    return {
        "model": model,
        "instruction_set": names[0] if names else platform.machine(),
        "features": " ".join(sorted(flag for flag in flags if flag.startswith(VECTOR_FEATURES))),
    }


@functools.cache
def gpu() -> str | None:
    """Return the GPUs' names and driver version, or None, without starting a driver."""
    names = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            names += re.findall(r"^Model:\s*(.+?)\s*$", file.read_text(), re.MULTILINE)
    if not names:
        return None
    driver = ""
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        driver = "".join(re.findall(r"\b\d+\.\d+(?:\.\d+)?\b", text)[:1])
    return f"{', '.join(names)} (driver {driver or 'unknown'})"


@functools.cache
def numpy_blas() -> str:
    try:
        config: Any = np.show_config(mode="dicts")
        blas = config["Build Dependencies"]["blas"]
        return f"{blas['name']} {blas.get('version', '')}".strip()
    except (TypeError, KeyError):  # before NumPy 1.25 the configuration could only be printed
        return "unknown"


def torch_libraries() -> dict[str, str]:
    """Return the versions of PyTorch's libraries; empty if PyTorch is not imported."""
    torch = find_whole_module("torch")
    if torch is None or not hasattr(torch, "__config__"):
        return {}
    text = torch.__config__.show()
    matches = {name: re.search(pattern, text) for name, pattern in TORCH_LIBRARIES.items()}
    return {name: match[1].rstrip(",") for name, match in matches.items() if match is not None}


def cuda() -> dict[str, Any] | None:
    """Describe the CUDA that PyTorch uses in this process; None if it has not started."""
    torch = find_whole_module("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    its = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": its.name,
        "capability": f"{its.major}.{its.minor}",
        "multiprocessors": its.multi_processor_count,
        "runtime": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def jax_backend() -> str | None:
    """Return JAX's backend in this process, such as "gpu"; None if it has not started."""
    jax = find_whole_module("jax")
    bridge = sys.modules.get("jax._src.xla_bridge")  # calling JAX itself would start the backend
    has_started = getattr(bridge, "backends_are_initialized", None)
    if jax is None or has_started is None or not has_started():
        return None
    return str(jax.default_backend())


def uses_gpu(record: Mapping[str, Any]) -> bool:
    """Return whether a process computes on a GPU, given its record from `describe`."""
    return "cuda" in record or record.get("jax_backend") in ("gpu", "cuda", "rocm")


def _versions(names: Iterable[str]) -> dict[str, str]:
    return {name: text for name in names if (text := package_version(name)) is not None}


def describe(threads: int | None = None, device: str = "cpu") -> dict[str, Any]:
    """Describe this process, with `threads` per worker on a `device`, for a run's record.

    Returns JSON values: ``cerebro python packages system libc cpu gpu device cuda cuda_packages
    jax_backend keras jax cores threads blas torch torch_capability torch_libraries variables``;
    ``cuda``, ``jax_backend``, ``keras`` and ``jax`` only if they have started.
    """
    torch = find_whole_module("torch")
    more = {
        "cuda_packages": None if device == "cpu" else _versions(CUDA_PACKAGES),
        "cuda": None if device == "cpu" else cuda(),
        "jax_backend": jax_backend(),
        "keras": KERAS.present() or None,
        "jax": JAX.present() or None,
    }
    return {
        "cerebro": version(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": _versions(PACKAGES),
        "system": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip(),
        "cpu": dict(cpu()),
        "gpu": gpu(),
        "device": "cpu" if device == "cpu" else "cuda",
        **{name: value for name, value in more.items() if value is not None},
        "cores": usable_cores(),
        "threads": threads,
        "blas": numpy_blas(),
        "torch": TORCH.present(),
        "torch_capability": torch and str(torch.backends.cpu.get_cpu_capability()),
        "torch_libraries": torch_libraries(),
        "variables": _variables(threads),
    }


def read_variables() -> dict[str, str]:
    """Return the members of `VARIABLES` that are set, and Keras's actual backend if imported."""
    values = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if (keras := KERAS.module()) is not None:  # `present` would make Keras's default policy
        values[BACKEND_VARIABLE] = str(keras.backend.backend())
    return values


def hash_seed(variables: Mapping[str, Any] | None = None) -> str:
    """Return the hash seed of a run's workers, so that sets have the same order in all of them.

    `variables` are those in the record of a continued run; default: this process's.
    """
    seed = str((os.environ if variables is None else variables).get(HASH_SEED) or "")
    return seed if seed.isdigit() else DEFAULT_HASH_SEED


def _variables(threads: int | None) -> dict[str, str]:
    """Return `read_variables()`; with `threads`, also thread variables that differ from it."""
    values = read_variables()
    for name in THREAD_VARIABLES:
        value = os.environ.get(name)
        if value is not None and threads is not None and value != str(threads):
            values[name] = value
    return values


def list_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the differences between two records that could change a run's bits.

    Each is a line such as ``"packages.torch was 2.12.0, is 2.13.0"``. The number of cores is left
    out, because it changes nothing, and so are fields that only one record has, such as those of
    libraries that only one process had imported. Keras's backend and the hash seed count if both
    records have one.
    """
    fields = before.keys() & now.keys()
    old, new = ({k: v for k, v in record.items() if k in fields} for record in (before, now))
    old, new = flatten(old), flatten(new)
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if key == "cores" or old.get(key) == new.get(key):
            continue
        if key.startswith("torch") and (old.get(key) is None or new.get(key) is None):
            continue  # unknown: one process had not imported torch yet
        in_both = key in old and key in new
        if key in (f"variables.{BACKEND_VARIABLE}", f"variables.{HASH_SEED}") and not in_both:
            continue  # one process had not imported Keras, or is the user's: workers get a seed
        if key == "cpu.features" and in_both:
            was, has = set(str(old[key]).split()), set(str(new[key]).split())
            parts = (("without", sorted(was - has)), ("with", sorted(has - was)))
            said = "; ".join(f"{word} {' '.join(names)}" for word, names in parts if names)
            lines.append(f"cpu.features differ: now {said}")
        else:
            lines.append(f"{key} was {old.get(key, 'absent')}, is {new.get(key, 'absent')}")
    return lines


def is_importable(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False

"""What a run depends on besides its code and data: versions, CPU, threads, flags.

The same configuration gives the same bits only on the same kind of machine, with
the same library versions, instruction set and thread count. :func:`describe`
writes these down for the run's record, :func:`differences` compares two records
and ``python -m cerebro doctor`` prints them. torch is looked at only where it is
imported already, so none of this costs an import.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata, util
from pathlib import Path
from typing import Any

# Packages whose version can change the bits of a run, or what can be read.
PACKAGES = ("numpy", "torch", "jax", "scikit-learn", "pandas", "pyarrow", "pillow", "cloudpickle")

# Variables by which libraries choose other kernels, and so other bits.
VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
)

# Vector instruction sets, best first, as the kernel names them.
INSTRUCTION_SETS = {
    "amx_tile": "AMX",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "avx": "AVX",
    "sse4_2": "SSE4.2",
    "sve": "SVE",
    "asimd": "NEON",
}

NETWORK_FILE_SYSTEMS = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse.glusterfs",
        "fuse.s3fs",
        "fuse.sshfs",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "smb2",
        "smb3",
        "smbfs",
        "vboxsf",
        "virtiofs",
    ]
)


def version() -> str:
    """Return Cerebro's version."""
    try:
        return metadata.version("cerebro")
    except metadata.PackageNotFoundError:  # on the path without being installed
        return "unknown"


def package_version(name: str) -> str | None:
    """Return the version of an installed package, or None. Imports nothing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def usable_cores() -> int:
    """Count the cores this process may use: its affinity, and its container's quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cores = os.cpu_count() or 1
    quota = _cgroup_cores()
    return max(1, min(cores, math.ceil(quota)) if quota is not None else cores)


def _cgroup_cores() -> float | None:
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


@functools.cache
def cpu() -> dict[str, str]:
    """Return the CPU's ``model`` and its best vector ``instruction_set``."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip().lower(), value.strip())
    except OSError:
        pass
    model = fields.get("model name") or platform.processor() or platform.machine()
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    names = [name for flag, name in INSTRUCTION_SETS.items() if flag in flags]
    return {"model": model, "instruction_set": names[0] if names else platform.machine()}


def torch_flags() -> dict[str, Any]:
    """Read torch's process-wide settings that change results; empty if torch is not imported.

    Returns
    -------
    dict
        JSON-able; :func:`set_torch_flags` applies it in another process.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "flush_denormal": _flushes_denormals(torch),
    }


def _flushes_denormals(torch: Any) -> bool:
    """Tell whether torch treats denormal numbers as zero; it has no getter of its own."""
    smallest = torch.tensor(1e-310, dtype=torch.float64)
    return bool((smallest * 1.0).item() == 0.0)


def set_torch_flags(flags: Mapping[str, Any]) -> None:
    """Apply what :func:`torch_flags` read, in this process. Imports torch if there is anything."""
    if not flags:
        return
    import torch

    torch.set_default_dtype(getattr(torch, flags["default_dtype"]))
    torch.set_float32_matmul_precision(flags["matmul_precision"])
    torch.backends.cudnn.allow_tf32 = flags["cudnn_allow_tf32"]
    torch.backends.cudnn.benchmark = flags["cudnn_benchmark"]
    torch.backends.cudnn.deterministic = flags["cudnn_deterministic"]
    torch.use_deterministic_algorithms(
        flags["deterministic_algorithms"], warn_only=flags["deterministic_warn_only"]
    )
    torch.set_flush_denormal(flags["flush_denormal"])


@contextmanager
def flags_of_run(flags: Mapping[str, Any]) -> Iterator[None]:
    """Run with the process-wide settings that a run was trained with, then put the caller's back.

    Does nothing while PyTorch is not imported: `cerebro.worker.build_model` sees to
    the first import.
    """
    before = torch_flags()
    if not before or not flags or before == flags:
        yield
        return
    set_torch_flags(flags)
    try:
        yield
    finally:
        set_torch_flags(before)


def _torch_capability() -> str | None:
    torch = sys.modules.get("torch")
    return None if torch is None else str(torch.backends.cpu.get_cpu_capability())


def describe(threads: int | None = None) -> dict[str, Any]:
    """Describe this process for a run's record.

    Parameters
    ----------
    threads
        Compute threads per worker of the run.

    Returns
    -------
    dict
        JSON-able: ``cerebro python packages system cpu cores threads torch
        torch_capability variables``.
    """
    versions = {name: package_version(name) for name in PACKAGES}
    return {
        "cerebro": version(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": {name: v for name, v in versions.items() if v is not None},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": dict(cpu()),
        "cores": usable_cores(),
        "threads": threads,
        "torch": torch_flags(),
        "torch_capability": _torch_capability(),
        "variables": {k: os.environ[k] for k in VARIABLES if k in os.environ},
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Name what differs between two records and could change a run's bits.

    Returns
    -------
    list of str
        One line each, such as ``"packages.torch was 2.12.0, is 2.13.0"``; the number of
        cores is left out, for it changes nothing.
    """
    old, new = _flat(before), _flat(now)
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if key in ("cores", "cerebro") or old.get(key) == new.get(key):
            continue
        if key.startswith("torch") and (old.get(key) is None or new.get(key) is None):
            continue  # torch was not imported yet on one side: nothing is known
        lines.append(f"{key} was {old.get(key, 'absent')}, is {new.get(key, 'absent')}")
    return lines


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def file_system(path: str | os.PathLike[str]) -> str:
    """Return the type of the file system that holds `path` (which need not exist yet).

    ``"unknown"`` where the system does not tell.
    """
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    best, kind = "", "unknown"
    for line in mounts:
        left, _, right = line.partition(" - ")
        mount = left.split()[4].encode().decode("unicode_escape")  # blanks are \040
        inside = place == Path(mount) or Path(mount) in place.resolve().parents
        if inside and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind


def is_network_file_system(path: str | os.PathLike[str]) -> bool:
    """Tell whether `path` is on a network file system, where locks and mmap are less sure."""
    return file_system(path) in NETWORK_FILE_SYSTEMS


def installed(module: str) -> bool:
    """Tell whether a module could be imported, without importing it."""
    try:
        return util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False

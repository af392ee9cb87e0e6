"""Shared by all tests: processes that they start import the same cerebro."""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

import cerebro
from cerebro.machine.devices import has_driver
from cerebro.machine.resources import available_memory

_PARENT = str(Path(cerebro.__file__).parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [_PARENT, *filter(None, [os.environ.get("PYTHONPATH", "")])]
)
# Do not read the user's stored verdicts on GPUs, and leave no new ones.
_VERDICTS = tempfile.TemporaryDirectory(prefix="cerebro-tests-")
os.environ["CEREBRO_CACHE"] = _VERDICTS.name
# `ray.init()` joins the cluster that was noted last in this folder, which could be that of a test
# that runs beside this one. Sockets are in it, so its path must be short.
_RAY = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
os.environ["RAY_TMPDIR"] = _RAY.name
# Each commit of a run waits for the disk, which is a third of the time of tests of resumed runs. In
# memory, calls of fsync return at once; `unit/run/test_store_durability.py` checks their order.
_MEMORY = Path("/dev/shm")
if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 4 << 30 and available_memory() > 8 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))
# A shell's background jobs ignore Ctrl-C, and the processes started here would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same cases in every run: a failure of one run is one of every run.
hypothesis.settings.register_profile("same cases", derandomize=True)
hypothesis.settings.load_profile("same cases")

SLOW = {
    line
    for line in Path(__file__).with_name("slow.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
}
"""The tests that take most of the time; see `pytest_collection_modifyitems`."""

SLOW_FOLDERS = {"cluster", "docs", "integration", "sim", "standin", "tune"}
"""Their tests start clusters, programs or other libraries: they have the mark ``slow``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow", metavar="K/N", help="run part K of N of the tests in tests/slow.txt, no others"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow tests; leave the slowest to runs with ``--slow``, and to those that name files.

    CI runs another part of the slowest each day.
    """
    for item in items:
        folder = Path(item.path).relative_to(Path(__file__).parent).parts[0]
        if folder in SLOW_FOLDERS or _is_slow(item):
            item.add_marker("slow")
    chosen = config.getoption("--slow")
    if chosen is None and any(".py" in argument for argument in config.args):
        return
    kept, left = [], []
    for item in items:
        is_chosen = not _is_slow(item) if chosen is None else _is_in_part(item, chosen)
        (kept if is_chosen else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def _is_in_part(item: pytest.Item, chosen: str) -> bool:
    part, parts = map(int, chosen.split("/"))
    return _is_slow(item) and zlib.crc32(item.nodeid.encode()) % parts == part % parts


def _is_slow(item: pytest.Item) -> bool:
    """Return whether the test, its function or its file is in `SLOW`."""
    path = Path(item.path).relative_to(Path(__file__).parent.parent).as_posix()
    test = f"{path}::{item.nodeid.partition('::')[2]}"
    return not SLOW.isdisjoint((test, test.partition("[")[0], path))


def pytest_configure(config: pytest.Config) -> None:
    """On several cores, run the files in their usual order; hide GPUs from tests of CPUs.

    The slowest files have few tests; otherwise they would run last, with the other cores idle.
    """
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    if has_driver() and not _is_about_gpus(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _is_about_gpus(config: pytest.Config) -> bool:
    """Return whether a GPU may be used: only tests with the mark "gpu" are run.

    The other tests expect what CPUs compute. A process finds its GPUs once, so the two cannot mix.
    """
    paths = [Path(argument.partition("::")[0]) for argument in config.args]
    return config.option.markexpr.strip() == "gpu" or all("gpu" in path.parts for path in paths)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Limit the time of teardowns too: after a failure, pytest lifts the test's limits."""
    limit = float(item.config.getini("faulthandler_timeout") or 0)
    if limit > 0:
        unchanged = item.config.stash[fault_handler_stderr_fd_key]  # not captured
        faulthandler.dump_traceback_later(limit, file=unchanged, exit=True)
    return (yield)


@pytest.fixture(scope="module", autouse=True)
def _same_signals() -> Iterator[None]:
    """Give every test file the signal handlers of a new process.

    Ray installs one for SIGTERM and does not remove it.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module", autouse=True)
def _short_collections() -> None:
    """Leave what other files have imported out of later collections of garbage.

    A search with ``workers=0`` collects it for each model. With all libraries of the tests in one
    process, a collection takes a third of a second.
    """
    gc.collect()
    gc.freeze()


def _settings_of_torch() -> dict[str, object]:
    """What a test could leave changed for all later tests of its process."""
    import torch

    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "a small number": torch.tensor(0.5).mul(1.0).item(),
    }


@pytest.fixture(autouse=True)
def _same_torch() -> Iterator[None]:
    """Fail the test that leaves PyTorch's settings changed, not the ones that run after it."""
    # Without PyTorch, `torch` may be the folder of its tests.
    there = hasattr(sys.modules.get("torch"), "get_default_dtype")
    before = _settings_of_torch() if there else None
    yield
    if before is not None:
        after = _settings_of_torch()
        changed = [name for name in before if before[name] != after[name]]
        assert not changed, f"PyTorch is left changed: {changed}: {before} -> {after}"


def _shared_library(library: Path, *arguments: str | Path) -> Path:
    """Compile a library for a process that a test starts; warnings are errors."""
    command = ["cc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", library, *arguments]
    subprocess.run(list(map(str, command)), check=True)
    return library


STANDIN_FLAGS = (
    *("-std=c11", "-D_GNU_SOURCE", "-fvisibility=hidden", "-ffp-contract=off"),
    "-fno-strict-aliasing",
)


@pytest.fixture(scope="session")
def disk_shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library for LD_PRELOAD that records disk writes; see its source."""
    return _shim(tmp_path_factory, "disk")


@pytest.fixture(scope="session")
def locks_shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library for LD_PRELOAD that changes what locks do; see its source."""
    return _shim(tmp_path_factory, "locks")


def _shim(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    if sys.platform != "linux" or shutil.which("cc") is None:
        pytest.skip("needs Linux and a C compiler to intercept disk calls")
    source = Path(__file__).parent / "shims" / f"{name}.c"
    return _shared_library(tmp_path_factory.mktemp("shim") / f"{name}.so", "-O1", source, "-ldl")


@pytest.fixture(scope="session")
def cudart_standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CUDA runtime in host memory, for CEREBRO_CUDART; see tests/standin/standin.h."""
    root = Path(__file__).parent.parent
    core = sorted((root / "csrc" / "core").glob("*.c"))
    if not core or shutil.which("cc") is None:
        pytest.skip("needs the C sources and a C compiler to build a CUDA runtime")
    library = tmp_path_factory.mktemp("standin") / "libcudart_standin.so"
    folders = [f"-I{root / 'csrc' / folder}" for folder in ("core", "third_party")]
    source = Path(__file__).parent / "standin" / "cudart.c"
    libraries = ["-lpthread", "-lm"] + (["-ldl"] if sys.platform == "linux" else [])
    return _shared_library(library, "-O1", *STANDIN_FLAGS, *folders, source, *core, *libraries)


@pytest.fixture(scope="session")
def cudnn_standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cuDNN in host memory, for CEREBRO_CUDNN; see tests/standin/standin_cudnn.h."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler to build a cuDNN")
    library = tmp_path_factory.mktemp("standin") / "libcudnn_standin.so"
    return _shared_library(
        library, "-O2", *STANDIN_FLAGS, Path(__file__).parent / "standin" / "cudnn.c"
    )

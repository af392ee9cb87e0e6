"""A checkout whose core is not compiled says so, with the command that compiles it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cerebro
from cerebro.executors.fork_server import PROGRAM


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Everything but the core."""
    ignored = shutil.ignore_patterns("_core*.so", "_core*.pyd", "__pycache__")
    shutil.copytree(Path(cerebro.__file__).parent, tmp_path / "cerebro", ignore=ignored)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "setup.py").touch()
    return tmp_path


def lines(checkout: Path, *arguments: str, status: int = 1) -> list[str]:
    """What a Python that finds the checkout's package says on standard error."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    return done.stderr.splitlines()


def expected(checkout: Path, found: str = "") -> str:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return (
        f"{checkout / 'cerebro'} has no compiled core for this Python {version}{found}: build it "
        f"with `{sys.executable} -m pip install -e {checkout}`"
    )


def test_an_import_error_says_how_to_build_the_core(checkout: Path) -> None:
    said = lines(checkout, "-c", "import cerebro")
    assert said[-1] == f"ImportError: {expected(checkout)}"
    assert not any("_core'" in line for line in said)


@pytest.mark.parametrize("arguments", [["-m", "cerebro", "show"], ["bin/cerebro", "show"]])
def test_a_command_reports_the_missing_core_in_one_line(
    checkout: Path, arguments: list[str]
) -> None:
    (checkout / "bin").mkdir()
    (checkout / "bin" / "cerebro").write_text("from cerebro.cli import main\nmain()\n")
    assert lines(checkout, *arguments) == [f"error: {expected(checkout)}"]


def test_a_program_that_catches_the_import_error_continues(checkout: Path) -> None:
    (checkout / "other.py").write_text("try:\n    import cerebro\nexcept ImportError:\n    pass\n")
    assert lines(checkout, "-m", "other", status=0) == []


def test_a_worker_reports_the_missing_core_in_one_line(checkout: Path) -> None:
    said = lines(checkout, "-c", PROGRAM, "0", "0")
    assert said == [f"cerebro: a worker process cannot start: {expected(checkout)}"]


def test_the_error_names_a_core_for_another_python(checkout: Path) -> None:
    (checkout / "cerebro" / "_core.cpython-27-any.so").touch()
    said = lines(checkout, "-c", "import cerebro")
    assert said[-1] == f"ImportError: {expected(checkout, ' (there is _core.cpython-27-any.so)')}"


def test_an_installation_without_a_core_suggests_reinstalling(checkout: Path) -> None:
    (checkout / "setup.py").unlink()
    (said,) = lines(checkout, "-m", "cerebro")
    assert said.endswith(f": install Cerebro again with {sys.executable} -m pip")


def test_a_core_that_does_not_load_keeps_its_own_message(checkout: Path) -> None:
    name = Path(str(cerebro._core.__file__)).name
    (checkout / "cerebro" / name).write_bytes(b"no library")
    assert "has no compiled core" not in lines(checkout, "-c", "import cerebro")[-1]

"""What `dir(cerebro)` and ``from cerebro import *`` show."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys

import pytest

import cerebro

MODULES = {
    "callbacks", "cluster", "control", "dask", "data", "errors", "jax", "keras", "native",
    "optuna", "ray", "searchers", "sklearn", "space", "spark", "testing", "torch", "transforms",
}  # fmt: skip
HEAVY = ("torch", "jax", "keras", "ray", "optuna", "sklearn", "distributed", "pyspark")


def in_new_process(program: str) -> object:
    out = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return json.loads(out.stdout)


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    import cerebro.coordinator.search_loop

    assert set(dir(cerebro)) == {*cerebro.__all__, *MODULES, "open", "last", "__version__"}


@pytest.mark.parametrize("name", sorted(set(cerebro.__all__) | (MODULES - {"jax", "keras"})))
def test_every_public_name_is_there(name: str) -> None:
    if name in MODULES:
        assert getattr(cerebro, name) is importlib.import_module(f"cerebro.{name}")
    assert getattr(cerebro, name) is not None


def test_star_import_keeps_open_and_imports_no_framework() -> None:
    program = (
        "import json, sys; before = open; from cerebro import *; import cerebro\n"
        f"heavy = [name for name in {HEAVY} if name in sys.modules]\n"
        "print(json.dumps([open is before, heavy, callable(search), cerebro.open is before]))"
    )
    assert in_new_process(program) == [True, [], True, False]


def test_star_import_works_where_jax_cannot_be_imported() -> None:
    program = (
        "import json, sys; sys.modules['jax'] = None\n"
        "from cerebro import *; print(json.dumps(callable(shard)))"
    )
    assert in_new_process(program) is True


LOCATED = """
import json, os, sys
arguments, sys.argv[:] = list(sys.argv), ["-m"]
sys.orig_argv[:] = [sys.executable, "-m", "cerebro", "demo"]
import cerebro
sys.argv[:] = arguments
"""
"""Imports the package as Python does to find the program of ``python -m cerebro``."""


def described(name: str) -> list[str]:
    value = getattr(cerebro, name)
    given = ("__module__", "__qualname__", "__name__")
    return [type(value).__name__, *(str(getattr(value, each, "")) for each in given)]


def test_names_imported_on_first_use_are_the_same() -> None:
    """Each name is the first that its process uses, so no module needs another one before it."""
    expected = {name: described(name) for name in [*cerebro.__all__, "open"]}
    program = (
        LOCATED
        + inspect.getsource(described)
        + f"expected = json.loads({json.dumps(expected)!r})\n"
        + """
at_once = sorted(expected.keys() & vars(cerebro).keys())
wrong = []
for name in expected:
    child = os.fork()
    if child == 0:
        try:
            same = described(name) == expected[name]
        except BaseException:
            same = False
        os._exit(0 if same else 1)
    if os.waitpid(child, 0)[1] != 0:
        wrong.append(name)
print(json.dumps([at_once, wrong]))
"""
    )
    assert in_new_process(program) == [["trial_seed", "visit_order"], []]


def test_a_command_imports_only_what_it_needs() -> None:
    out = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "cerebro", "--version"],
        check=True,
        capture_output=True,
        text=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in out.stderr.splitlines()}
    assert "cerebro.cli.demo" in imported
    assert not imported & {"cerebro.api.search", "cerebro.data", "cerebro.searchers"}


def test_importing_cerebro_in_a_program_loads_all_public_names() -> None:
    program = "import json, cerebro; print(json.dumps([*vars(cerebro)]))"
    assert set(cerebro.__all__) | {"open"} <= set(in_new_process(program)) | {
        "GaussianProcess", "Plan", "Replay", "Run", "TPE", "plan", "refit", "replay",
    }  # fmt: skip


def test_the_demo_starts_its_workers_before_it_imports_the_rest() -> None:
    program = (
        LOCATED
        + """
import argparse
from cerebro.cli import demo
class Started(BaseException):
    pass
def start_early(*given):
    raise Started(*given)
demo.choose_devices = lambda devices: ("cpu",)
demo.environment.is_importable = lambda name: True
demo.warm_workers.start_early = start_early
try:
    demo.demonstrate(argparse.Namespace(devices="cpu", workers=2), 1)
except Started as started:
    rest = {"cerebro.api.search", "cerebro.data", "cerebro.searchers", "cerebro.report.summary"}
    print(json.dumps([started.args, sorted(rest & sys.modules.keys())]))
"""
    )
    assert in_new_process(program) == [[1, [None, None], ["torch"]], []]

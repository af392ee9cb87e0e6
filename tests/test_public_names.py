"""What `dir(cerebro)` and ``from cerebro import *`` show."""

from __future__ import annotations

import importlib
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

    assert set(dir(cerebro)) == {*cerebro.__all__, *MODULES, "open", "__version__"}


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

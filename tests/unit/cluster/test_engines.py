"""Engines start agents: they know little of a cluster, and a cluster nothing of them."""

from __future__ import annotations

import ast
from pathlib import Path

import cerebro.cluster

CLUSTER = Path(cerebro.cluster.__file__).parent
ENGINES = CLUSTER / "engines"
CONTRACT = {"connected_executor", "engine", "keys"}
FOR_RAY = {"agent", "executor", "hub", "supervisor"}
"""Ray chooses nodes, and its actors are agents."""


def imports(file):
    """Return the modules of the cluster that a file imports, relative to it."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    modules = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    mark = "cerebro.cluster."
    return {module.removeprefix(mark) for module in modules if module.startswith(mark)}


def test_engines_use_the_contract_and_no_other_engine():
    for file in ENGINES.rglob("*.py"):
        engine = file.relative_to(ENGINES).with_suffix("").parts[0]
        used = imports(file)
        own = {module for module in used if module.startswith(f"engines.{engine}")}
        assert used - own <= CONTRACT | (FOR_RAY if engine == "ray" else set()), file


def test_a_cluster_uses_no_engine():
    for file in CLUSTER.glob("*.py"):
        assert not any(module.startswith("engines") for module in imports(file)), file

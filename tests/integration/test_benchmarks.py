"""The benchmarks' commands are those that the documentation gives, and start."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"

pytest.importorskip("torch")
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not beside the tests here", allow_module_level=True)

# Reads commands as JSON; of each it runs the program until its arguments are read.
READ = """
import argparse, json, runpy, sys

class Read(BaseException):
    pass

def read(parser, arguments=None, namespace=None):
    raise Read(sorted(vars(real(parser, arguments, namespace))))

real, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, read
found = []
for module, *arguments in json.loads(sys.argv[1]):
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    except Read as read:
        found.append(read.args[0])
    except SystemExit as error:
        found.append(f"exit status {error.code}")
    except BaseException as error:
        found.append(f"{type(error).__name__}: {error}")
print(json.dumps(found))
"""


def options_of(commands: list[list[str]]) -> list[list[str] | str]:
    """The options that each command has; a text where it did not get as far as to read them."""
    out = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(commands)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    found: list[list[str] | str] = json.loads(out.stdout.splitlines()[-1])
    return found


def documented() -> list[list[str]]:
    """Every command that begins with ``python -m benchmarks.``, and those of the page's tables."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    files += [ROOT / ".ci" / "run", *sorted((ROOT / "benchmarks").rglob("*.md"))]
    commands = []
    for file in files:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        for found in re.findall(r"python'? -m (benchmarks\.\w+[^`#\n\"]*)", text):
            if not found.startswith("benchmarks.gpu_..."):  # the head of a table
                commands.append(found.split())
    prefix = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        head = re.match(r"\| (?:Command|Part) \(?`python -m (benchmarks\.\w*?)(?:\.\.\.)?`", line)
        row = re.match(r"\| `(\w+)`", line)
        if head:
            prefix = head[1]
        elif row and prefix:
            commands.append([prefix + row[1]])
        elif not line.startswith("|"):
            prefix = ""
    return [list(command) for command in dict.fromkeys(map(tuple, commands))]


def benchmarks() -> list[str]:
    files = (ROOT / "benchmarks").glob("*.py")
    return sorted(f"benchmarks.{f.stem}" for f in files if re.match(r"bench_|gpu", f.stem))


def test_every_documented_command_starts() -> None:
    """And every benchmark is documented, and has the options that the page names."""
    commands = documented()
    assert len(commands) > 20
    assert ["benchmarks.gpu_search", "--ways", "ordinary", "graphs"] in commands
    assert {command[0] for command in commands} >= set(benchmarks())
    for command, options in zip(commands, options_of(commands), strict=True):
        assert isinstance(options, list), f"{' '.join(command)}: {options}"
        if command[0] in benchmarks():
            assert {"quick", "json"} <= set(options), f"{command[0]} lacks an option"


def test_the_command_check_finds_invalid_commands() -> None:
    """The test of the test."""
    read = options_of([["benchmarks.bench_schedule", "--slow"], ["benchmarks.bench_nothing"]])
    assert read[0] == "exit status 2"
    assert str(read[1]).startswith("ImportError: No module named benchmarks.bench_nothing")


def test_a_quick_benchmark_prints_its_figures(tmp_path: Path) -> None:
    """One of them; `.ci/run` runs them all."""
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.bench_schedule", "--quick"]
    out = subprocess.run(
        [*command, "--json", str(file)], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    figures = json.loads(file.read_text(encoding="utf-8"))["results"]
    lines = out.stdout.splitlines()
    assert len(figures) > 5
    assert [line for line in lines if any(f"  {f['name']} " in line for f in figures)] == lines[2:]


def test_lanes_run_in_miniature_without_a_gpu() -> None:
    """A part of it; `.ci/run` runs the others."""
    command = [sys.executable, "-m", "benchmarks.gpu_lanes", "--tiny", "--only", "mlp"]
    out = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    lines = [line.strip() for line in out.stdout.splitlines()]
    assert "mlp: states with 1, 2 lanes: equal" in lines
    assert "mlp: the plain loop and graph=True: equal weights" in lines
    assert "holds          the same states with any number of lanes" in lines


def test_bars_are_judged_by_figures_and_not_without_them() -> None:
    code = (
        "from benchmarks.gpu_lanes import judge\n"
        "figures = {'mlp: eager loop, fused Adam': 29.4, 'cnn: a graph each, one stream': 14.7,\n"
        "    'cnn: a graph each, 16 streams, one thread': 8.0, 'mlp: equal states': 1.0,\n"
        "    'cnn: equal states': 0.0, 'mlp: Cerebro, 16 lane(s)': 0.36,\n"
        "    'cnn: Cerebro, 16 lane(s)': 9.3}\n"
        "print([holds for _, holds in judge(figures)])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert out.stdout.strip() == "[True, False, None, None, None, None, False]"


def test_a_figure_is_printed_when_it_is_known(tmp_path: Path) -> None:
    """A benchmark that fails later, or is interrupted, has told what it knew."""
    code = (
        "from benchmarks.harness import Bench\n"
        "bench = Bench('title'); bench.add('first', 1.5, 's'); bench.note('why')\n"
        "import os; os._exit(3)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True
    )
    title, *lines = out.stdout.strip().splitlines()
    assert (out.returncode, title[:7]) == (3, "title  ")
    assert [line.split() for line in lines] == [["first", "1.5", "s"], ["why"]]

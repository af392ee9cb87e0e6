"""``verify``: compare files with their checksums."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cerebro.cli.options import new_command
from cerebro.errors import InputError, one_line

MESSAGE_LIMIT = 2000


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = new_command(
        commands, "verify", main, "compare a data set's or a run's files with their checksums"
    )
    parser.add_argument("path", help="a data folder or a run's folder")


def main(options: argparse.Namespace) -> int:
    """Compare files with their checksums, and a run's store with itself."""
    path = Path(options.path)
    if (path / "run.sqlite").exists():
        return _run(path)
    if (path / "manifest.json").exists() or (path / "shard-00000").exists():
        return _data(path)
    if not path.exists():
        raise InputError(f"{path}: there is no such folder")
    raise InputError(f"{path}: neither a data folder (manifest.json) nor a run (run.sqlite)")


def _run(path: Path) -> int:
    from cerebro.results.verify import verify_run

    found = verify_run(path)
    if found:
        print(found)
    return _complain(path, found.problems)


def _data(path: Path) -> int:
    import cerebro
    from cerebro.data.damage import find_damage
    from cerebro.report import format as fmt

    damages = find_damage(path)
    if not damages:
        data = cerebro.Dataset(path)
        print(f"{path}: {data.num_shards} shards, {fmt.size(data.nbytes)}, as they were written")
    return _complain(path, damages)


def _complain(path: Path, problems: Sequence[Any]) -> int:
    """Print one line for each problem, and an error with their number."""
    lines = [one_line(str(problem), MESSAGE_LIMIT) for problem in problems]
    for line in lines:
        print(line)
    if lines:
        count = "a problem" if len(lines) == 1 else f"{len(lines)} problems, the first"
        print(f"error: {path} has {count}: {lines[0]}", file=sys.stderr)
    return 1 if lines else 0

"""``verify``: compare files with their checksums."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cerebro.commands.options import new_command
from cerebro.errors import InputError


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = new_command(
        commands, "verify", main, "compare a data set's or a run's files with their checksums"
    )
    parser.add_argument("path", help="a data folder or a run's folder")


def main(options: argparse.Namespace) -> int:
    """Compare files with their checksums."""
    import cerebro
    from cerebro.report import format as fmt

    path = Path(options.path)
    if (path / "run.sqlite").exists():
        checked = cerebro.open(path).verify()
        print(f"{path}: {len(checked)} states and data sets, as they were written")
    elif (path / "manifest.json").exists():
        data = cerebro.Dataset(path)
        data.verify()
        print(f"{path}: {data.num_shards} shards, {fmt.size(data.nbytes)}, as they were written")
    elif not path.exists():
        raise InputError(f"{path}: there is no such folder")
    else:
        raise InputError(f"{path}: neither a data folder (manifest.json) nor a run (run.sqlite)")
    return 0

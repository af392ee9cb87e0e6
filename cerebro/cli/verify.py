"""``verify``: compare files with their checksums."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cerebro.cli.options import complain, json_option, new_command, print_json
from cerebro.errors import CorruptDataError, InputError, one_line
from cerebro.machine.objects import is_url
from cerebro.report.progress import is_terminal

MESSAGE_LIMIT = 2000


def add(commands: Any) -> None:
    parser = new_command(
        commands, "verify", main, "compare a dataset's or a run's files with their checksums"
    )
    parser.add_argument("path", help="a data folder or a run's folder, or the URL of a dataset")
    json_option(parser)


def main(options: argparse.Namespace) -> int:
    if is_url(options.path):
        return _verify_data(options.path, options.json)
    path = Path(options.path)
    if (path / "run.sqlite").exists():
        return _verify_run(path, options.json)
    if (path / "manifest.json").exists() or (path / "shard-00000").exists():
        return _verify_data(path, options.json)
    if not path.exists():
        raise InputError(f"{path}: there is no such folder")
    raise InputError(f"{path}: neither a data folder (manifest.json) nor a run (run.sqlite)")


def _verify_run(path: Path, as_json: bool) -> int:
    from cerebro.results.verify import verify_run

    check = verify_run(path)
    if as_json:
        print_json({**vars(check), "problems": [vars(problem) for problem in check.problems]})
        return 1 if check.problems else 0
    if check:
        print(check)
    return _complain(path, check.problems)


def _verify_data(place: Path | str, as_json: bool) -> int:
    """Check a dataset; if it is in object storage, first copy what is missing here."""
    import cerebro
    from cerebro.data.shards import find_damage
    from cerebro.report import format as fmt

    data = None if isinstance(place, Path) else cerebro.Dataset(place)
    problems: list[str] = []
    if data is None:
        problems = [str(damage) for damage in find_damage(Path(place))]
    else:
        try:
            data.verify()
        except CorruptDataError as error:
            problems.append(str(error))
    if as_json:
        print_json({"path": place, "problems": problems})
        return 1 if problems else 0
    if not problems:
        data = cerebro.Dataset(place) if data is None else data
        print(f"{place}: {data.num_shards} shards, {fmt.size(data.nbytes)}: all checksums match")
    return _complain(place, problems)


def _complain(path: Path | str, problems: Sequence[Any]) -> int:
    """Print one line for each problem, and an error with the number of problems."""
    lines = [one_line(str(problem), MESSAGE_LIMIT) for problem in problems]
    if len(lines) != 1 or not (is_terminal(sys.stdout) and is_terminal(sys.stderr)):
        print("\n".join(lines), end="\n" * bool(lines))  # one problem would be there twice
    if lines:
        count = "a problem" if len(lines) == 1 else f"{len(lines)} problems, the first"
        complain(f"error: {path} has {count}: {lines[0]}")
    return 1 if lines else 0

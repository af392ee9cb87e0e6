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
from cerebro.report.output import is_terminal

MESSAGE_LIMIT = 2000


def add(commands: Any) -> None:
    parser = new_command(
        commands, "verify", main, "compare a dataset's or a run's files with their checksums"
    )
    parser.add_argument("path", help="a data folder or a run's folder, or the URL of a dataset")
    json_option(parser)


def main(options: argparse.Namespace) -> int:
    if is_url(options.path):
        return _verify_bucket(options.path, options.json)
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
        print_json(
            {
                "path": path,
                "problems": [vars(problem) for problem in check.problems],
                "trials": check.trials,
                "epochs": check.epochs,
                "states": check.states,
                "slots": check.slots,
                "data": check.data,
            }
        )
        return 1 if check.problems else 0
    if check:
        print(check)
    return _complain(path, check.problems)


def _verify_data(path: Path, as_json: bool) -> int:
    import cerebro
    from cerebro.data.shards import find_damage
    from cerebro.report import format as fmt

    damages = find_damage(path)
    if as_json:
        print_json({"path": path, "problems": [str(damage) for damage in damages]})
        return 1 if damages else 0
    if not damages:
        data = cerebro.Dataset(path)
        print(f"{path}: {data.num_shards} shards, {fmt.size(data.nbytes)}: all checksums match")
    return _complain(path, damages)


def _verify_bucket(url: str, as_json: bool) -> int:
    """Copy what is missing here of a dataset in object storage, and check the dataset."""
    import cerebro
    from cerebro.report import format as fmt

    problems: list[str] = []
    data = cerebro.Dataset(url)
    try:
        data.verify()
    except CorruptDataError as error:
        problems.append(str(error))
    if as_json:
        print_json({"path": url, "problems": problems})
        return 1 if problems else 0
    if not problems:
        print(f"{url}: {data.num_shards} shards, {fmt.size(data.nbytes)}: all checksums match")
    return _complain(url, problems)


def _complain(path: Path | str, problems: Sequence[Any]) -> int:
    """Print one line for each problem, and an error with the number of problems."""
    lines = [one_line(str(problem), MESSAGE_LIMIT) for problem in problems]
    if len(lines) != 1 or not (is_terminal(sys.stdout) and is_terminal(sys.stderr)):
        print("\n".join(lines), end="\n" * bool(lines))  # one problem would be there twice
    if lines:
        count = "a problem" if len(lines) == 1 else f"{len(lines)} problems, the first"
        complain(f"error: {path} has {count}: {lines[0]}")
    return 1 if lines else 0

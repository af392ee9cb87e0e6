"""``shard``: write a dataset as shards."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cerebro
from cerebro.cli.options import new_command, parse_count
from cerebro.errors import InputError

PROGRESS: dict[str, str | bool] = {"auto": "auto", "bar": True, "none": False}


def add(commands: Any) -> None:
    parser = new_command(commands, "shard", main, "write a dataset as shards")
    parser.add_argument(
        "source",
        help="a .npz, .csv, .parquet or .arrow file, or a folder of .parquet files or of images: "
        "one subfolder for each class",
    )
    parser.add_argument("path", help="the folder or the URL to write")
    parser.add_argument(
        "--shards", type=parse_count, help="number of shards (8, or more for large data)"
    )
    parser.add_argument(
        "--columns",
        nargs="+",
        metavar="NAME[=SOURCE,...]",
        help="columns to keep; x=age,fare stacks two into one, y=label renames",
    )
    parser.add_argument(
        "--dtypes", nargs="+", metavar="NAME=DTYPE", help="types to store, such as x=float32"
    )
    parser.add_argument("--no-shuffle", action="store_true", help="keep the order of the rows")
    parser.add_argument("--seed", type=int, default=0, help="seed of the shuffle (0)")
    parser.add_argument("--size", metavar="WxH", help="size to which the images are resized")
    parser.add_argument(
        "--mode", default="RGB", help="color mode of the images: RGB, L or RGBA (RGB)"
    )
    parser.add_argument(
        "--exist-ok",
        action="store_true",
        help="succeed if the folder was made with the same arguments",
    )
    parser.add_argument(
        "--progress",
        choices=PROGRESS,
        default="auto",
        help="a bar or nothing; auto: a bar in a terminal, for large data",
    )


def main(options: argparse.Namespace) -> int:
    source: Any = options.source
    if Path(source).is_dir() and not _is_table(Path(source)):
        size = None if options.size is None else _image_size(options.size)
        source = cerebro.images(source, size=size, mode=options.mode)
    data = cerebro.shard(
        source,
        options.path,
        shards=options.shards,
        columns=_parse_columns(options.columns),
        dtypes=_parse_dtypes(options.dtypes),
        shuffle=not options.no_shuffle,
        seed=options.seed,
        exist_ok=options.exist_ok,
        progress=PROGRESS[options.progress],
    )
    print(data)
    return 0


def _is_table(folder: Path) -> bool:
    """Return whether a folder has Parquet files, and not also class folders of images."""
    entries = [entry for entry in folder.iterdir() if entry.name[0] not in "._"]
    return any(entry.suffix.lower() == ".parquet" for entry in entries) and not any(
        entry.is_dir() for entry in entries
    )


def _image_size(text: str) -> tuple[int, int]:
    """Read ``WxH``, or one number for a square, as (height, width)."""
    try:
        width, _, height = text.lower().partition("x")
        return int(height or width), int(width)
    except ValueError:
        raise InputError(f"--size {text}: must look like 224x224 (width x height)") from None


def _parse_columns(items: Sequence[str] | None) -> dict[str, Any] | list[str] | None:
    """Read ``x=age,fare y=label`` as a mapping, and ``age fare`` as a list."""
    if items is None:
        return None
    if not any("=" in item for item in items):
        return list(items)
    columns: dict[str, Any] = {}
    for item in items:
        name, _, sources = item.partition("=")
        parts = sources.split(",") if sources else [name]
        columns[name] = parts if len(parts) > 1 else parts[0]
    return columns


def _parse_dtypes(items: Sequence[str] | None) -> dict[str, str] | None:
    for item in items or ():
        if "=" not in item:
            raise InputError(f"--dtypes {item}: must look like x=float32")
    return None if items is None else dict(item.split("=", 1) for item in items)

"""``demo``: search 16 small models on the digits."""

from __future__ import annotations

import argparse
from typing import Any

from cerebro.commands.options import count, new_command, progress, progress_option


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = new_command(commands, "demo", main, "search 16 small models on handwritten digits")
    parser.add_argument("--quick", action="store_true", help="a few seconds: two epochs")
    parser.add_argument("--epochs", type=count, help="epochs per trial (12)")
    parser.add_argument("--workers", type=count, help="worker processes (one per core)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the search (0)")
    parser.add_argument("--run", help="the run's folder (runs/demo-<time>)")
    parser.add_argument("--data", default="data/digits", help="the data's folder (data/digits)")
    progress_option(parser)


def main(options: argparse.Namespace) -> int:
    """Search 16 small models on the digits."""
    from cerebro import demo as demonstration

    return demonstration.main(
        epochs=options.epochs or (2 if options.quick else demonstration.EPOCHS),
        workers=options.workers,
        seed=options.seed,
        run=options.run,
        data=options.data,
        progress=progress(options.progress),
    )

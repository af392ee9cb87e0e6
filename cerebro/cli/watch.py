"""Watch runs in a browser: ``watch``."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path
from typing import Any

from cerebro.cli.options import new_command, say
from cerebro.errors import InputError


def add(commands: Any) -> None:
    parser = new_command(commands, "watch", watch, "watch and steer runs on a page in the browser")
    parser.description = (
        "Serve a page that shows a run while it trains and afterwards, on this machine only. Its "
        "address, which is printed, has a token: anyone who has it can steer the run."
    )
    parser.add_argument(
        "run", nargs="?", default="runs", help="a run's folder, or a folder of runs (runs)"
    )
    parser.add_argument("--port", type=int, default=0, metavar="N", help="(a free one)")
    parser.add_argument("--read-only", action="store_true", help="show; refuse to steer")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def watch(options: argparse.Namespace) -> int:
    from cerebro.watch.runs import WatchedRuns
    from cerebro.watch.server import Server

    if not 0 <= options.port < 65536:
        raise InputError(f"--port {options.port}: give a port from 1 to 65535, or 0 for a free one")
    runs = WatchedRuns(Path(options.run))
    try:
        server = Server(runs, port=options.port, read_only=options.read_only)
    except OSError as error:
        raise InputError(f"--port {options.port}: {error.strerror}; give another one") from error
    say(f"{options.run}: {server.url}\nCtrl-C ends the page, not the run.")
    with server:
        if options.open:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0

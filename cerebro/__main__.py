"""Run the command line for ``python -m cerebro``; see :mod:`cerebro.cli`."""

import os
import sys


def put_working_directory_last(path: list[str]) -> None:
    """Keep files in the working directory, such as ``torch.py``, from replacing libraries."""
    if path and path[0] in ("", os.getcwd()):  # noqa: PTH109
        del path[0]
        path.append("")  # `build` may be in a module there


if __name__ == "__main__":
    put_working_directory_last(sys.path)
    from cerebro.cli import main

    raise SystemExit(main())

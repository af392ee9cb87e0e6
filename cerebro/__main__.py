"""``python -m cerebro``: the command line, see :mod:`cerebro.cli`."""

import os
import sys


def put_working_directory_last(path: list[str]) -> None:
    """Keep files in the working directory, such as ``torch.py``, from replacing libraries.

    ``python -m`` puts the directory first. ``build`` may be in a module there, so it stays, last;
    the file that ``run`` is given has its folder put first, as a script has.
    """
    if path and path[0] in ("", os.getcwd()):  # noqa: PTH109
        del path[0]
        path.append("")


if __name__ == "__main__":
    put_working_directory_last(sys.path)
    from cerebro.cli import main

    raise SystemExit(main())

"""``python -m cerebro``: the command line, see :mod:`cerebro.cli`."""

from cerebro.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

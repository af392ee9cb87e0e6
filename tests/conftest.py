"""For all tests: processes that they start import the same cerebro as they do."""

from __future__ import annotations

import os
from pathlib import Path

import cerebro

_PARENT = str(Path(cerebro.__file__).parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [_PARENT, *filter(None, [os.environ.get("PYTHONPATH", "")])]
)

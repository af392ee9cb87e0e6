"""Libraries that are imported, without those whose import another thread has not finished.

``sys.modules`` has a module from the beginning of its import. With ``workers=0`` or
``background=True`` the user's code may be importing a library while a unit runs; most of its names
are then missing.
"""

from __future__ import annotations

import sys
from typing import Any


def find_whole_module(name: str) -> Any:
    """Return a module of this name if its import is over, else None."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if getattr(spec, "_initializing", False) else module

"""Opens what another process of the same run has sent: the user's ``build`` and its like.

What is pickled by its name is imported, and the module that it is in may be a script.
"""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any

from cerebro.machine.guard import finding


class _Unpickler(pickle.Unpickler):
    """Knows what an import is for."""

    def find_class(self, module: str, name: str) -> Any:
        """Import what is named; the module's import may stop once it has that."""
        if module in sys.modules:
            return super().find_class(module, name)
        with finding(name.partition(".")[0], target=module):
            return super().find_class(module, name)


def opened(message: bytes) -> Any:
    """Return what is in a pickle from a process of the same run.

    Raises
    ------
    InputError
        If a module that it names calls something that trains before it has what is named.
    """
    with finding():
        return _Unpickler(io.BytesIO(message)).load()

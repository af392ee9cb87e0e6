"""Unpickle messages from other processes of the same run, such as the user's ``build``.

An object that is pickled by name is imported, and its module may be a script that trains.
"""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any

from cerebro.machine.guard import guard_import


class _Unpickler(pickle.Unpickler):
    """Unpickles a message; imports modules only to get the names that the pickle needs."""

    def find_class(self, module: str, name: str) -> Any:
        """Import a name; the import of its module may stop as soon as the name is defined."""
        if module in sys.modules:
            return super().find_class(module, name)
        with guard_import(name.partition(".")[0], target=module):
            return super().find_class(module, name)


def unpickle(message: bytes) -> Any:
    """Unpickle a message from a process of the same run.

    Raise InputError if a module that the message names starts a search before it defines the name.
    """
    with guard_import():
        return _Unpickler(io.BytesIO(message)).load()

"""A pickle that an agent passes on without opening it.

An agent supervises a worker process and never trains. Only the process imports the modules of the
user's ``build``: the pickle is opened when the process unpickles the message that contains it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cerebro.executors.wire import unpickle


class Sent:
    """A pickle of `cloudpickle`; unpickling this object returns its content."""

    def __init__(self, message: bytes) -> None:
        self.message = message

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return unpickle, (self.message,)

    def __call__(self, *args: Any) -> Any:
        raise TypeError("this is a placeholder for a function that only worker processes have")

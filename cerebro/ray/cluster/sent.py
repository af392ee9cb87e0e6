"""Something pickled that is handed on unopened.

An actor watches over a worker process and never trains. What the user's ``build``
needs is imported by the process alone: the actor hands the pickle on, and it opens
itself when the process unpickles the message that it is in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cerebro.executors.received import opened


class Sent:
    """A pickle; whoever unpickles this object gets what is in it.

    Parameters
    ----------
    message
        Bytes of `cloudpickle`.
    """

    def __init__(self, message: bytes) -> None:
        self.message = message

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return opened, (self.message,)

    def __call__(self, *args: Any) -> Any:
        raise TypeError("this stands for a function that only worker processes know")

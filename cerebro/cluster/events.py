"""The events of a run, and what other threads have to say to the coordinator's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from cerebro.machine.signals import WakePipe
from cerebro.worker.messages import News


class Mailbox:
    """A queue that can be waited for together with other descriptors."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pipe = WakePipe()
        self._reader = 0  # the thread that took messages last

    def fileno(self) -> int:
        """Return the descriptor that is readable while the queue is not empty."""
        return self._pipe.fileno()

    def put(self, message: Any) -> None:
        """Add a message. May be called from any thread, and after `close`."""
        self._queue.put(message)
        if threading.get_ident() != self._reader:  # which looks before it waits again
            self._pipe.wake()

    def take(self) -> list[Any]:
        self._reader = threading.get_ident()
        self._pipe.clear()
        return [self._queue.get() for _ in range(self._queue.qsize())]

    def close(self) -> None:
        self._pipe.close()


class Events:
    """The events that the coordinator is to get, and the work in other threads that they come from.

    `trouble` is an error that ends the run.
    """

    def __init__(self) -> None:
        self.mailbox = Mailbox()  # functions that the coordinator's thread calls
        self.fetch_pool = ThreadPoolExecutor(4, "cerebro-cluster")
        self.now: list[News] = []
        self.later: list[News] = []  # delivered when training has begun
        self.is_training = False
        self.trouble: BaseException | None = None

    def when_done(self, future: Future[Any], handle: Callable[..., None], *arguments: Any) -> None:
        """Have the coordinator's thread call ``handle(*arguments, future)`` once that is done."""
        future.add_done_callback(lambda done: self.mailbox.put(partial(handle, *arguments, done)))

    def handle_messages(self) -> None:
        while calls := self.mailbox.take():  # one may put another one
            for call in calls:
                call()

    def process(self) -> None:
        """Handle all messages; raise the trouble that they have brought, if any."""
        self.handle_messages()
        if self.is_training and self.later:
            self.now += self.later
            self.later = []
        if self.trouble is not None:
            trouble, self.trouble = self.trouble, None
            raise trouble

    def take(self) -> list[News]:
        events, self.now = self.now, []
        return events

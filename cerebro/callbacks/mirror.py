"""Copy a run to object storage while it trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cerebro.arguments import warn_user
from cerebro.callbacks.observer import Observer
from cerebro.errors import InputError, text_of
from cerebro.machine.files import path_of
from cerebro.machine.objects import Objects, is_url
from cerebro.run.mirror import Pointer, Uploader, read_pointer

RETRY_SECONDS = 30.0  # the time between two attempts after a failure
LAST_TRIES, PAUSE_SECONDS = 3, 1.0
"""The attempts after the run has ended, and the time between them."""
LAST_SECONDS = 20.0
"""The time for the last upload, after the run has ended; systems that stop pods kill after 30 s."""


class Mirror(Observer):
    """Copy the run to object storage whenever an epoch has been finished.

    ``cerebro.resume("s3://bucket/runs/x", build)`` then continues the run on any machine. At most
    the epochs in progress are lost. The copy is made by a thread: training does not wait for it. If
    the storage fails, a warning says so, once, and later uploads include what is missing.

    Parameters
    ----------
    url
        The place of the copy, such as ``"s3://bucket/runs/x"``: any URL of fsspec. Each run has its
        own.

    Raises
    ------
    InputError
        It is not a URL, or a package is missing. A search ends with this error when it starts if
        the place holds a different run.
    """

    def __init__(self, url: str) -> None:
        super().__init__(strict=True)  # hooks raise only what the user must decide
        if not is_url(url):
            raise InputError(f"Mirror needs a URL such as 's3://bucket/runs/x', not {url!r}")
        self._objects = Objects(url)
        self.url = self._objects.url
        self._resumed: Pointer | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Event()

    def __repr__(self) -> str:
        return f"Mirror({self.url!r})"

    def __reduce__(self) -> tuple[type[Mirror], tuple[str]]:
        return Mirror, (self.url,)

    def has_run(self) -> bool:
        """Whether there is a copy of a run, which `cerebro.resume` can continue.

        Raises
        ------
        CorruptDataError
            If what is there is damaged.
        OSError
            If the storage refuses or is not reached.
        """
        return read_pointer(self._objects) is not None

    def upload(self, run: Any) -> None:
        """Copy a run now.

        Parameters
        ----------
        run
            The run's folder, or its result.

        Raises
        ------
        InputError
            If the place holds a different run.
        OSError
            If the storage refuses or is not reached.
        """
        folder = path_of("run", getattr(run, "path", run)).absolute()
        Uploader(self._objects, folder).upload(whole=True)

    def continues(self, copy: Pointer) -> None:
        """Record that the next run was downloaded from this copy."""
        self._resumed = copy

    def on_run_start(self, run: Any) -> None:
        """Begin to copy the run; raise InputError if the place holds a different one."""
        self._uploader = Uploader(self._objects, Path(run.path).absolute(), self._resumed)
        self._resumed, self._trouble, self._has_warned = None, "", False
        self._is_ending = self._is_current = False
        self._changed.clear()
        try:
            self._uploader.upload(whole=True)
        except OSError as error:
            self._trouble = text_of(error)
        self._warn()
        self._thread = threading.Thread(target=self._follow, name="cerebro-mirror", daemon=True)
        self._thread.start()

    def on_commit(self) -> None:
        """Note that rows have become durable; called by the thread that writes the store."""
        self._changed.set()

    def on_epoch_end(self, trial: Any, metrics: Mapping[str, float]) -> None:
        self._warn()

    def on_run_closed(self) -> None:
        if self._thread is None:
            return
        self._is_ending = True
        self._changed.set()
        self._thread.join(LAST_SECONDS)
        if self._thread.is_alive() and not self._trouble:
            self._trouble = f"it takes longer than {LAST_SECONDS:g} s"
        self._thread = None
        if not self._is_current:
            self._has_warned = False
            self._warn(" The copy is not that of the end of the run: call upload(run) to make it.")

    def _follow(self) -> None:
        not_before, last_tries = 0.0, LAST_TRIES
        while True:
            self._changed.wait()
            while not self._is_ending and (seconds := not_before - time.monotonic()) > 0:
                time.sleep(min(seconds, 0.2))
            self._changed.clear()
            is_last = self._is_ending
            try:
                self._uploader.upload(whole=is_last)
                self._trouble = ""
                self._is_current = is_last
            except InputError as error:  # taken over: no attempt can succeed
                self._trouble = text_of(error)
                return
            except Exception as error:
                self._trouble = text_of(error) or type(error).__name__
                not_before = time.monotonic() + RETRY_SECONDS
                self._changed.set()
                if is_last and last_tries > 1:
                    last_tries -= 1
                    time.sleep(PAUSE_SECONDS)
                    continue
            if is_last:
                return

    def _warn(self, cure: str = "") -> None:
        if self._trouble and not self._has_warned:
            self._has_warned = True
            text = cure or " The search continues, and a later upload includes what is missing."
            warn_user(f"the run cannot be copied to {self.url}: {self._trouble}.{text}")

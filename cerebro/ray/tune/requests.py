"""A searcher that is asked from outside: what proxies want trained becomes its suggestions.

A proxy stands for a trial of Ray Tune's. It asks for one epoch at a time; between two requests
the trial is paused, at no cost. Requests come from other threads than the one that
searches. They name what is wanted, not what is to be done, so that one that is repeated
(by a proxy, or a whole run of Tune's, that lost the answer) is answered from the record.
"""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import cerebro._core as _core
from cerebro.errors import RunError
from cerebro.executors.base import Executor, Wake
from cerebro.run.records import ENDED
from cerebro.searchers.base import Decision, Searcher, Suggested, Suggestion
from cerebro.space import Space
from cerebro.worker.messages import News


@dataclass(frozen=True)
class Point:
    """Where a trial stands: after which epoch, and with which state."""

    trial: int
    epoch: int
    state_hash: str


@dataclass
class Request:
    """One epoch that a proxy wants.

    Attributes
    ----------
    owner
        Tune's name of the trial.
    config
        Its configuration.
    trial
        Cerebro's number, if the proxy knows it.
    begin
        Of a trial without a number: what it is a clone of; None: it begins anew. Of one with
        a number: its own state, for a clone to begin with in case the trial has failed.
    target
        So many epochs are to be done then, those of what it was cloned from included.
    """

    owner: str
    config: dict[str, Any]
    trial: int | None
    begin: Point | None
    target: int
    answer: Future[Answer | int] = field(default_factory=Future)
    """The epoch; a trial's number where it is on record already."""

    @property
    def identity(self) -> str:
        """What makes it this trial and no other: the same one is never begun twice."""
        begin = None if self.begin is None else [self.begin.trial, self.begin.epoch]
        text = json.dumps([self.owner, self.config, begin], sort_keys=True)
        return _core.xxh3_64(text.encode())


@dataclass(frozen=True)
class Answer:
    """A trained epoch."""

    point: Point
    metrics: dict[str, float]


class RequestedTrials(Searcher):
    """The searcher, and the callback by which it hears what it is not told.

    Parameters
    ----------
    epochs
        After which a trial is finished; None: nobody knows.
    width
        How many trials train at a time.
    """

    adaptive = True
    waits = True  # that it suggests nothing is no end of the run
    repeatable = False  # what it suggests is what others ask for

    def __init__(self, epochs: int | None, width: int) -> None:
        self.bell = Bell()
        self.pinned: set[tuple[int, int]] = set()
        self._epochs = epochs
        self._width = width
        self._changed = threading.Condition()
        self._requests: deque[Request] = deque()
        self._waiting: dict[int, list[Request]] = defaultdict(list)  # by trial
        self._keys: dict[str, int] = {}  # identities and numbers
        self._count = 0
        self._done: dict[int, int] = {}  # epochs, those of parents included
        self._live: set[int] = set()  # trials that train
        self._ends: dict[int, str] = {}  # why a trial cannot go on
        self._over: set[int] = set()  # trials that have trained all their epochs
        self._last: dict[int, Answer] = {}
        self._to_shelve: set[int] = set()
        self._has_begun = False
        self._closing: str | None = None

    # --- for other threads -----------------------------------------------

    def ask(self, request: Request) -> Future[Answer | int]:
        """Want an epoch: return `Request.answer`.

        It has `RunError` if the trial cannot go on.
        """
        request.answer.set_running_or_notify_cancel()  # from now on it cannot be cancelled
        with self._changed:
            if self._closing is not None:
                request.answer.set_exception(RunError(self._closing))
            else:
                self._requests.append(request)
                self._changed.notify_all()
                if len(self._live) < self._width:  # else it is asked when one of them rests
                    self.bell.ring()
        return request.answer

    def pin(self, trial: int, epoch: int) -> None:
        """Keep a state; it is the trial's last one, which is there until it goes on."""
        with self._changed:
            self.pinned.add((trial, epoch))

    def shelve(self, trial: int) -> None:
        """Nobody stands for a trial any more: what it holds may be freed."""
        with self._changed:
            self._to_shelve.add(trial)

    def close(self, why: str) -> None:
        """Answer nobody any more, and interrupt the search."""
        with self._changed:
            if self._closing is None:
                self._closing = why
            self._changed.notify_all()
            waiting = [*self._requests, *(r for some in self._waiting.values() for r in some)]
            self._requests.clear()
            self._waiting.clear()
            self.bell.ring()
        for request in waiting:
            request.answer.set_exception(RunError(why))

    # --- the searcher ----------------------------------------------------

    def setup(self, space: Space, **_: Any) -> None:
        """Nothing is known yet."""

    def suggest(self) -> Suggested:
        """Return what somebody wants; None while nobody does, and the bell will ring.

        Before the run has begun, which its first trial does, it is waited for here.

        Raises
        ------
        KeyboardInterrupt
            If nobody will want anything any more: the run is left so that it can go on.
        """
        with self._changed:
            while True:
                self.bell.clear()
                if self._closing is not None:
                    raise KeyboardInterrupt
                while self._requests:
                    suggestion = self._take(self._requests.popleft())
                    if suggestion is not None:
                        return suggestion
                if self._live or self._has_begun:
                    return None
                self._changed.wait()

    def _take(self, request: Request) -> Suggestion | None:
        number = self._number_of(request)
        if number is None:
            return self._begin(request)
        done = self._done[number]
        if done >= request.target:
            request.answer.set_result(number)
        elif number in self._live:
            self._waiting[number].append(request)
        elif number in self._ends:
            request.answer.set_exception(RunError(self._ends[number]))
        elif request.target > done + 1:
            request.answer.set_exception(
                RunError(f"trial {number} has done {done} epochs, not {request.target - 1}")
            )
        else:
            self._waiting[number].append(request)
            self._live.add(number)
            self._to_shelve.discard(number)
            return Suggestion({}, request.target, trial=number)
        return None

    def _begin(self, request: Request) -> Suggestion:
        begin = request.begin
        number = self._keys[request.identity] = self._count
        self._count += 1
        self._done[number] = request.target - 1
        self._live.add(number)
        self._waiting[number].append(request)
        if begin is None:
            return Suggestion(dict(request.config), request.target)
        return Suggestion(
            dict(request.config), request.target, parent=begin.trial, parent_epoch=begin.epoch
        )

    def _number_of(self, request: Request) -> int | None:
        """The trial that is meant, None for one that is to begin: a failed one begins again."""
        if request.trial is not None and (request.begin is None or not self._failed(request.trial)):
            return request.trial
        number = self._keys.get(request.identity)
        return None if number is None or self._failed(number) else number

    def _failed(self, number: int) -> bool:
        return number in self._ends and number not in self._over

    def report(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> Decision:
        """Pause the trial until it is wanted again."""
        with self._changed:
            self._live.discard(trial)
            last = self._last.get(trial)
            if last is None or last.point.epoch != epoch:
                return Decision.STOP  # it has failed: `on_trial_end` says how
            self._done[trial] = epoch + 1
            waiting = self._waiting.pop(trial, [])
            self._requests.extend(r for r in waiting if r.target > epoch + 1)
            over = self._epochs is not None and epoch + 1 >= self._epochs
            if over:
                self._over.add(trial)
                self._ends[trial] = f"trial {trial} has done its {self._epochs} epochs"
        for request in waiting:
            if request.target <= epoch + 1:
                request.answer.set_result(last)
        return Decision.CONTINUE if over else Decision.PAUSE

    def shelved(self) -> list[int]:
        """Return, once, the paused trials that nobody stands for."""
        with self._changed:
            found = sorted(self._to_shelve - self._live - self._ends.keys())
            self._to_shelve.clear()
            return found

    def state_dict(self) -> dict[str, Any]:
        """Return who is who, and what is kept."""
        with self._changed:
            return {
                "count": self._count,
                "keys": dict(self._keys),
                "pinned": sorted(map(list, self.pinned)),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know who is who again; how trials stand is heard when the run starts."""
        self._count = int(state["count"])
        self._keys = dict(state["keys"])
        self.pinned |= {(int(trial), int(epoch)) for trial, epoch in state["pinned"]}

    # --- the callback ----------------------------------------------------

    def on_run_start(self, run: Any) -> None:
        """Hear how the trials of a run stand that goes on."""
        run.refresh()
        with self._changed:
            self._has_begun = True
            self._count = max(self._count, len(run.trials))  # the first may be on its way
            for trial in run.trials:
                number = trial.number
                self._done[number] = trial.epoch
                if trial.status in ENDED:
                    self._ends[number] = _why(trial)
                    if trial.status == "finished":
                        self._over.add(number)
                elif trial.status != "paused":
                    self._live.add(number)

    def on_epoch_end(self, trial: Any, metrics: Mapping[str, float]) -> None:
        """Hear all of an epoch's metrics as they are, and its state's hash."""
        newest = trial.history[-1]
        point = Point(trial.number, newest["epoch"], newest["state_hash"])
        with self._changed:
            self._last[trial.number] = Answer(point, dict(metrics))

    def on_trial_end(self, trial: Any) -> None:
        """Tell who waits for it why a trial will not go on."""
        if trial.status == "finished":
            return
        with self._changed:
            self._live.discard(trial.number)
            why = self._ends[trial.number] = _why(trial)
            waiting = self._waiting.pop(trial.number, [])
        for request in waiting:
            request.answer.set_exception(RunError(why))


def _why(trial: Any) -> str:
    return f"trial {trial.number} {trial.status}" + (f": {trial.error}" if trial.error else "")


class Bell:
    """Wakes a thread that waits on descriptors."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        """Return what becomes readable."""
        return self._read

    def ring(self) -> None:
        """Wake whoever waits."""
        try:
            os.write(self._write, b"!")
        except (BlockingIOError, OSError):  # it rings already, or nobody is there
            return

    def clear(self) -> None:
        """Let it ring no more."""
        try:
            while os.read(self._read, 4096):
                pass
        except (BlockingIOError, OSError):
            return

    def close(self) -> None:
        """Close its descriptors."""
        for fd in (self._read, self._write):
            os.close(fd)
        self._read = self._write = -1


class Woken:
    """An executor whose `wait` also ends when a bell rings."""

    def __init__(self, executor: Executor, bell: Wake) -> None:
        self._executor = executor
        self._bell = bell

    def wait(self, timeout: float | None = None, wake: Wake | None = None) -> Sequence[News]:
        """Return what happened; see `cerebro.executors.base.Executor.wait`."""
        return self._executor.wait(timeout, wake=wake or self._bell)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

"""Define a searcher whose suggestions are the requests of proxies.

A proxy runs a trial of Ray Tune and requests one epoch at a time; between two requests the trial is
paused, at no cost. Requests come from threads other than the one that searches. A repeated request,
after a proxy or a whole run of Tune has lost the answer, is answered from the store.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import cerebro._core as _core
from cerebro.errors import RunError
from cerebro.executors.base import Executor, Wake
from cerebro.machine.signals import WakePipe
from cerebro.run.records import ENDED
from cerebro.searchers.base import Decision, Searcher, Suggested, Suggestion


@dataclass(frozen=True)
class Checkpoint:
    """The state of a trial after an epoch, with its hash."""

    trial: int
    epoch: int
    state_hash: str


@dataclass
class EpochRequest:
    """A proxy's request for one epoch.

    `owner` is Tune's name for the trial, `trial` Cerebro's number of it, if the proxy knows it.
    `begin` is the state that a trial without a number clones; None: the trial is new. For a trial
    with a number it is its own state, with which a clone begins if the trial has failed. `target`
    is the number of epochs trained after this request, including those before a clone began.
    """

    owner: str
    config: dict[str, Any]
    trial: int | None
    begin: Checkpoint | None
    target: int
    answer: Future[TrainedEpoch | int] = field(default_factory=Future)
    """The trained epoch; if the epoch is already stored, the trial's number."""

    @property
    def identity(self) -> str:
        """A text that identifies the trial, so that it is never started twice."""
        begin = None if self.begin is None else [self.begin.trial, self.begin.epoch]
        text = json.dumps([self.owner, self.config, begin], sort_keys=True)
        return _core.xxh3_64(text.encode())


@dataclass(frozen=True)
class TrainedEpoch:
    point: Checkpoint
    metrics: dict[str, float]


@dataclass
class RequestedTrial:
    """A trial of the run, and the requests that wait for it."""

    done: int = 0  # its epochs, including those of a clone's parents
    end: str | None = None  # why it cannot continue
    is_finished: bool = False  # whether it has ended because all its epochs are done
    last: TrainedEpoch | None = None
    waiting: list[EpochRequest] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        return self.end is not None and not self.is_finished

    def take_waiting(self) -> list[EpochRequest]:
        waiting, self.waiting = self.waiting, []
        return waiting


class RequestedTrials(Searcher):
    """The searcher, which is also a callback, to get data that searchers do not receive.

    `epochs` is the number per trial, if known; `width` is the number of trials that train at a
    time.
    """

    adaptive = True
    steerable = False  # Tune counts the trials
    waits = True  # the run does not end while there is no suggestion
    repeatable = False  # it suggests what others request

    def __init__(self, epochs: int | None, width: int) -> None:
        self.wake_pipe = WakePipe()
        self.pinned: set[tuple[int, int]] = set()
        self._epochs = epochs
        self._width = width
        self._changed = threading.Condition()
        self._requests: deque[EpochRequest] = deque()
        self._trials: dict[int, RequestedTrial] = defaultdict(RequestedTrial)
        self._keys: dict[str, int] = {}  # by identity: the trial's number
        self._count = 0
        self._running: set[int] = set()  # trials that are training
        self._to_shelve: set[int] = set()
        self._has_begun = False
        self._closing: str | None = None

    # --- for other threads -----------------------------------------------

    def ask(self, request: EpochRequest) -> Future[TrainedEpoch | int]:
        """Queue a request; its `answer` raises RunError if the trial cannot continue."""
        request.answer.set_running_or_notify_cancel()  # from now on it cannot be canceled
        with self._changed:
            if self._closing is not None:
                request.answer.set_exception(RunError(self._closing))
            else:
                self._requests.append(request)
                self._changed.notify_all()
                if len(self._running) < self._width:  # else it wakes when a trial pauses
                    self.wake_pipe.wake()
        return request.answer

    def pin(self, trial: int, epoch: int) -> None:
        """Keep the trial's last state, which otherwise exists only until the trial continues."""
        with self._changed:
            self.pinned.add((trial, epoch))

    def shelve(self, trial: int) -> None:
        with self._changed:
            self._to_shelve.add(trial)

    def close(self, why: str) -> None:
        """Fail all pending requests, and interrupt the search."""
        with self._changed:
            if self._closing is None:
                self._closing = why
            self._changed.notify_all()
            waiting = [*self._requests]
            for trial in self._trials.values():
                waiting += trial.take_waiting()
            self._requests.clear()
            self.wake_pipe.wake()
        for request in waiting:
            request.answer.set_exception(RunError(why))

    # --- the searcher ----------------------------------------------------

    def suggest(self) -> Suggested:
        """Return the next request as a suggestion; None until `wake_pipe` signals one.

        Before the run has begun, wait for a request here, because the first trial begins the run.
        Raises KeyboardInterrupt after `close`, so that the run can be resumed.
        """
        with self._changed:
            while True:
                self.wake_pipe.clear()
                if self._closing is not None:
                    raise KeyboardInterrupt
                while self._requests:
                    suggestion = self._handle_request(self._requests.popleft())
                    if suggestion is not None:
                        return suggestion
                if self._running or self._has_begun:
                    return None
                self._changed.wait()

    def _handle_request(self, request: EpochRequest) -> Suggestion | None:
        number = self._find_trial(request)
        if number is None:
            return self._begin_trial(request)
        trial = self._trials[number]
        if trial.done >= request.target:
            request.answer.set_result(number)
        elif number in self._running:
            trial.waiting.append(request)
        elif trial.end is not None:
            request.answer.set_exception(RunError(trial.end))
        elif request.target > trial.done + 1:
            request.answer.set_exception(
                RunError(f"trial {number} has done {trial.done} epochs, not {request.target - 1}")
            )
        else:
            trial.waiting.append(request)
            self._running.add(number)
            self._to_shelve.discard(number)
            return Suggestion({}, request.target, trial=number)
        return None

    def _begin_trial(self, request: EpochRequest) -> Suggestion:
        begin = request.begin
        number = self._keys[request.identity] = self._count
        self._count += 1
        self._trials[number] = RequestedTrial(request.target - 1, waiting=[request])
        self._running.add(number)
        if begin is None:
            return Suggestion(dict(request.config), request.target)
        return Suggestion(
            dict(request.config), request.target, parent=begin.trial, parent_epoch=begin.epoch
        )

    def _find_trial(self, request: EpochRequest) -> int | None:
        """Return the requested trial's number; None if it is new, or failed and starts again."""
        number = request.trial
        if number is not None and (request.begin is None or not self._trials[number].has_failed):
            return number
        number = self._keys.get(request.identity)
        return None if number is None or self._trials[number].has_failed else number

    def report(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> Decision:
        """Pause the trial until its next epoch is requested."""
        with self._changed:
            self._running.discard(trial)
            this = self._trials[trial]
            last = this.last
            if last is None or last.point.epoch != epoch:
                return Decision.STOP  # it has failed: `on_trial_end` receives the reason
            this.done = epoch + 1
            waiting = this.take_waiting()
            self._requests.extend(r for r in waiting if r.target > this.done)
            this.is_finished = self._epochs is not None and this.done >= self._epochs
            if this.is_finished:
                this.end = f"trial {trial} has done its {self._epochs} epochs"
        for request in waiting:
            if request.target <= this.done:
                request.answer.set_result(last)
        return Decision.CONTINUE if this.is_finished else Decision.PAUSE

    def shelved(self) -> list[int]:
        with self._changed:
            left = self._to_shelve - self._running
            self._to_shelve.clear()
            return sorted(number for number in left if self._trials[number].end is None)

    def state_dict(self) -> dict[str, Any]:
        with self._changed:
            return {
                "count": self._count,
                "keys": dict(self._keys),
                "pinned": sorted(map(list, self.pinned)),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the trials' numbers and the kept states; `on_run_start` restores the progress."""
        self._count = int(state["count"])
        self._keys = dict(state["keys"])
        self.pinned |= {(int(trial), int(epoch)) for trial, epoch in state["pinned"]}

    # --- the callback ----------------------------------------------------

    def on_run_start(self, run: Any) -> None:
        """Take over the trials of a resumed run."""
        run.refresh()
        with self._changed:
            self._has_begun = True
            self._count = max(self._count, len(run.trials))  # the first may be suggested already
            for trial in run.trials:
                this = self._trials[trial.number]
                this.done = trial.epoch
                if trial.status in ENDED:
                    this.end = _explain_end(trial)
                    this.is_finished = trial.status == "finished"
                elif trial.status != "paused":
                    self._running.add(trial.number)

    def on_epoch_end(self, trial: Any, metrics: Mapping[str, float]) -> None:
        newest = trial.history[-1]
        point = Checkpoint(trial.number, newest["epoch"], newest["state_hash"])
        with self._changed:
            self._trials[trial.number].last = TrainedEpoch(point, dict(metrics))

    def on_trial_end(self, trial: Any) -> None:
        """Fail the requests that wait for an ended trial."""
        if trial.status == "finished":
            return
        with self._changed:
            self._running.discard(trial.number)
            this = self._trials[trial.number]
            this.end = why = _explain_end(trial)
            waiting = this.take_waiting()
        for request in waiting:
            request.answer.set_exception(RunError(why))


def _explain_end(trial: Any) -> str:
    return f"trial {trial.number} {trial.status}" + (f": {trial.error}" if trial.error else "")


class WakingExecutor:
    """An executor whose `wait` also returns when `wake_pipe` becomes readable."""

    def __init__(self, executor: Executor, wake_pipe: Wake) -> None:
        self._executor = executor
        self._wake_pipe = wake_pipe

    def wait(self, timeout: float | None = None, wake: Wake | None = None) -> Any:
        return self._executor.wait(timeout, wake=wake or self._wake_pipe)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

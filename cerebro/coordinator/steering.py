"""Carry out the user's requests about trials: clone, add, extend.

A clone and an added configuration are tried in a worker before anything is recorded: `build` must
accept the configuration, and a clone's model must fit the parent's state. Then the trial's row and
that of the action are one transaction, and only afterwards is the request's file removed. So a
request is carried out at most once, whatever dies.
"""

from __future__ import annotations

import copy
import difflib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cerebro.control import Command
from cerebro.coordinator.dispatcher import Dispatcher
from cerebro.coordinator.folds import FoldedTrials
from cerebro.coordinator.search_loop import SearchLoop
from cerebro.coordinator.trial import LiveTrial, OfUser
from cerebro.coordinator.trials import LiveTrials, make_recordable
from cerebro.errors import CerebroError, InputError, one_line
from cerebro.run.records import ENDED, ActionRecord, TrialRecord, strip_study
from cerebro.run.settings import Settings
from cerebro.run.store import Store, encode
from cerebro.run.store.writing import size_of
from cerebro.searchers.base import Suggestion
from cerebro.space import Space
from cerebro.space.dimensions import Choice, Dimension, Integer, LogUniform, Uniform
from cerebro.worker import messages

MAX_ROWS = 10_000
"""The most actions that one process records, so that a flood of files does not fill the disk."""


@dataclass
class Request:
    """A request, and the call that removes its file."""

    command: Command
    release: Callable[[], None] = lambda: None
    of_resume: bool = False  # whether `cerebro.resume` has it, and ends if it is refused
    losses: int = 0  # how many workers died while they tried it


class Steering:
    """Answers requests one after the other, each as soon as a worker is free to try it."""

    def __init__(
        self,
        settings: Settings,
        context: messages.RunContext,
        store: Store,
        dispatcher: Dispatcher,
        trials: LiveTrials | FoldedTrials,
        trained: LiveTrials,
        loop: SearchLoop,
        now: Callable[[], float],
        note: Callable[[str, str], None],
    ) -> None:
        self._settings = settings
        self._context = context
        self._store = store
        self._dispatcher = dispatcher
        self._trials = trials
        self._trained = trained  # with folds, these; else the same
        self._loop = loop
        self._now = now
        self._note = note
        self._waiting: deque[Request] = deque()
        self._tried: tuple[int, Request] | None = None
        """The worker that tries a request, and the request."""
        self._rows = 0
        self.refused: str | None = None
        """Why a request that came with `cerebro.resume` was refused."""

    @property
    def wants_worker(self) -> bool:
        return bool(self._waiting) and self._tried is None

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting) or self._tried is not None

    def take(self, command: Command, release: Callable[[], None]) -> None:
        self._waiting.append(Request(command, release))

    def take_first(self, commands: Iterable[Command]) -> None:
        """Take the requests of `cerebro.resume`, which ends if one is refused."""
        for command in commands:
            self._waiting.append(Request(command, of_resume=True))

    def describe(self, command: Command) -> str:
        """Return the outcome of a command that was carried out, with who waits for a pause."""
        if command.verb != "pause" or command.trial is None:
            return "done"
        others = self._loop.count_waiting_for(command.trial)
        if not others:
            return "done"
        are = "1 trial" if others == 1 else f"{others} trials"
        return f"done: {are} will wait for it; to free them: stop"

    def record(self, command: Command, outcome: str, **about: Any) -> None:
        """Record what has become of a command."""
        self._rows += 1
        if self._rows > MAX_ROWS:
            return
        self._store.add_action(
            ActionRecord(
                command.request,
                self._now(),
                command.verb,
                command.trial,
                changes=command.changes,
                epochs=about.pop("epochs", command.epochs),
                sender=one_line(command.sender, 200),
                outcome=outcome,
                **about,
            )
        )

    # --- one request ------------------------------------------------------------

    def proceed(self) -> None:
        """Answer requests until one needs a worker and none is free."""
        while self.wants_worker:
            request = self._waiting[0]
            command = request.command
            problem = self._find_problem(command)
            if problem is not None:
                self._waiting.popleft()
                self._refuse(request, problem)
            elif command.verb == "extend":
                self._waiting.popleft()
                self._extend(request)
            else:
                worker = self._dispatcher.begin_check(self._make_check(command))
                if worker is None:
                    return
                self._waiting.popleft()
                self._tried = worker, request

    def finish_check(self, event: messages.CheckDone) -> None:
        """Carry out a request that a worker has tried, or refuse it."""
        if self._tried is None or self._tried[0] != event.worker:
            return
        request, self._tried = self._tried[1], None
        problem = event.error or "; ".join(event.problems) or self._find_problem(request.command)
        if problem:
            self._refuse(request, problem)
        else:
            self._begin(request)

    def worker_lost(self, worker: int) -> None:
        """Try a request again whose worker was lost, once."""
        if self._tried is None or self._tried[0] != worker:
            return
        request, self._tried = self._tried[1], None
        request.losses += 1
        if request.losses > 1:
            self._refuse(request, "the worker that built its model was lost, twice")
        else:
            self._waiting.appendleft(request)

    def refuse_all(self, reason: str) -> None:
        waiting, tried = [*self._waiting], self._tried
        self._waiting.clear()
        self._tried = None
        for request in ([] if tried is None else [tried[1]]) + waiting:
            self._refuse(request, reason)

    def _refuse(self, request: Request, reason: str) -> None:
        text = one_line(reason, 1000)
        self.record(request.command, f"refused: {text}")
        self._note("command", f"{request.command}: refused, {text}")
        if request.of_resume:
            self.refused = self.refused or text
        self._store.flush()
        request.release()

    def _begin(self, request: Request) -> None:
        command = request.command
        suggestion, of_user = self._make_suggestion(command)
        with self._store.group():
            trial = self._loop.add_outside(suggestion, of_user)
            record = trial.record
            self.record(
                command,
                self._note_outside(record.config, command.changes or {}),
                child=record.number,
                epoch=record.parent_epoch,
                epochs=record.target_epochs,
            )
            self._note("command", f"{command}: trial {record.number}")
        self._store.flush()
        request.release()

    def _extend(self, request: Request) -> None:
        command = request.command
        assert command.trial is not None and command.epochs is not None
        trial = self._trials.by_number[command.trial]
        with self._store.group():
            for fold in trial.in_training:
                if fold.record.status not in ENDED:
                    position = fold.position + self._dispatcher.count_begun(fold.worker)
                    self._trained.aim_further(fold, command.epochs, position)
            trial.record.target_epochs = command.epochs
            self.record(command, "done")
            self._note("command", f"{command}: until {command.epochs} epochs are done")
        self._store.flush()
        request.release()

    # --- what a request means ------------------------------------------------------

    def _make_suggestion(self, command: Command) -> tuple[Suggestion, OfUser]:
        limit = self._settings.limits.epochs
        if command.verb == "add":
            config = self._complete(command.changes or {})
            epochs = command.epochs or limit
            return Suggestion(config, epochs), OfUser(info_epochs=epochs)
        parent = self._parent_of(command)
        config = apply_changes(parent.config, command.changes or {})
        part = self._parts_of(parent)[0]
        position = part.done * self._context.units_per_epoch
        info_epochs = command.epochs or part.info_epochs(position, limit)
        epoch = None if command.cold else self._epoch_of(command, parent)
        epochs = command.epochs or self._target_of(parent)
        suggestion = Suggestion(config, epochs, parent=parent.number, parent_epoch=epoch)
        return suggestion, OfUser(command.cold, info_epochs)

    def _target_of(self, parent: TrialRecord) -> int:
        """Return until how many epochs are done a trial would train if no searcher ended it."""
        if not self._loop.searcher.adaptive or parent.origin == "user":
            return parent.target_epochs
        part = self._parts_of(parent)[0]
        position = part.done * self._context.units_per_epoch
        return max(parent.target_epochs, part.info_epochs(position, self._settings.limits.epochs))

    @staticmethod
    def _parts_of(record: TrialRecord) -> Sequence[TrialRecord]:
        """Return the trials that were trained for a record: its folds, or itself."""
        return record.folds or (record,)

    def _parent_of(self, command: Command) -> TrialRecord:
        assert command.trial is not None
        parent = self._trials.recall(command.trial)
        assert parent is not None
        return parent.record

    def _epoch_of(self, command: Command, parent: TrialRecord) -> int:
        """Return the parent's epoch after which a warm clone begins."""
        if command.after is not None:
            return command.after - 1
        last = self._last_epoch(parent.number)
        assert last is not None
        return last

    def _last_epoch(self, number: int) -> int | None:
        """Return the last finished epoch of a trial or, if the searcher compares it, reported."""
        trial = self._trials.recall(number)
        assert trial is not None
        record = trial.record
        done = record.done - 1 if record.epochs else None
        compared = self._loop.searcher.adaptive and record.status not in ENDED
        return trial.reported_epoch if compared and done is not None else done

    def _make_check(self, command: Command) -> messages.CheckTask:
        suggestion, of_user = self._make_suggestion(command)
        clone_of = None
        if suggestion.parent_epoch is not None:
            parent = self._parts_of(self._parent_of(command))[0]
            clone_of = self._trained.states.find_clone_of(parent, suggestion.parent_epoch)
        return messages.CheckTask(
            make_recordable(suggestion.config)[0],
            build_only=True,
            number=len(self._trained),
            epochs=of_user.info_epochs,
            stream=self._trained.next_stream(by_user=True),
            clone_of=clone_of,
        )

    def _note_outside(self, config: Mapping[str, Any], given: Mapping[str, Any]) -> str:
        """Return the outcome "done", with the given values that are outside the space."""
        dimensions: dict[str, list[Any]] = {}
        for node in [] if self._space is None else self._space.nodes:
            dimensions.setdefault(".".join(node.path), []).append(node.dimension)
        outside = [
            f"{name}={value_of(config, name)!r}"
            for name in given
            if name in dimensions
            and all(is_outside(each, value_of(config, name)) for each in dimensions[name])
        ]
        return f"done: outside the space: {', '.join(outside)}" if outside else "done"

    # --- what is wrong with a request ------------------------------------------------

    def _find_problem(self, command: Command) -> str | None:
        """Return why a request cannot be carried out now, in one sentence; None if it can."""
        if not self._loop.searcher.steerable:
            return f"{self._settings.strategy.searcher_name} decides itself which trials there are"
        try:
            if command.verb == "add":
                return self._find_problem_of_adding(command)
            number: Any = command.trial
            trial = self._trials.recall(number)
            if trial is None:
                return f"there is no trial {number}: the run has 0 to {len(self._trials) - 1}"
            if command.verb == "extend":
                return self._find_problem_of_extending(command, trial)
            return self._find_problem_of_cloning(command, trial.record)
        except CerebroError as error:
            return str(error)

    def _find_problem_of_adding(self, command: Command) -> str | None:
        config = self._complete(command.changes or {})
        return make_recordable(config)[1]

    def _complete(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a whole configuration; raise InputError if names are unknown or missing."""
        space, missing = self._space, []
        known = self._known_names({})
        check_names(given, known, "the space")
        if space is None:
            missing = [name for name in known if name not in given]
            config = dict(given)
        else:

            def note_missing(node: Any) -> Any:
                missing.append(".".join(node.path))
                return node.dimension.draw(0.5)

            config = space.fill(unflatten(given, known), note_missing)
        if missing:
            raise InputError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
        return config

    def _find_problem_of_extending(self, command: Command, trial: LiveTrial) -> str | None:
        record, epochs = trial.record, command.epochs or 0
        more = f"clone it with epochs={epochs}"
        if record.status in ENDED:
            return f"trial {record.number} is {record.status}: {more}"
        if self._loop.searcher.adaptive and record.origin == "searcher":
            return f"the searcher decides how long trial {record.number} trains: {more}"
        if epochs <= record.target_epochs:
            return f"trial {record.number} trains for {record.target_epochs} epochs already"
        return None

    def _find_problem_of_cloning(self, command: Command, parent: TrialRecord) -> str | None:
        changes, name = command.changes or {}, f"trial {parent.number}"
        check_names(changes, self._known_names(parent.config), name)
        config = apply_changes(parent.config, changes)
        for key, value in changes.items():
            before = value_of(parent.config, key)
            is_number = isinstance(before, (int, float)) and not isinstance(before, bool)
            if is_number and isinstance(value, str) and not self._may_be_text(key):
                return f"{key}={value!r}: it is not a number"
        problem = make_recordable(config)[1]
        if problem is not None:
            return problem
        if config == parent.config and command.epochs is None and not command.anyway:
            return f"nothing differs from {name} (--anyway: only the seed does)"
        epochs = command.epochs or self._target_of(parent)
        if command.cold:
            return None
        return self._find_problem_of_state(command, parent, epochs)

    def _find_problem_of_state(
        self, command: Command, parent: TrialRecord, epochs: int
    ) -> str | None:
        """Return why the parent has no state to begin with."""
        name, last = f"trial {parent.number}", self._last_epoch(parent.number)
        if last is None:
            return f"{name} has finished no epoch yet: wait, or clone it cold"
        if parent.status == "diverged" and command.after is None:
            return f"{name} has diverged: give after=, an epoch before that, or clone it cold"
        epoch = last if command.after is None else command.after - 1
        if epoch > last:
            return f"{name} has done {last + 1} epochs, not {epoch + 1}"
        parts = self._parts_of(parent)
        kept = [
            {e.epoch for e in part.epochs if e.state_file is not None and e.epoch <= last}
            for part in parts
        ]
        both = sorted(set.intersection(*kept))
        if epoch not in both:
            best = parent.best_epoch(self._settings.ranking.metric, self._settings.ranking.mode)
            those = [f"{e + 1}{' (the best)' if e == best else ''}" for e in both]
            are = f"those after {', '.join(those)} epochs are" if those else "none is"
            return f"the state of {name} after {epoch + 1} epochs was deleted; {are} kept"
        if epochs <= epoch + 1:
            return (
                f"{name} has done {epoch + 1} epochs, which count, and the clone would train until "
                f"{epochs} are done: give more epochs"
            )
        return self._find_shortage(parts, epoch)

    def _find_shortage(self, parts: Sequence[TrialRecord], epoch: int) -> str | None:
        """Return whether the disk has no room for the states of a clone."""
        folder = Path(self._context.folders.states)
        files = (e.state_file for part in parts for e in part.epochs if e.epoch == epoch)
        disk = self._store.disk
        size = sum(size_of(folder / file, disk) for file in files if file is not None)
        free = disk.free_bytes(self._settings.folder)
        if free < 3 * size:
            return f"its states take {3 * size:,} bytes, and the disk has {free:,} left"
        return None

    @property
    def _space(self) -> Space | None:
        """The space; None if there is none, or it is that of a study, which defines by running."""
        given = self._settings.strategy.space_json
        space = None if given is None else Space.from_json(given)
        return space if space is not None and space.paths else None

    def _known_names(self, config: Mapping[str, Any]) -> list[str]:
        space = self._space
        names = dict.fromkeys(strip_study(config))
        if space is not None:
            names |= dict.fromkeys(".".join(path) for path in space.paths)
        elif not names and 0 in self._trials.by_number:
            names = dict.fromkeys(strip_study(self._trials.by_number[0].record.config))
        return list(names)

    def _may_be_text(self, name: str) -> bool:
        space = self._space
        nodes = [] if space is None else [n for n in space.nodes if ".".join(n.path) == name]
        values = [v for n in nodes if isinstance(n.dimension, Choice) for v in n.dimension.options]
        return any(isinstance(value, str) for value in values)


def check_names(given: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    """Raise InputError, with a suggestion, for a name that is not known."""
    for name in given:
        if name not in known and name.partition(".")[0] not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise InputError(f"{name} is not a setting of {what}: {hint}")


def is_outside(dimension: Dimension, value: Any) -> bool:
    """Return whether a dimension never has a value."""
    if isinstance(dimension, (Uniform, LogUniform, Integer)):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return not (is_number and dimension.low <= value <= dimension.high)
    # As JSON, which has no tuples.
    return isinstance(dimension, Choice) and encode(value) not in map(encode, dimension.options)


def value_of(config: Mapping[str, Any], name: str) -> Any:
    """Return a value by its name, with dots for nested mappings; None without one."""
    if name in config:
        return config[name]
    value: Any = config
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def apply_changes(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with other values; dots in names lead into nested mappings."""
    changed = copy.deepcopy(dict(config))
    for name, value in changes.items():
        *above, last = [name] if name in changed else name.split(".")
        inner = changed
        for key in above:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise InputError(f"{name}: {key} is not a mapping")
        inner[last] = value
    return changed


def unflatten(given: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Return settings whose names have dots as nested mappings."""
    return apply_changes({}, given) if any("." in name for name in known) else dict(given)

"""What a run records besides training, its warnings, and hyperparameters that no model reads."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cerebro.coordinator.trial import LiveTrial
from cerebro.data import depots
from cerebro.report.findings import UNREAD, Finding
from cerebro.run.records import NOT_EXACT
from cerebro.run.settings import Settings
from cerebro.run.store import Store
from cerebro.worker.messages import UnitDone, UnitFailed, Warned
from cerebro.worker.read_names import ReadNames, names_of
from cerebro.worker.trial_warnings import EVENT, Growth, ShownWarnings, show_finding


class EventBook:
    """Records events with the time of the run's clock; shows each warning once."""

    def __init__(self, store: Store, now: Callable[[], float], settings: Settings) -> None:
        self._store = store
        self._now = now
        self._build = settings.build
        self._folds = None if settings.folds is None else len(settings.folds)
        self.unread = UnreadNames()
        self._growth = Growth()
        self._shown = ShownWarnings()
        self._moved: set[str] = set()  # reasons why PyTorch moves batches to GPUs

    def add(self, kind: str, text: str, trial: int | None = None) -> None:
        self._store.add_event(self._now(), kind, text, trial)

    def forget(self, trial: int) -> None:
        self._growth.forget(trial)

    def note_first_warnings(self, warned: Sequence[Warned]) -> None:
        """Show and record the warnings of the hop check, which tries trial 0's configuration."""
        for warning in warned:
            self.add(EVENT, str(warning))
        self._shown.show(warned, self._name_of(0))

    def note_findings(self, findings: Sequence[Finding]) -> None:
        """Show and record each mistake that the hop check found, once."""
        for finding in findings:
            self.add(EVENT, str(finding))
            show_finding(finding, self._build, f"{self._name_of(0)}: ")

    def note_unit(self, trial: LiveTrial, event: UnitDone) -> None:
        self._add_read_names(event)
        self._watch_memory(event)
        self._note_not_exact(trial, event.steps.not_exact)
        self._note_moved_batches(event.steps.moved)
        if event.steps.unlike:
            self._note_wrong_step(trial, event.steps.unlike)
        self._note_warnings(trial, event.warned)

    def note_failed_unit(self, trial: LiveTrial, event: UnitFailed) -> None:
        self._note_warnings(trial, event.warned)
        self._add_read_names(event)

    def _add_read_names(self, event: UnitDone | UnitFailed) -> None:
        if event.task.notes_reads:
            self.unread.add(event.task.config, event.read)

    def note_unread_names(self) -> None:
        """Show and record that no trial has read a name of the space."""
        finding = self.unread.make_finding()
        if finding is not None:
            self.add(UNREAD, str(finding))
            show_finding(finding, self._build)

    def _note_warnings(self, trial: LiveTrial, warned: Sequence[Warned]) -> None:
        """Record a trial's warnings, and show those that no other trial has raised."""
        number = trial.record.number
        for warning in warned:
            if trial.is_new(warning):  # another worker may have raised it before
                self.add(EVENT, str(warning), number)
        self._shown.show(warned, self._name_of(number))

    def _name_of(self, number: int) -> str:
        """Return the user's name for a trial; with folds, it names configuration and fold."""
        if self._folds is None:
            return f"trial {number}"
        return f"trial {number // self._folds}, fold {number % self._folds}"

    def _note_not_exact(self, trial: LiveTrial, operations: Sequence[str]) -> None:
        number = trial.record.number
        for name in operations:
            if trial.is_new((NOT_EXACT, name)):
                self.add(NOT_EXACT, name, number)
                warnings.warn(
                    f"trial {number} is not exact: {name} has no deterministic version on its "
                    "device, so its states may differ from run to run",
                    stacklevel=2,
                )

    def _note_wrong_step(self, trial: LiveTrial, unlike: str) -> None:
        number = trial.record.number
        text = (
            f"{self._name_of(number)}, {unlike}. Earlier units have used that step, so the results "
            "of this trial may be wrong: run it again with graph=False"
        )
        self.add("recorded step differs", text, number)
        self.add(NOT_EXACT, "a recorded step that was wrong", number)
        warnings.warn(text, stacklevel=2)

    def note_not_finite(self, trial: LiveTrial, epoch: int) -> None:
        """Record the first epoch in which a trial's validation metric is not finite."""
        metrics = trial.record.epochs[-1].metrics
        wrong = [k for k, v in metrics.items() if k.startswith("val_") and not math.isfinite(v)]
        if wrong and trial.is_new("not finite"):
            values = ", ".join(f"{name} is {metrics[name]}" for name in wrong)
            text = f"trial {trial.record.number}, epoch {epoch}: {values}"
            self.add("not finite", text, trial.record.number)

    def _note_moved_batches(self, why: str) -> None:
        """Warn once per run that PyTorch moves batches to a GPU; record each reason."""
        if not why or why in self._moved:
            return
        self._moved.add(why)
        self.add("batches are moved", why)
        if len(self._moved) == 1:
            warnings.warn(depots.explain_moving(why), stacklevel=2)

    def _watch_memory(self, event: UnitDone) -> None:
        """Record that a trial's memory grows in every epoch; see `Growth`."""
        task = event.task
        self._growth.add(task.trial, event.process.grown)
        if event.metrics is not None:
            text = self._growth.end_epoch(task.trial, task.epoch, event.process.resident)
            if text is not None:
                self.add("memory grows", text, task.trial)
                warnings.warn(text, stacklevel=2)


class UnreadNames:
    """The names of configurations that no ``build`` has read yet.

    A name counts as unread only if no trial that has it has read it: it may depend on a choice, as
    ``momentum`` on the optimizer.
    """

    def __init__(self) -> None:
        self._known = False
        self._read: set[str] = set()
        self._unread: dict[str, None] = {}
        self._sought: set[str] = set()

    def begin(self, config: Mapping[str, Any], read: ReadNames | None) -> None:
        """Begin with what the hop check has found; None: nothing is noted in this run."""
        self._known = read is not None
        self.add(config, read)

    def add(self, config: Mapping[str, Any], read: ReadNames | None) -> None:
        """Add what ``build`` has read of a configuration; None: perhaps everything."""
        unread = () if read is None else read.unread
        self._read.update(set(names_of(config)).difference(unread))
        self._unread.update(dict.fromkeys(unread))
        self._sought.update(() if read is None else read.sought)

    def has_unread_name(self, config: Mapping[str, Any]) -> bool:
        """Return whether a configuration has a name that no trial is known to read."""
        return self._known and not self._read.issuperset(names_of(config))

    def make_finding(self) -> Finding | None:
        """Return the finding for a run that is over; None if every name was read."""
        names = [name for name in self._unread if name not in self._read]
        if not names:
            return None
        sought = sorted(self._sought.difference(self._read, self._unread))
        meant = [near[0] for name in names if (near := difflib.get_close_matches(name, sought, 1))]
        if meant:
            cure = f"did you mean {' and '.join(map(repr, meant))}?"
        else:
            them = "it" if len(names) == 1 else "them"
            cure = f"read {them} in build, or leave {them} out of the space"
        return Finding(UNREAD, f"no trial read {' or '.join(map(repr, names))}", cure)

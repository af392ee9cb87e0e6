"""The updates of a model: backward passes, gradients, optimizers, schedulers and their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler

import cerebro._core as _core
from cerebro.errors import InputError
from cerebro.model import Part
from cerebro.torch import optimizer_step
from cerebro.torch.arguments import needs_metric
from cerebro.torch.network import Network
from cerebro.torch.state import collect_updates, copy_deeply, load_scheduler, load_updates


class Updates(Part):
    """Accumulates gradients, updates the parameters, and steps the schedulers.

    An update follows about every `accumulate` batches. With `steps_by_update`,
    ``scheduler_step="batch"`` means after each update. With `in_core`, the core runs the
    optimizers' steps where it can.
    """

    def __init__(
        self,
        network: Network,
        optimizers: Sequence[Any],
        schedulers: Sequence[Any],
        *,
        scheduler_step: str,
        steps_by_update: bool,
        clip_norm: float | None,
        accumulate: int,
        scaler: Any,
        in_core: bool,
    ) -> None:
        self._network = network
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._scheduler_step = scheduler_step
        self.by_batch = bool(schedulers) and scheduler_step == "batch"  # or after updates
        self._by_update = steps_by_update
        self._clip_norm = clip_norm
        self.accumulate = accumulate
        self.scaler = scaler
        self.in_core = in_core
        self.pending = 0  # batches since the last update
        self._windows: Iterator[int] = iter(())  # batches of each update that the unit has left
        self._window = accumulate
        self._scheduler_due = False
        self._steps: Sequence[int] = ()  # the batches of each epoch

    def bind_steps(self, steps: Sequence[int]) -> None:
        """Note the numbers of batches of the trial's epochs."""
        self._steps = steps

    def make_schedule(self, make: Callable[[Any, int], Any]) -> tuple[Any]:
        """Use the scheduler ``make(optimizer, updates)``, which steps after each update."""
        self.by_batch = True
        updates = self.count_scheduler_steps(len(self._steps))
        assert updates is not None
        self._schedulers = (make(self._optimizers[0], updates),)
        return self._schedulers

    def count_scheduler_steps(self, epochs: int) -> int | None:
        """Return how often schedulers step in the first epochs; None unless by batch or update."""
        if not self.by_batch or epochs > len(self._steps):
            return None
        counts = self._steps[:epochs]
        if not self._by_update:
            return sum(counts)
        return sum(_core.batch_count(count, self.accumulate, False) for count in counts)

    def begin_unit(self, sizes: Sequence[int]) -> None:
        """Begin a unit with the number of batches of each of its updates."""
        if self.accumulate != 1:
            self._windows = iter(sizes)
            self._window = next(self._windows, self.accumulate)

    def end_unit(self) -> None:
        """Make an update that is still pending, and step the schedulers that are due."""
        self._windows, self._window = iter(()), self.accumulate
        if self.pending:
            self.make()
            if self._by_update and self.by_batch:
                self.step_schedulers()
        self.catch_up()

    @property
    def phase(self) -> int:
        """The next batch's position in its update, and how much longer than usual the update is.

        Each phase has its own recorded program. Phase 0 is the first batch of an update of
        `accumulate` batches.
        """
        return self.pending + (self._window - self.accumulate) * 2 * self.accumulate

    def catch_up(self) -> None:
        """Step the schedulers if the previous batch has left this to the next one."""
        if self._scheduler_due:
            self.step_schedulers()

    def add(self, loss: Any, phase: int) -> None:
        """Compute a batch's gradients, and make the update if the batch is the last of it."""
        longer, pending = divmod(phase, 2 * self.accumulate)
        window = self.accumulate + longer
        if self.accumulate != 1:
            loss = loss / window
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if pending + 1 == window:
            self.make()

    def end_batch(self, phase: int) -> None:
        if self.accumulate != 1:
            self.pending = (phase % (2 * self.accumulate) + 1) % self._window
            if self.pending == 0:
                self._window = next(self._windows, self.accumulate)
        if not self.by_batch:
            return
        if self.accumulate == 1 or (self._by_update and self.pending == 0):
            self.step_schedulers()
        elif not self._by_update:
            # The unit's next batch steps the schedulers. After the unit's last batch, end_unit
            # makes a pending update first.
            self._scheduler_due = True

    def make(self) -> None:
        self.pending = 0
        scaler = self.scaler
        if self._clip_norm is not None:
            for optimizer in () if scaler is None else self._optimizers:
                scaler.unscale_(optimizer)
            self._network.clip_gradients(self._clip_norm)
        for optimizer in self._optimizers:
            if scaler is not None:
                scaler.step(optimizer)
            elif self.in_core:
                optimizer_step.make_step(optimizer)
            else:
                optimizer.step()
        if scaler is not None:
            scaler.update()
        self._network.drop_gradients()

    def step_schedulers(self) -> None:
        self._scheduler_due = False
        for scheduler in self._schedulers:
            scheduler.step()

    @property
    def may_step_ahead(self) -> bool:
        """Whether schedulers that step after each batch could as well step before the batches.

        They must count steps and nothing else, as PyTorch's do, and set numbers, not tensors, which
        a step would read before its time.
        """
        groups = optimizer_step.groups_of(self._optimizers)
        settings = (value for group in groups for key, value in group.items() if key != "params")
        return not self.by_batch or (
            self.accumulate == 1
            and all(map(_counts_steps, self._schedulers))
            and not any(isinstance(value, torch.Tensor) for value in settings)
        )

    def note_schedule(self) -> Callable[[], None]:
        """Return a function that takes schedulers and settings back to where they are now."""
        groups = optimizer_step.groups_of(self._optimizers)
        settings = [dict(group) for group in groups]
        states = [copy_deeply(scheduler.state_dict()) for scheduler in self._schedulers]

        def undo() -> None:
            for scheduler, state in zip(self._schedulers, states, strict=True):
                load_scheduler(scheduler, state)
            for group, before in zip(groups, settings, strict=True):
                group.clear()
                group.update(before)

        return undo

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Step the schedulers that step once per epoch; `metrics` are those of the epoch."""
        if self._scheduler_step == "epoch":
            self.step_schedulers()
        elif self._scheduler_step != "batch":
            value = _find_metric(self._scheduler_step, metrics)
            for scheduler in self._schedulers:
                if needs_metric(scheduler):
                    scheduler.step(value)
                else:  # would take the value for the epoch's number
                    scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the parts ``optimizer``, ``scheduler`` and ``scaler`` of a state."""
        state = collect_updates(self._optimizers, self._schedulers, self._network.names)
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        return state

    def forget_pending(self) -> None:
        """Forget a pending update and schedulers that are due, before a state is loaded."""
        self.pending, self._scheduler_due = 0, False

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_updates(self._optimizers, self._schedulers, state)
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])


def _counts_steps(scheduler: Any) -> bool:
    """Return whether a scheduler is PyTorch's, with all schedulers that it consists of."""
    inner = getattr(scheduler, "_schedulers", ())
    return type(scheduler).__module__ == lr_scheduler.__name__ and all(map(_counts_steps, inner))


def _find_metric(step: str, metrics: Mapping[str, Any]) -> float:
    name = step.partition(":")[2] or "loss"
    for key in (f"val_{name}", name, f"train_{name}"):
        if key in metrics:
            return float(metrics[key])
    raise InputError(
        f"scheduler_step={step!r} needs the metric {name!r}, but the epoch has "
        f"{', '.join(metrics) or 'none'}"
    )

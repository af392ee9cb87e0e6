"""Give workers their units, and keep the table of what each worker does.

The C scheduler decides which unit runs where. It and the executor number the workers differently:
everything else uses the executor's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import cerebro._core as _core
from cerebro.coordinator.failures import LostWorkers, Verdict
from cerebro.data import Dataset
from cerebro.data.order import EpochOrder
from cerebro.errors import WorkerError, text_of
from cerebro.executors.base import Executor, as_placing, as_queueing
from cerebro.worker import messages


def evaluation_cost(validation: Dataset | None) -> float:
    """Return the cost of a validation in trained rows: three evaluated rows cost as much as one."""
    return 0.0 if validation is None else validation.num_rows / 3


def make_schedule(
    order: EpochOrder, validation: Dataset | None, *, exclusive: bool, live_models: int | None
) -> _core.Schedule:
    """Return a scheduler that has no workers or trials yet; its shards are the parts of an epoch.

    `order` and `validation` are those of one trial. `exclusive` says whether a worker can train
    only on the shards that it holds.
    """
    # Workers that hold shards may have no GPUs. They report which models they drop.
    most = messages.MAX_LIVE_MODELS_ON_GPU if exclusive else messages.MAX_LIVE_MODELS
    return _core.Schedule(
        shards=order.part_rows,
        exclusive=exclusive,
        stagger=order.stagger,
        in_order=order.shuffle == "rows",
        eval_cost=evaluation_cost(validation),
        live_models=live_models or most,
    )


class Dispatcher:
    """The workers of a run, each with its unit in flight and at most one queued behind it."""

    def __init__(
        self, executor: Executor, context: messages.RunContext, now: Callable[[], float]
    ) -> None:
        self.executor = executor
        self._now = now
        self._places = as_placing(executor)  # None: every worker reads every shard
        self._queue = as_queueing(executor)
        self._order = context.order()
        self.schedule = make_schedule(
            self._order,
            context.views(0)[1],
            exclusive=self._places is not None,
            live_models=context.limits.live_models,
        )
        self._schedule_worker: dict[int, int] = {}
        self._executor_worker: dict[int, int] = {}
        self._in_flight: dict[int, messages.Task] = {}
        self._queued: dict[int, messages.Task] = {}
        self._begun: list[int] = []  # workers that have begun a unit since units were queued
        self._warming: set[int] = set()  # workers that are still starting and importing
        self._libraries: set[str] = set()
        self._losses = LostWorkers(context.limits.max_retries)

    def __len__(self) -> int:
        """Return the number of workers that can run units, now or once they have started."""
        return len(self._schedule_worker.keys() | self._warming)

    @property
    def is_idle(self) -> bool:
        return not self._in_flight

    @property
    def awaits_worker(self) -> bool:
        """Whether units are due and a worker will soon be ready to run them."""
        return bool(self._warming) and not self.schedule.finished

    @property
    def is_warming(self) -> bool:
        """Whether a worker imports libraries or tries a configuration."""
        return bool(self._warming)

    def next_unit(self) -> tuple[int, int, int, int, int, int] | None:
        """Return a unit that can begin: worker, trial, epoch, step, part, attempt; None: none."""
        while (command := self.schedule.next(self._now())) is not None:
            if command[0] == "run":
                _, worker, trial, epoch, step, part, attempt = command
                return self._executor_worker[worker], trial, epoch, step, part, attempt
            assert self._places is not None, "shards are shared: there is nothing to load"
            pool = self._order.pool_of_part[command[2]]
            self._places.load(self._executor_worker[command[1]], pool)
            self.update_holders()
        return None

    def submit(self, worker: int, task: messages.Task) -> None:
        self._in_flight[worker] = task
        if worker in self._warming:  # `end_warming` sends it
            return
        self._begun.append(worker)
        self.executor.submit(worker, task)

    def take_begun(self) -> Iterator[tuple[int, messages.Task]]:
        """Yield the units begun since the last call, behind which another may be queued."""
        begun, self._begun = self._begun, []
        for worker in begun:
            if worker in self._in_flight and worker not in self._queued:
                yield worker, self._in_flight[worker]

    def next_behind(self, worker: int) -> tuple[int, int, int] | None:
        """Return the unit that may be queued at a worker: epoch, step, part; None: none."""
        if self._queue is None:
            return None
        return self.schedule.next_here(self._schedule_worker[worker])

    def queue(self, worker: int, task: messages.Task) -> None:
        assert self._queue is not None
        self._queued[worker] = task
        self._queue.queue(worker, task)

    def finish(self, event: messages.UnitDone) -> messages.Task | None:
        """Note that a unit is done; return the queued one, which the worker has begun."""
        worker = event.worker
        self._losses.unit_done(worker, event.task)
        self._libraries.update(event.process.libraries)
        following = self._queued.pop(worker, None)
        if following is None:
            del self._in_flight[worker]
            self.schedule.unit_done(self._schedule_worker[worker], self._now())
        else:
            self._in_flight[worker] = following
            self._begun.append(worker)
            self.schedule.unit_continued(self._schedule_worker[worker], self._now())
        return following

    def fail(self, worker: int) -> None:
        """Note that a worker has not completed its unit, nor what was queued behind it."""
        self._drop(worker)
        self.schedule.unit_failed(self._schedule_worker[worker], self._now())

    def _drop(self, worker: int) -> messages.Task | None:
        self._queued.pop(worker, None)
        return self._in_flight.pop(worker, None)

    def cancel_units(self) -> None:
        """End the units in flight at their next batch, if the executor supports it."""
        cancel = getattr(self.executor, "cancel", None)
        if cancel is not None:
            for worker in self._in_flight.keys() - self._warming:
                cancel(worker)

    def add(self, worker: int) -> None:
        ours = self.schedule.add_worker(self._now())
        self._schedule_worker[worker] = ours
        self._executor_worker[ours] = worker
        self.update_holders()

    def expect(self, worker: int) -> None:
        """Add a worker once it has answered the task in progress, which shows that it is ready.

        Units on shards that only it holds are assigned to it at once, and sent to it then.
        """
        self._warming.add(worker)
        if self._places is not None:
            self.add(worker)

    def start(self, worker: int) -> None:
        """Use a worker that may still be starting."""
        if self._places is None:  # until it is ready, its units run on other workers
            self.warm_up(worker)
        else:  # waiting for it is faster than loading its shards elsewhere
            self.add(worker)

    def warm_up(self, worker: int) -> None:
        """Let a new worker import the libraries that units need before it gets a unit."""
        self.executor.submit(worker, messages.WarmTask(tuple(sorted(self._libraries))))
        self._warming.add(worker)

    def begin_check(self, task: messages.CheckTask) -> int | None:
        """Let an idle worker try a configuration; return the worker, None if all are busy."""
        idle = [worker for worker in self._schedule_worker if worker not in self._in_flight]
        if not idle:
            return None
        worker = idle[-1]
        ours = self._schedule_worker.pop(worker)
        del self._executor_worker[ours]
        self.schedule.remove_worker(ours, self._now())
        self.executor.submit(worker, task)
        self._warming.add(worker)
        return worker

    def count_begun(self, worker: int | None) -> int:
        """Return how many units a worker runs or has in its queue; 0 without a worker."""
        return 0 if worker is None else 1 + (worker in self._queued)

    def end_warming(self, worker: int) -> None:
        if worker not in self._warming:
            return
        self._warming.remove(worker)
        if worker not in self._schedule_worker:
            self.add(worker)
        elif (task := self._in_flight.get(worker)) is not None:
            self.submit(worker, task)

    def update_holders(self) -> None:
        """Tell the scheduler which workers have which parts, unless every worker has all."""
        holders = None if self._places is None else self._places.holders()
        if holders is None:
            return
        for part, pool in enumerate(self._order.pool_of_part):
            workers = holders[pool]
            there = [self._schedule_worker[w] for w in workers if w in self._schedule_worker]
            if there:  # else the scheduler already knows, or learns it when the worker is lost
                self.schedule.set_holders(part, there)

    def forget_live(self, worker: int, trial: int) -> None:
        self.schedule.forget_live(self._schedule_worker[worker], trial)

    def remove(self, lost: messages.WorkerLost) -> tuple[messages.Task | None, Verdict]:
        """Remove a lost worker; return the unit that it has not completed, and what follows."""
        task = self._drop(lost.worker)
        is_to_blame = lost.worker not in self._warming  # else the worker has not received the unit
        self._warming.discard(lost.worker)
        ours = self._schedule_worker.pop(lost.worker, None)
        if ours is not None:
            del self._executor_worker[ours]
            self.schedule.remove_worker(ours, self._now())
        return task, self._losses.add(lost, task if is_to_blame else None)

    def replace(self, lost: messages.WorkerLost) -> str | None:
        """Replace a lost worker; return why the run continues without it, or None."""
        cause = lost.reason
        if self._losses.may_replace:
            try:
                self.start(self.executor.replace(lost.worker))
                return None
            except WorkerError as error:
                cause = text_of(error)
        if not self._schedule_worker and not self._warming:
            raise WorkerError(f"no worker process is left, and none can be started: {cause}")
        return f"a worker process is missing from now on: {cause}"

"""Implement `cerebro.plan`: estimate the cost of a search before anything trains.

The searcher, the search loop and the scheduler are the real ones; only the clock and the metrics
are simulated (each trial has a constant metric). Searchers that do not stop trials, and those with
exact halving, train the same number of epochs whatever the metrics are. For all other searchers the
plan is an example.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import cerebro._core as _core
from cerebro.api.lanes import describe_lanes
from cerebro.api.settings import devices_of, idle_advice
from cerebro.arguments import check_optional_real, check_whole_number, worker_count
from cerebro.coordinator.dispatcher import evaluation_cost, make_schedule
from cerebro.coordinator.simulated_trials import SimulatedSearch
from cerebro.data.given_rows import is_rows, write_given_rows
from cerebro.data.order import EpochOrder, Shuffle, resolve_shuffle
from cerebro.data.validation import Validation, make_validation
from cerebro.errors import shorten_tracebacks
from cerebro.executors.seats import SeatedShards, count_kept_bytes, place_pools
from cerebro.executors.simulated import SimulatedRun, Simulation
from cerebro.machine.devices import CPU, are_gpus, assign_devices, memory_of
from cerebro.report.format import duration, size
from cerebro.run.records import Ranking
from cerebro.run.settings import MAX_SEED, Batches, Exactness, Limits, SearchSettings, Strategy
from cerebro.searchers import make_searcher
from cerebro.searchers.base import Searcher
from cerebro.searchers.metrics import metric_mode
from cerebro.space import as_space


@dataclass(frozen=True)
class Plan:
    """The estimated cost of a search; see `plan`.

    Attributes
    ----------
    trials
        The number of trials started; with folds, of configurations.
    epochs
        The number of epochs trained, over all trials.
    units
        The number of units run. A unit is one pass of one trial over one part of an epoch, or a
        validation.
    rows
        The number of rows trained and validated on.
    bytes_on_disk
        The size of the data, which is stored once, for any number of trials.
    bytes_read
        The number of bytes of rows that the loader reads.
    makespan
        The duration in seconds, given `rows_per_second`; else None.
    passes
        The makespan, measured in passes of one worker over the training rows.
    idle_share
        The share of the workers' time without a unit, 0 to 1.
    first_result
        The time at which the first trial ends, as a share of the makespan.
    max_live
        The largest number of trials that are live at the same time; each fold counts.
    workers
        The number of workers: of processes on the CPU, of lanes on GPUs.
    folds
        The number of folds of each trial, or None.
    devices
        Where models are trained: the CPU, or the names of GPUs.
    device_bytes
        The memory of the smallest GPU, in bytes; 0 on the CPU.
    resident_bytes
        The most memory that data takes on a GPU, in bytes; the rest is for models.
    threads
        The number of compute threads of each worker.
    """

    trials: int
    epochs: int
    units: int
    rows: int
    bytes_on_disk: int
    bytes_read: int
    makespan: float | None
    passes: float
    idle_share: float
    first_result: float
    max_live: int
    workers: int
    folds: int | None = None
    devices: tuple[str, ...] = (CPU,)
    device_bytes: int = 0
    resident_bytes: int = 0
    threads: int = 1

    def __str__(self) -> str:
        passes = f"{self.passes:.4g} passes over the training data"
        time = passes if self.makespan is None else duration(self.makespan)
        folds = "" if self.folds is None else f" in {self.folds} folds each"
        advice = idle_advice(
            self.max_live, self.workers, self.threads, folds=self.folds, devices=self.devices
        )
        lines = [
            f"trials      {self.trials}{folds}, at most {self.max_live} begun at a time",
            f"epochs      {self.epochs} over all trials, {self.units} units",
            f"data        {size(self.bytes_on_disk)} on disk, once; "
            f"{size(self.bytes_read)} of rows through the loader",
            f"makespan    {time} with {self.workers} worker(s)",
            f"first trial ends at {self.first_result:.0%} of it",
            f"idle        {self.idle_share:.1%} of the workers' time",
        ]
        if are_gpus(self.devices):
            memory = f"{size(self.resident_bytes)} of data in {size(self.device_bytes)} of memory"
            lanes = describe_lanes(self.workers, self.devices) or "a lane for each"
            lines.insert(3, f"gpus        {', '.join(self.devices)}; {lanes}; {memory} at most")
        if advice:
            lines.append(f"advice      {advice}")
        return "\n".join(lines)


@shorten_tracebacks
def plan(
    space: Any,
    data: Any,
    *,
    epochs: int,
    n_trials: int | None = None,
    validation: Any = None,
    searcher: str | Searcher = "random",
    metric: str = "loss",
    mode: Literal["min", "max"] | None = None,
    points: Sequence[Mapping[str, Any]] = (),
    width: int | None = None,
    workers: int | None = None,
    threads: int = 1,
    seed: int = 0,
    stagger: bool = True,
    live_models: int | None = None,
    rows_per_second: float | None = None,
    devices: Any = "auto",
    workers_per_device: int | None = None,
    shuffle: Shuffle | None = None,
) -> Plan:
    """Estimate the cost of a search by running its searcher and scheduler on a simulated clock.

    Parameters
    ----------
    rows_per_second
        Rows that one worker trains per second (a run's progress shows it). If not given, printing
        shows the makespan in passes over the training data.
    space, data, epochs, n_trials, validation, searcher, metric, mode, points, width, workers, \
threads, seed, shuffle, stagger, live_models, devices, workers_per_device
        As for `cerebro.search`. A plan builds no model: for a ``cpu_only`` model give
        ``devices="cpu"``, and give `workers_per_device` where a search would choose several lanes
        for each GPU, as `cerebro.check` shows.

    Returns
    -------
    Plan
        Trials, units, bytes, makespan and idle share; print it to see them.

    Raises
    ------
    InputError
        If an argument is invalid, as for `cerebro.search`, or the searcher never ends.
    """
    arguments = dict(locals())
    if is_rows(data) or is_rows(validation):
        with tempfile.TemporaryDirectory(prefix="cerebro-rows-") as folder:
            data, validation = write_given_rows(data, validation, Path(folder))
            return plan(**arguments | {"data": data, "validation": validation})
    views = make_validation(data, validation)
    the_threads = check_whole_number("threads", threads, 1)
    the_devices = devices_of(devices, workers_per_device, None)
    count = max(1, worker_count(workers, the_threads, the_devices, workers_per_device))
    rows_per_second = check_optional_real("rows_per_second", rows_per_second, above=0)
    the_searcher = make_searcher(searcher)
    settings = SearchSettings(
        ranking=Ranking(metric, metric_mode(metric, mode), "best"),
        strategy=Strategy(
            searcher_name=type(the_searcher).__name__,
            width=check_whole_number("width", 8 if width is None else width, 1),
            points=tuple(points),
        ),
        limits=Limits(
            epochs=check_whole_number("epochs", epochs, 1),
            n_trials=check_whole_number("n_trials", n_trials, 1, optional=True),
            live_models=live_models,
        ),
        batches=Batches(
            shuffle=resolve_shuffle(shuffle, views.train, stagger=stagger), stagger=stagger
        ),
        exactness=Exactness(
            seed=check_whole_number("seed", seed, 0, MAX_SEED), threads=the_threads
        ),
    )
    train, validation = views.get_views(0)
    order = settings.batches.make_order(train, settings.exactness.seed)
    places, resident = SeatedShards(), 0
    if are_gpus(the_devices):
        seated = assign_devices(the_devices, count)
        data = (views.train, views.held_out, seated)
        places = place_pools(*data, order=order)
        resident = count_kept_bytes(*data, dealt=places.stay)
    search = SimulatedSearch(the_searcher, as_space(space), settings)
    speed = rows_per_second or train.num_rows
    run = _PlannedRun(search, views, order, 1.0 / speed, live_models, places)
    for _ in range(count):
        run.join()
    simulation = run.run_to_end()
    rows = bytes_read = 0
    for unit in simulation.units:
        trained, held_out = views.get_views(unit.trial)
        if unit.step == 0:  # an epoch begins, in which all rows are trained on
            rows += trained.num_rows
            bytes_read += trained.nbytes
        if unit.shard < 0 and held_out is not None:
            rows += held_out.num_rows
            bytes_read += held_out.nbytes
    on_disk = train.nbytes + (0 if validation is None else validation.nbytes)
    trials, makespan = search.end(), simulation.makespan
    return Plan(
        trials=len(trials),
        epochs=sum(len(trial.values) for trial in trials),
        units=len(simulation.units),
        rows=rows,
        bytes_on_disk=on_disk if views.folds is None else views.train.nbytes,
        bytes_read=bytes_read,
        makespan=None if rows_per_second is None else makespan,
        passes=makespan * speed / max(1, train.num_rows),
        idle_share=simulation.idle_share,
        first_result=simulation.first_result / makespan if makespan > 0 else math.nan,
        max_live=simulation.max_live,
        workers=count,
        folds=None if views.folds is None else len(views.folds),
        devices=the_devices,
        device_bytes=memory_of(the_devices) if are_gpus(the_devices) else 0,
        resident_bytes=resident,
        threads=the_threads,
    )


class _PlannedRun(SimulatedRun):
    """A simulated run that trains the trials of a simulated search."""

    def __init__(
        self,
        search: SimulatedSearch,
        views: Validation,
        order: EpochOrder,
        cost: float,
        live_models: int | None,
        places: SeatedShards,
    ) -> None:
        _, validation = views.get_views(0)
        schedule = make_schedule(order, validation, exclusive=places.stay, live_models=live_models)
        super().__init__(schedule, order.part_rows, evaluation_cost(validation), cost)
        self._search = search
        self._order = order
        self._places = places
        self._each = 1 if views.folds is None else len(views.folds)
        self._done: Counter[int] = Counter()  # by configuration: folds that have finished the epoch

    def run_to_end(self) -> Simulation:
        # All workers have joined: tell the scheduler which of them hold which shards.
        holders = self._places.holders({worker: worker for worker in range(self.workers)})
        if holders is not None:
            for part, pool in enumerate(self._order.pool_of_part):
                self.schedule.set_holders(part, holders[pool])
        self._begin(self._search.take_ready())
        return super().run_to_end()

    def end_trial(self, trial: int) -> None:
        """Report a configuration's epoch once all folds have trained it; continue the search."""
        whole = trial // self._each
        self._done[whole] += 1
        if self._done[whole] < self._each:
            return
        del self._done[whole]
        (level,) = _core.random_doubles(1, self._order.seed, "search", whole)
        self._search.add_value(whole, level)
        self._begin(self._search.take_ready())
        if self._search.record_of(whole).status != "running":
            for fold in self._folds(whole):
                super().end_trial(fold)

    def _folds(self, whole: int) -> range:
        return range(whole * self._each, (whole + 1) * self._each)

    def _begin(self, trials: Sequence[int]) -> None:
        for number in (fold for whole in trials for fold in self._folds(whole)):
            done = self._search.record_of(number // self._each).done
            if number in self.epochs:
                self.schedule.extend_trial(number, done + 1)
            else:
                self.schedule.add_trial(number, epochs=done + 1, epoch=done)
            self.epochs[number] = done + 1
            self.unfinished.add(number)

"""The papers' own table, simulated with unit costs as published, and at more workers.

ImageNet on 8 workers, 16 configurations (VGG16 and ResNet50), 10 epochs. Costs are those of
"Cerebro-DS" (8 nodes): in one epoch a worker trains 2.11 h and spends 0.0018 h on hops, that is
16 units of 0.132 h. It does not give the costs of the two networks apart, so all units are equal.
Cerebro's schedule is that of the real scheduler on a simulated clock; the papers' schedule takes a
random unit whose trial and worker are free. Storage and network follow the papers' formulas (VLDB
2020, with its errata).
"""

from __future__ import annotations

import heapq
import math
import random
from typing import Any

from cerebro import _core
from cerebro.executors.simulated import SimulatedRun

TRAIN_HOURS, HOP_HOURS, CONFIGS, WORKERS, EPOCHS = 2.11, 0.0018, 16, 8, 10
UNIT = (TRAIN_HOURS + HOP_HOURS) / CONFIGS  # hours, one configuration on one of 8 shards
DATA = 250.0  # GB
MODEL = (0.792 + 0.293) / 2  # GB: checkpoints of VGG16 and ResNet50
BATCHES = 1_281_167 // 256  # of an epoch
RANDOM_WORKERS = 100  # at most: the random rule is simulated in Python
PUBLISHED = {  # hours of an epoch, GPU use in %, GB stored: VLDB 2020, table 4
    "parameter server, async": (19.00, 8.6, 250),
    "Horovod": (5.42, 92.1, 250),
    "model averaging": (1.97, 72.1, 250),
    "task-parallel (Celery)": (1.72, 82.4, 2000),
    "MOP": (1.77, 79.8, 250),
}


def cerebro_hours(configs: int, workers: int, epochs: int, unit: float) -> float:
    """Return the makespan of the real scheduler; each worker has one shard."""
    schedule = _core.Schedule(
        shards=[1.0] * workers,
        exclusive=True,
        stagger=True,
        eval_cost=0.0,
        live_models=max(8, 2 * workers),
        capacity=configs,
    )
    run = SimulatedRun(schedule, [1.0] * workers, cost=unit)
    for _ in range(workers):
        run.join()
    for trial in range(configs):
        run.epochs[trial] = epochs
        run.unfinished.add(trial)
        schedule.add_trial(trial, epochs=epochs)
    return run.run_to_end().makespan


def random_hours(configs: int, workers: int, epochs: int, unit: float, seed: int = 0) -> float:
    """Return the makespan of the papers' rule; epochs of a trial follow each other."""
    choose = random.Random(seed).choice
    left = {trial: set(range(workers)) for trial in range(configs)}
    done = dict.fromkeys(left, 0)
    idle, ready = set(range(workers)), set(left)
    running: list[tuple[float, int, int]] = []
    now = 0.0
    while left:
        for worker in sorted(idle):
            free = [trial for trial in sorted(ready) if worker in left[trial]]
            if free:
                trial = choose(free)
                idle.remove(worker)
                ready.remove(trial)
                heapq.heappush(running, (now + unit, worker, trial))
        now, worker, trial = heapq.heappop(running)
        idle.add(worker)
        left[trial].remove(worker)
        if not left[trial]:
            done[trial] += 1
            left[trial] = set(range(workers))
        if done[trial] == epochs:
            del left[trial]
        else:
            ready.add(trial)
    return now


def network(configs: int, workers: int, epochs: int) -> dict[str, float]:
    """Return the GB that each approach moves, by the papers' formulas."""
    models = epochs * MODEL * configs
    return {
        "parameter server, async": 2 * models * BATCHES,
        "Horovod": 2 * models * BATCHES * (workers - 1) / workers,
        "model averaging": 2 * models * workers,
        "task-parallel (Celery)": workers * DATA,
        "MOP": models * workers + MODEL * configs,
    }


def schedules(configs: int, workers: int, epochs: int) -> dict[str, Any]:
    """Return hours and idle shares of the schedules that train whole units."""
    unit = UNIT * WORKERS / workers  # a shard has fewer rows where there are more workers
    work = configs * epochs * workers * unit
    hours = {
        "Cerebro": cerebro_hours(configs, workers, epochs, unit),
        "task-parallel (Celery)": math.ceil(configs / workers) * epochs * workers * unit,
    }
    if workers <= RANDOM_WORKERS:
        hours["MOP"] = random_hours(configs, workers, epochs, unit)
    bound = max(work / workers, epochs * workers * unit)
    return {
        "configs": configs,
        "workers": workers,
        "epochs": epochs,
        "bound": round(bound, 3),
        "hours": {name: round(value, 3) for name, value in hours.items()},
        "idle": {name: round(1 - work / (workers * value), 4) for name, value in hours.items()},
        "network": {
            name: round(value, 1) for name, value in network(configs, workers, epochs).items()
        },
    }


def table(many: bool = False) -> list[dict[str, Any]]:
    """Return the paper's case, and what more workers make of it; `many` takes minutes."""
    cases = [(CONFIGS, WORKERS, EPOCHS), (CONFIGS, 100, 1), (200, 100, 1), (CONFIGS, 1000, 1)]
    return [schedules(*case) for case in (*cases, *([(2000, 1000, 1)] if many else []))]

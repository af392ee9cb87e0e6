"""PyTorch's DistributedDataParallel over gloo, one configuration after the other.

docs.pytorch.org, "Getting Started with Distributed Data Parallel" and "Fault-tolerant Distributed
Training with torchrun": gradients are averaged by ring all-reduce, as in Horovod; the processes
start once, a snapshot follows every epoch, and torchrun's elastic agent restarts the group. A
process trains half of every batch, so that batches are as large as the others'.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import distributed
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comparison.rivals.one_thread import one_thread
from benchmarks.comparison.training import Trial, Work


def train(work: Work) -> None:
    one_thread()
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    snapshot = Path(work.place, "snapshot")
    start, epoch, state = 0, 0, None
    if snapshot.exists():
        saved = torch.load(snapshot)
        start, epoch, state = saved["trial"], saved["epoch"] + 1, saved["state"]
    for number in range(start, work.trials):
        trial = Trial(work, number, rank, ranks)
        if state:
            trial.load(state)
        wrapped = DistributedDataParallel(trial.net, gradient_as_bucket_view=True)
        for each in range(epoch, work.epochs):
            if rank == 0:
                work.began(number, each)
            trial.train(each, wrapped)
            if rank == 0:
                work.trained(number, each, trial.score())
                saved = {"trial": number, "epoch": each, "state": trial.state()}
                torch.save(saved, snapshot.with_suffix(".new"))
                snapshot.with_suffix(".new").rename(snapshot)
        if rank == 0:
            work.finished(number, trial.net)
        epoch, state = 0, None
    distributed.destroy_process_group()


def run(work: Work) -> None:
    """Train every configuration."""
    launch = LaunchConfig(
        1, 1, work.workers, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", max_restarts=3
    )
    elastic_launch(launch, train)(work)

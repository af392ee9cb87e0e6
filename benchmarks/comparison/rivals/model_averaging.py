"""Model averaging, one configuration after the other: the papers' bulk-synchronous training.

Every worker trains a copy of the model on its part of the rows; after each epoch the copies are
averaged, as Spark's and TensorFlow's per-epoch averaging does. The average is an all-reduce over
gloo, PyTorch's ``model_averaging`` utilities' way ("average_parameters").
"""

from __future__ import annotations

import torch
from torch import distributed, multiprocessing
from torch.distributed.algorithms.model_averaging.utils import average_parameters

from benchmarks.comparison.rivals.one_thread import one_thread
from benchmarks.comparison.training import Trial, Work
from benchmarks.peers import free_port


def train(rank: int, work: Work, port: int) -> None:
    one_thread()
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", address, rank=rank, world_size=work.workers)
    for number in range(work.trials):
        trial = Trial(work, number, rank, work.workers)
        trial.batch = work.workload.batch  # a worker's own steps, with whole batches
        for epoch in range(work.epochs):
            if rank == 0:
                work.began(number, epoch)
            trial.train(epoch)
            with torch.no_grad():
                average_parameters(iter(trial.net.parameters()), distributed.group.WORLD)
            if rank == 0:
                work.trained(number, epoch, trial.score())
        if rank == 0:
            work.finished(number, trial.net)
    distributed.barrier()  # a process that leaves early may crash the other one
    distributed.destroy_process_group()


def run(work: Work) -> None:
    """Train every configuration."""
    multiprocessing.spawn(train, (work, free_port()), nprocs=work.workers)

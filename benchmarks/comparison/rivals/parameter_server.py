"""A parameter server over ``torch.distributed.rpc``, one configuration after the other.

docs.pytorch.org, "Implementing Batch RPC Processing Using Asynchronous Executions" (synchronous:
the server waits for every trainer's gradients, averages them, and answers all with the new
weights) and the same without waiting (asynchronous). Trainers and server share two cores.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch
from torch import multiprocessing
from torch.distributed import rpc
from torch.nn.functional import cross_entropy

from benchmarks.comparison.rivals.one_thread import one_thread
from benchmarks.comparison.training import Trial, Work, state_bytes
from benchmarks.peers import free_port

Tensors = list[torch.Tensor]


class Server:
    """Holds a configuration's weights and optimizer."""

    def __init__(self, work: Work, number: int, waits: bool) -> None:
        self.trial = Trial(work, number)
        self.waits, self.wanted = waits, work.workers
        self.lock = threading.Lock()
        self.future: Any = torch.futures.Future()
        self.given: list[Tensors] = []

    def weights(self) -> Tensors:
        return [value.detach().clone() for value in self.trial.net.parameters()]

    @staticmethod
    @rpc.functions.async_execution
    def update(server: Any, gradients: Tensors) -> Any:
        """Take a trainer's gradients; answer with the weights after the step."""
        self = server.local_value()
        with self.lock:
            self.given.append(gradients)
            future = self.future
            if not self.waits or len(self.given) == self.wanted:
                parameters = list(self.trial.net.parameters())
                for parameter, *parts in zip(parameters, *self.given, strict=True):
                    parameter.grad = sum(parts[1:], parts[0]) / len(parts)
                self.trial.optimizer.step()
                self.given, self.future = [], torch.futures.Future()
                future.set_result(self.weights())
            return future


def first_weights(server: Any) -> Tensors:
    return server.local_value().weights()


def score(server: Any, epoch: int) -> None:
    """Report an epoch."""
    trial = server.local_value().trial
    trial.work.trained(trial.number, epoch, trial.score())


def finish(server: Any) -> None:
    trial = server.local_value().trial
    trial.work.finished(trial.number, trial.net)


def train(work: Work, worker: int, number: int, epoch: int, server: Any) -> None:
    """Train a worker's part of an epoch."""
    one_thread()
    trial = Trial(work, number, worker, work.workers)
    if worker == 0:
        work.began(number, epoch)
    parameters = list(trial.net.parameters())
    fresh = rpc.rpc_sync(server.owner(), first_weights, (server,))
    for x, y in trial.batches(epoch):
        with torch.no_grad():
            for parameter, value in zip(parameters, fresh, strict=True):
                parameter.copy_(value)
        trial.net.train()
        trial.net.zero_grad()
        cross_entropy(trial.net(x), y).backward()
        gradients = [parameter.grad for parameter in parameters]
        fresh = rpc.rpc_sync(server.owner(), Server.update, (server, gradients))


def serve(rank: int, work: Work, port: int, waits: bool) -> None:
    one_thread()
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", num_worker_threads=8, rpc_timeout=600
    )
    name = f"trainer {rank}" if rank < work.workers else "server"
    rpc.init_rpc(name.replace(" ", ""), rank=rank, world_size=work.workers + 1,
                 rpc_backend_options=options)  # fmt: skip
    if name == "server":
        for number in range(work.trials):
            server = rpc.remote("server", Server, (work, number, waits))
            for epoch in range(work.epochs):
                both = [
                    rpc.rpc_async(f"trainer{each}", train, (work, each, number, epoch, server))
                    for each in range(work.workers)
                ]
                for future in both:
                    future.wait()
                score(server, epoch)
            finish(server)
            trial = server.local_value().trial
            batches = -(-len(trial.x) // work.workers // (trial.batch // work.workers))
            steps = batches * work.epochs * work.workers
            work.moved(2 * steps * state_bytes(trial.net))  # gradients there, weights back
        work.ended()
    rpc.shutdown()


def run(work: Work, waits: bool = True) -> None:
    """Train every configuration."""
    count = work.workers + 1
    multiprocessing.spawn(serve, (work, free_port(), waits), nprocs=count)


run_asynchronous = partial(run, waits=False)

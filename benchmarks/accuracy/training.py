"""The loop that trains a task, over the batches of PyTorch's DataLoader or over Cerebro's.

Both loops are the same code and start from the same weights; only the order of the rows and the
sizes of the batches differ. `prove` shows that Cerebro's search trains what the loop trains.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import cerebro
from benchmarks.accuracy.tasks import Rows, Task

Batch = dict[str, torch.Tensor]
ORDERS_FROM = 1_000_000  # the first seed of the reference's orders
CHUNK = 4_096  # rows validated at a time


class Reference:
    """The batches of ``DataLoader(rows, batch, shuffle=True)``; iterating again is the next epoch.

    A batch is indexed at once, not row by row, which gives the same rows: see `check_reference`.
    """

    def __init__(self, rows: Rows, batch: int, seed: int) -> None:
        dataset = TensorDataset(torch.from_numpy(rows.x), torch.from_numpy(rows.y))
        # Another stream than that of the initial weights.
        generator = torch.Generator().manual_seed(ORDERS_FROM + seed)
        sampler = RandomSampler(dataset, generator=generator)
        self._loader: Any = DataLoader(
            dataset,
            sampler=BatchSampler(sampler, batch, drop_last=False),
            batch_size=None,
            generator=generator,
        )

    def __iter__(self) -> Iterator[Batch]:
        return ({"x": x, "y": y} for x, y in self._loader)


def check_reference(rows: Rows, batch: int) -> None:
    """Exit unless two epochs of the reference are those of the DataLoader that users write."""
    dataset = TensorDataset(torch.from_numpy(rows.x), torch.from_numpy(rows.y))
    loader: Any = DataLoader(
        dataset, batch, shuffle=True, generator=torch.Generator().manual_seed(ORDERS_FROM + 1)
    )
    ours = Reference(rows, batch, 1)
    for _ in range(2):
        for (x, y), mine in zip(loader, ours, strict=True):
            if not (torch.equal(x, mine["x"]) and torch.equal(y, mine["y"])):
                raise SystemExit("the reference's batches are not DataLoader's")


def train(
    task: Task, rows: Rows, seed: int, epochs: int, batches: Iterable[Batch]
) -> tuple[torch.nn.Module, list[float]]:
    """Train a seed's network; return it and the accuracy after each epoch, in points."""
    net, optimizer = task.start(seed)
    scores = []
    for _ in range(epochs):
        net.train()
        for batch in batches:
            loss = cross_entropy(net(batch["x"]), batch["y"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scores.append(score(net, rows))
    return net, scores


@torch.no_grad()
def score(net: torch.nn.Module, rows: Rows) -> float:
    """Return the accuracy on the validation rows, in points."""
    net.eval()
    x, y = torch.from_numpy(rows.valid_x), torch.from_numpy(rows.valid_y)
    right = sum(
        int((net(inputs).argmax(1) == target).sum())
        for inputs, target in zip(x.split(CHUNK), y.split(CHUNK), strict=True)
    )
    return 100 * right / len(y)


def written(rows: Rows, shards: int, seed: int, folder: str) -> cerebro.Dataset:
    """Write the training rows; each seed deals them to the shards anew."""
    return cerebro.shard(
        {"x": rows.x, "y": rows.y}, Path(folder, "rows"), shards=shards, seed=seed, progress=False
    )


def ours(data: cerebro.Dataset, batch: int, seed: int, order: str) -> Iterable[Batch]:
    """Return Cerebro's batches; iterating again is the next epoch."""
    return data.batches(batch, seed=seed, shuffle=order, threads=0)


def through_cerebro(
    task: Task, rows: Rows, seed: int, epochs: int, *, order: str, shards: int
) -> list[float]:
    """Train a seed's network over Cerebro's batches; return the accuracy after each epoch."""
    with tempfile.TemporaryDirectory() as folder:
        data = written(rows, shards, seed, folder)
        return train(task, rows, seed, epochs, ours(data, task.batch, seed, order))[1]


def prove(task: Task, rows: Rows, epochs: int, *, order: str, shards: int) -> None:
    """Exit unless a search trains what the loop over `Dataset.batches` trains, bit for bit."""
    seed = 0
    first = cerebro.trial_seed(seed, 0)  # what a trial's generators are seeded with

    def build(config: dict[str, Any]) -> cerebro.torch.Model:
        net, optimizer = task.start(first)
        return cerebro.torch.Model(net, optimizer=optimizer, loss=cross_entropy)

    with tempfile.TemporaryDirectory() as folder:
        data = written(rows, shards, seed, folder)
        net, _ = train(task, rows, first, epochs, ours(data, task.batch, seed, order))
        trial = cerebro.search(
            *(build, {"order": [order]}, data),
            epochs=epochs,
            validation=(rows.valid_x[:256], rows.valid_y[:256]),
            n_trials=1,
            batch_size=task.batch,
            workers=0,
            devices="cpu",
            seed=seed,
            shuffle=order,
            run=Path(folder, "run"),
            progress=False,
        ).trials[0]
        trained = trial.load(epoch="last", build=build).net.state_dict()
    expected = net.state_dict()
    if trained.keys() != expected.keys() or not all(
        torch.equal(value, trained[name]) for name, value in expected.items()
    ):
        raise SystemExit(f"{task.what}, {order}: a search trains other weights than the loop")

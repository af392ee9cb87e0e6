"""Random networks, losses, optimizers, schedules and data, each trained in four ways.

A case is trained by a plain PyTorch loop and by `cerebro.torch.Model` with ``graph=False``, None
and True. All must give the same losses, metrics and states, bit for bit.

    python tests/unit/torch/step_cases.py --cases 5000 --first 0
"""

from __future__ import annotations

import argparse
import collections
import copy
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import cerebro
from cerebro.machine import generators
from cerebro.worker.evaluate import RecordedStepDiffers, replay_recorded_steps

UNITS, BATCHES = 2, 9


# --- networks --------------------------------------------------------------------


class Prod(nn.Module):
    """A product over groups of features; zeros in the data give its gradient another formula."""

    def forward(self, x: Any) -> Any:
        return x.unflatten(1, (-1, 2)).prod(2)


class Filled(nn.Module):
    """Replaces rare values by a learned one."""

    def __init__(self) -> None:
        super().__init__()
        self.fill = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Any) -> Any:
        return x.masked_fill(x == 0, self.fill)


class Extremes(nn.Module):
    """Adds a statistic of each row, whose gradient goes to one of equal values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Any) -> Any:
        if self.kind == "whole":
            return x + 0.1 * x.max()
        if self.kind == "median":
            return x + x.median(1, keepdim=True).values
        if self.kind == "sort":
            return x.sort(1).values
        if self.kind == "norm":
            return x / (x.norm(dim=1, keepdim=True) + 1)
        return x + getattr(x, self.kind)(1, keepdim=True)


class Recurrent(nn.Module):
    def __init__(self, kind: Any, size: int) -> None:
        super().__init__()
        self.cell = kind(size, size, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.cell(x.unsqueeze(1).expand(-1, 3, -1))[0][:, -1]


class Attention(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(size, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        row = x.unsqueeze(1).expand(-1, 3, -1)
        return self.attention(row, row, row, need_weights=False)[0].mean(1)


class Images(nn.Module):
    """Takes 16 features as an image of 4 x 4."""

    def __init__(self, pick: random.Random, size: int) -> None:
        super().__init__()
        norm = pick.choice([nn.Identity(), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)])
        pool = pick.choice([nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2)])
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=pick.random() < 0.7), norm, nn.ReLU(), pool,
            nn.Flatten(), nn.Linear(16, size),
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        return self.layers(x.view(-1, 1, 4, 4))


class Words(nn.Module):
    """Takes the features as indices of words, some of them padding."""

    def __init__(self, pick: random.Random, size: int) -> None:
        super().__init__()
        if pick.random() < 0.5:
            self.table: Any = nn.Embedding(12, size, padding_idx=pick.choice([None, 0]))
        else:
            self.table = nn.EmbeddingBag(12, size, mode=pick.choice(["sum", "mean"]))

    def forward(self, x: Any) -> Any:
        words = (x.abs() * 4).long().clamp(0, 11)
        found = self.table(words)
        return found if isinstance(self.table, nn.EmbeddingBag) else found.sum(1)


class Residual(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Any) -> Any:
        return x + F.gelu(self.linear(x))


class Normed(nn.Module):
    """Has a weight that is computed in each step."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(size, size))

    def forward(self, x: Any) -> Any:
        return self.linear(x)


def layer(pick: random.Random, size: int) -> Any:
    """Return a layer from `size` features to `size` features."""
    makers: list[Callable[[], Any]] = [
        lambda: nn.Linear(size, size, bias=pick.random() < 0.8),
        lambda: pick.choice([nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.ELU, nn.Sigmoid])(),
        lambda: pick.choice([nn.LeakyReLU, nn.Hardtanh, nn.Softplus, nn.Mish, nn.PReLU])(),
        lambda: pick.choice([nn.BatchNorm1d, nn.LayerNorm])(size),
        lambda: nn.Dropout(pick.choice([0.1, 0.5])),
        lambda: nn.Softmax(dim=1),
        lambda: nn.Sequential(Prod(), nn.Linear(size // 2, size)),
        Filled,
        lambda: Extremes(pick.choice(
            ["amax", "amin", "logsumexp", "sum", "mean", "std", "whole", "median", "sort", "norm"]
        )),
        lambda: Recurrent(pick.choice([nn.GRU, nn.LSTM, nn.RNN]), size),
        lambda: Attention(size),
        lambda: Residual(size),
        lambda: Normed(size),
        lambda: nn.Unflatten(1, (1, size)),
    ]  # fmt: skip
    made = pick.choice(makers)()
    if isinstance(made, nn.Unflatten):
        return nn.Sequential(made, nn.Conv1d(1, 2, 3, padding=1), nn.Flatten(),
                             nn.Linear(2 * size, size))  # fmt: skip
    return made


def network(pick: random.Random, outputs: int) -> Any:
    """Return a network from 16 features."""
    size = pick.choice([4, 6, 8])
    first = pick.choice(
        [nn.Linear(16, size)] * 5
        + [Images(pick, size), Words(pick, size), nn.Sequential(Filled(), nn.Linear(16, size))]
    )
    layers = [layer(pick, size) for _ in range(pick.randint(0, 4))]
    return nn.Sequential(first, *layers, nn.Linear(size, outputs))


# --- losses ----------------------------------------------------------------------


def loss_of(pick: random.Random) -> tuple[Any, str, int]:
    """Return a loss, the kind of its target, and the number of outputs that it takes."""
    kind = pick.choice(["classes", "classes", "classes", "binary", "numbers", "numbers", "shares"])
    if kind == "classes":
        weight = torch.tensor([0.5, 1.0, 2.5]) if pick.random() < 0.4 else None
        loss = nn.CrossEntropyLoss(
            weight=weight,
            ignore_index=pick.choice([-100, 0]),
            label_smoothing=pick.choice([0.0, 0.0, 0.1]),
            reduction=pick.choice(["mean", "mean", "sum"]),
        )
        return loss, kind, 3
    if kind == "binary":
        weight = pick.choice([None, torch.tensor([2.0])])
        return nn.BCEWithLogitsLoss(pos_weight=weight), kind, 1
    if kind == "shares":
        return nn.CrossEntropyLoss(label_smoothing=pick.choice([0.0, 0.2])), kind, 3
    made = pick.choice([nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.SoftMarginLoss])
    return made(reduction=pick.choice(["mean", "mean", "sum"])), kind, 1


# --- optimizers and schedules ------------------------------------------------------


def optimizer_of(pick: random.Random, parameters: list[Any]) -> Any:
    lr = pick.choice([0.3, 0.01, 0.001])
    decay = pick.choice([0.0, 0.0, 0.01])
    groups: Any = parameters
    if len(parameters) > 2 and pick.random() < 0.3:
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": lr / 3}]
    kind = pick.choice(["sgd", "sgd", "adam", "adam", "adamw", "adamw", "other"])
    if kind == "sgd":
        momentum = pick.choice([0.0, 0.9])
        nesterov = momentum > 0 and pick.random() < 0.4
        return torch.optim.SGD(
            groups, lr=lr / 10, momentum=momentum, weight_decay=decay, nesterov=nesterov,
            dampening=0.0 if nesterov or not momentum else pick.choice([0.0, 0.1]),
            maximize=pick.random() < 0.1, foreach=pick.choice([None, None, None, True]),
        )  # fmt: skip
    if kind in ("adam", "adamw"):
        made = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
        return made(
            groups, lr=lr / 10, weight_decay=decay, betas=pick.choice([(0.9, 0.999), (0.4, 0.9)]),
            eps=pick.choice([1e-8, 1e-3]), amsgrad=pick.random() < 0.15,
            foreach=pick.choice([None, None, None, None, True]),
        )  # fmt: skip
    made = pick.choice([torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam])
    return made(groups, lr=lr / 10)


def scheduler_of(pick: random.Random, optimizer: Any) -> tuple[Any, str]:
    schedulers = torch.optim.lr_scheduler
    kind = pick.choice(["none", "none", "step", "cosine", "one cycle", "warmup"])
    when = pick.choice(["batch", "epoch"])
    if kind == "step":
        return schedulers.StepLR(optimizer, 2, 0.5), when
    if kind == "cosine":
        return schedulers.CosineAnnealingLR(optimizer, UNITS * BATCHES), when
    if kind == "one cycle" and type(optimizer) is torch.optim.SGD:
        momentum = optimizer.param_groups[0]["momentum"] > 0
        total = UNITS * BATCHES + 1
        return schedulers.OneCycleLR(optimizer, 0.1, total, cycle_momentum=momentum), "batch"
    if kind == "warmup":
        return schedulers.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 5)), when
    return None, when


# --- data --------------------------------------------------------------------------


def data_of(pick: random.Random, seed: int, kind: str, rows: int) -> list[dict[str, Any]]:
    """Return the batches of all units, with zeros, large and tiny numbers in few of the rows."""
    rng = np.random.default_rng(seed)
    odd = pick.choice([0.0, 0.002, 0.02, 0.2])
    special = np.float32(pick.choice([[0.0], [0.0, -0.0, 1e4], [1e-30, 1e-42, 0.0], [100.0, 1.0]]))
    batches = []
    for _ in range(UNITS * BATCHES):
        x = rng.normal(size=(rows, 16)).astype(np.float32)
        where = rng.random(x.shape) < odd
        x[where] = rng.choice(special, where.sum())
        if kind == "classes":
            y: Any = rng.integers(0, 3, rows)
            y[rng.random(rows) < odd / 2] = -100
        elif kind == "shares":
            y = rng.dirichlet([1, 1, 1], rows).astype(np.float32)
        elif kind == "binary":
            y = (rng.random((rows, 1)) < 0.4).astype(np.float32)
        else:
            y = rng.normal(size=(rows, 1)).astype(np.float32)
        its = {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}
        # PyTorch aligns its own memory, as the loader does; only such batches are replayed.
        batches.append({name: tensor.clone() for name, tensor in its.items()})
    return batches


# --- cases -------------------------------------------------------------------------


@dataclass
class Case:
    """What a seed stands for."""

    seed: int
    kind: str = ""
    parts: dict[str, Any] = field(default_factory=dict)

    def build(self) -> dict[str, Any]:
        """Return a network, loss, optimizer and schedule: the same at each call."""
        pick = random.Random(self.seed)
        torch.manual_seed(self.seed)
        loss, self.kind, outputs = loss_of(pick)
        if isinstance(loss, nn.CrossEntropyLoss) and loss.ignore_index != -100:
            loss.ignore_index = 0
        net = network(pick, outputs)
        parameters = list(net.parameters())
        frozen = parameters[:1] if len(parameters) > 4 and pick.random() < 0.15 else []
        for parameter in frozen:
            parameter.requires_grad_(False)
        optimizer = optimizer_of(pick, parameters)
        scheduler, when = scheduler_of(pick, optimizer)
        return {
            "net": net, "loss": loss, "optimizer": optimizer, "scheduler": scheduler, "when": when,
            "clip_norm": pick.choice([None, None, None, 0.5]),
            "accumulate": pick.choice([1, 1, 1, 3]),
        }  # fmt: skip

    def batches(self) -> list[dict[str, Any]]:
        self.build()
        pick = random.Random(-self.seed - 1)
        batches = data_of(pick, self.seed, self.kind, pick.choice([5, 8, 12]))
        ignored = self.build()["loss"]
        if self.kind == "classes" and ignored.ignore_index != -100:
            for batch in batches:
                batch["y"].clamp_(min=0)
        return batches


Run = tuple[list[Any], list[Any]]
"""The losses and metrics of all batches, and the tensors of the state at the end of each unit."""


def error_of(output: Any, target: Any) -> Any:
    """A metric: the mean absolute output."""
    return output.detach().abs().mean()


def state_of(net: Any, optimizer: Any) -> list[Any]:
    found = [*net.parameters(), *net.buffers()]
    found = [tensor.detach().clone() for tensor in found]
    for entries in optimizer.state.values():
        found += [copy.deepcopy(value) for value in entries.values() if value is not None]
    return found


def plain(case: Case) -> Run:
    """Train with a plain loop."""
    parts, told, states = case.build(), [], []
    net, loss, optimizer, scheduler = (parts[n] for n in ("net", "loss", "optimizer", "scheduler"))
    every, batches = parts["accumulate"], case.batches()
    torch.manual_seed(1)
    net.train()
    for number, batch in enumerate(batches):
        output = net(batch["x"])
        value = loss(output, batch["y"])
        told += [value.detach().clone(), error_of(output, batch["y"])]
        (value / every if every != 1 else value).backward()
        if (number + 1) % every == 0:
            if parts["clip_norm"]:
                nn.utils.clip_grad_norm_(list(net.parameters()), parts["clip_norm"])
            optimizer.step()
            optimizer.zero_grad()
        if scheduler is not None and parts["when"] == "batch":
            scheduler.step()
        if (number + 1) % BATCHES == 0:
            if scheduler is not None and parts["when"] == "epoch":
                scheduler.step()
            states.append(state_of(net, optimizer))
    return told, states


def model_of(case: Case, graph: bool | None) -> Any:
    parts = case.build()
    return cerebro.torch.Model(
        parts["net"], optimizer=parts["optimizer"], loss=parts["loss"], graph=graph,
        metrics={"error": error_of}, scheduler=parts["scheduler"], scheduler_step=parts["when"],
        clip_norm=parts["clip_norm"], accumulate=parts["accumulate"],
    )  # fmt: skip


def trained(case: Case, graph: bool | None, replays: collections.Counter[str] | None = None) -> Run:
    """Train with `cerebro.torch.Model`; run a unit again if its recorded step was wrong."""
    model, batches = model_of(case, graph), case.batches()
    every = model.accumulate
    torch.manual_seed(1)
    told: list[Any] = []
    states: list[Any] = []
    for unit in range(UNITS):
        before, drawn = copy.deepcopy(model.state_dict()), generators.capture(True)
        its = batches[unit * BATCHES : (unit + 1) * BATCHES]
        while True:
            values: list[Any] = []
            try:
                model.begin_unit([every] * (BATCHES // every))
                with replay_recorded_steps(model, training=True):
                    for batch in its:
                        found = model.train_batch(batch)
                        values += [found["loss"].clone(), torch.as_tensor(found["error"]).clone()]
                break
            except RecordedStepDiffers:
                model = model_of(case, graph)
                model.load_state_dict(before)
                model.stop_recording()
                generators.restore(drawn)
        model.end_unit()
        model.end_epoch(unit, {"train_loss": 0.0})
        told += values
        states.append(state_of(model.net, model._optimizers[0]))
    if replays is not None and model._recorded:
        recorded = model._recorded[0]
        taken = "replayed" if recorded.replays else "not replayed"
        replays[recorded.refusal or taken] += 1
    return told, states


def same(one: Any, two: Any) -> bool:
    """Return whether two runs have the same bits."""
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, torch.Tensor):
        return (
            one.shape == two.shape
            and one.dtype == two.dtype
            and one.contiguous().numpy().tobytes() == two.contiguous().numpy().tobytes()
        )
    return bool(one == two)


def check(seed: int, replays: collections.Counter[str] | None = None) -> list[str]:
    """Return the ways of training that differ from the plain loop, and a failure of all ways."""
    case = Case(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = plain(case)
        except Exception as error:
            return _failures(case, error)
        found = []
        for graph in (False, None, True):
            if not same(trained(case, graph, replays), expected):
                found.append(f"case {seed}: graph={graph} differs from a plain loop")
        return found


def _failures(case: Case, error: Exception) -> list[str]:
    """A case that fails in a plain loop must fail in the same way in all others."""
    found = []
    for graph in (False, None, True):
        try:
            trained(case, graph)
        except type(error):
            continue
        found.append(f"case {case.seed}: graph={graph} does not fail, but a plain loop does")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    replays: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    for seed in range(chosen.first, chosen.first + chosen.cases):
        found = check(seed, replays)
        print(*found, sep="\n", end="\n" * bool(found), flush=True)
        wrong += found
    for why, count in replays.most_common():
        print(f"{count:6} {why}")
    print(f"{chosen.cases} cases, {len(wrong)} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

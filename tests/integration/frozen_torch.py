"""Searches of models with a frozen base; as a program, one that is killed at a unit.

python frozen_torch.py FOLDER DATA UNIT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import resumable
import torch
from torch import nn

import cerebro

WIDTH = 160  # so that a weight has more bytes than the smallest that is mapped
SEEN = "FROZEN_TORCH_SEEN"  # a folder, if set: for what is seen in the workers


def note(kind: str, **seen: Any) -> None:
    folder = os.environ.get(SEEN)
    if folder is not None:
        with Path(folder, f"{kind}-{os.getpid()}").open("a") as file:
            file.write(json.dumps(seen) + "\n")


def read_notes(folder: Path, kind: str) -> dict[int, list[Any]]:
    """Return what was noted, by process."""
    return {
        int(path.name.rpartition("-")[2]): [*map(json.loads, path.read_text().splitlines())]
        for path in folder.glob(f"{kind}-*")
    }


def find_file(address: int) -> str:
    """Return the file that is mapped at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *path = line.split()
        first, end = (int(part, 16) for part in span.split("-"))
        if first <= address < end:
            return f"{inode} {' '.join(path)}"
    return ""


class Model(cerebro.torch.Model):
    """Notes where its frozen weights are; may write to one of them, or train it, from epoch 1 on"""

    config: dict[str, Any]

    def begin_epoch(self, epoch: int) -> None:
        if epoch == 1 and "action" in self.config:
            self.change(self.net.get_parameter(self.config["name"]), self.config["action"])

    def change(self, weight: Any, action: str) -> None:
        if action == "unfreeze":
            weight.requires_grad_(True)
        elif action == "in place":
            with torch.no_grad():
                weight.mul_(0.5)
        elif action == "data":
            weight.data.mul_(0.5)
        elif action == "numpy":
            weight.data.numpy()[:] *= 0.5

    def end_epoch(self, epoch: int, metrics: Any) -> Any:
        places = {n: p.data_ptr() for n, p in self.net.named_parameters() if not p.requires_grad}
        note("places", **places)
        note("files", **{name: find_file(place) for name, place in places.items()})
        return super().end_epoch(epoch, metrics)


def isolate(net: Any) -> Any:
    """Make frozen parameters parts of larger tensors, which are never shared."""
    for parameter in net.parameters():
        if not parameter.requires_grad:
            larger = torch.zeros(parameter.numel() + 1, dtype=parameter.dtype)
            larger[:-1] = parameter.detach().flatten()
            parameter.data = larger[:-1].view(parameter.shape)
    return net


def make_trunk() -> Any:
    note("made")
    return nn.Sequential(
        nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
    )


def make_seeded_trunk() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make_trunk().requires_grad_(False)


def make_bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    note("made")
    config = BertConfig(
        vocab_size=200,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=WIDTH,
        num_labels=3,
        max_position_embeddings=8,
    )
    return BertForSequenceClassification(config)


def add_adapters(base: Any, rank: int) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=rank, lora_dropout=0.1))


def take_bert_step(net: Any, batch: Any) -> Any:
    ids = (batch["x"] * 9).abs().long()
    return {"loss": net(input_ids=ids, labels=batch["y"]).loss}


def build(config: dict[str, Any], info: Any) -> Any:
    options: dict[str, Any] = {"loss": nn.functional.cross_entropy}
    if config["base"] == "bert":
        net = add_adapters(info.shared("bert", make_bert), config["rank"])
        options = {"step": take_bert_step}
    elif config["base"] == "shared":
        net = nn.Sequential(info.shared("trunk", make_trunk), nn.Linear(WIDTH, 3))
    else:
        net = nn.Sequential(make_seeded_trunk(), nn.Linear(WIDTH, 3))
    if config["isolated"]:
        isolate(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=config["lr"])
    model = Model(net, optimizer=optimizer, state="trainable", **options)
    model.config = config
    return model


def make_data(folder: Path) -> cerebro.Dataset:
    rng = np.random.default_rng(0)
    columns = {"x": rng.standard_normal((96, 4), np.float32), "y": rng.integers(0, 3, 96)}
    return cerebro.shard(columns, folder, shards=4)


def search(
    data: cerebro.Dataset, run: Path, workers: int, space: dict[str, Any], **settings: Any
) -> Any:
    train, valid = data.split(0.75, 0.25)
    same = {"isolated": False, "base": "shared", "rank": [2, 4], "lr": [1e-2, 1e-3]}
    return cerebro.search(
        *(build, {name: v if isinstance(v, list) else [v] for name, v in (same | space).items()}),
        train,
        **{"validation": valid, "searcher": "grid", "epochs": 3, "batch_size": 8} | settings,
        workers=workers,
        run=run,
        progress=False,
    )


def hashes(result: Any) -> list[str]:
    return [epoch["state_hash"] for trial in result.trials for epoch in trial.history]


if __name__ == "__main__":
    import frozen_torch

    frozen_torch.search(
        cerebro.Dataset(sys.argv[2]),
        Path(sys.argv[1]),
        2,
        {},
        callbacks=[resumable.Strike(int(sys.argv[3]))],
        if_exists="resume",
    )

"""A LightningModule in a search, as it is: torchmetrics, `self.log` and a schedule by the batch.

    python examples/lightning_digits.py

There is no Trainer and no DataLoader: the search trains the module, on shards, with the bits of
Lightning's own loop. Afterwards the best trial is trained once more, and its states are compared.
"""

from __future__ import annotations

import argparse

import lightning
import torch
import torchmetrics
from sklearn.datasets import load_digits
from torch import nn

import cerebro
from cerebro.transforms import Scale


def make_data(folder: str) -> cerebro.Dataset:
    digits = load_digits()
    arrays = {"x": digits.data.astype("float32"), "y": digits.target.astype("int64")}
    return cerebro.shard(arrays, folder, shards=8, exist_ok=True, progress=False)


class LitDigits(lightning.LightningModule):
    def __init__(self, hidden: int = 64, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, 10)
        )
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=10)
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_acc", self.val_acc)
        self.log("val_loss", nn.functional.cross_entropy(logits, y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def build(config):
    module = LitDigits(config["hidden"], config["lr"])
    return cerebro.torch.from_lightning(module, gradient_clip_val=1.0)  # without clipping: module


SPACE = {"hidden": [32, 128], "lr": cerebro.loguniform(1e-3, 1e-1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/digits-flat")
    parser.add_argument("--run", help="the run's folder (runs/<time>)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()

    data = make_data(options.data).with_transforms({"x": [Scale(1 / 16)]})
    train, valid = data.split(0.8, 0.2)
    result = cerebro.search(
        build,
        SPACE,
        train,
        epochs=options.epochs,
        validation=valid,
        n_trials=options.trials,
        metric="acc",
        mode="max",
        batch_size=32,
        workers=options.workers,
        run=options.run,
    )
    print(result.summary())
    print(cerebro.replay(result, result.best))


if __name__ == "__main__":
    main()

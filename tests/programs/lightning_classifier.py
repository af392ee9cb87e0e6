"""A LightningModule and a LightningDataModule, as in Lightning's introduction."""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import cerebro


class Digits(lightning.LightningDataModule):
    def __init__(self, batch_size=32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        digits = load_digits()
        x = torch.tensor(digits.data, dtype=torch.float32) / 16
        rows = TensorDataset(x, torch.tensor(digits.target))
        generator = torch.Generator().manual_seed(0)
        self.train, self.val = random_split(rows, [1500, 297], generator=generator)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)


class Classifier(lightning.LightningModule):
    def __init__(self, hidden=32, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        self.log("val_loss", nn.functional.cross_entropy(out, y))
        self.log("val_acc", (out.argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def build(config):
    return Classifier(hidden=config["hidden"], lr=config["lr"])


if __name__ == "__main__":
    # Instead of: trainer = lightning.Trainer(max_epochs=3); trainer.fit(Classifier(), Digits())
    space = {"hidden": [16, 32], "lr": [1e-2, 1e-3], "batch_size": 32}  # Cerebro
    result = cerebro.search(
        build, space, Digits(), epochs=3, searcher="grid", metric="val_acc"
    )  # Cerebro
    print(result)

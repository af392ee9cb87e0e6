"""A GAN that draws digits: two optimizers, and a training step that makes its own updates.

    python examples/gan_digits.py

The step is the loop's body of PyTorch's DCGAN tutorial. The networks are small, for images of 8 x 8
pixels. Afterwards the first trial is trained once more, and its states are compared.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import cerebro
from cerebro.transforms import Scale, ToCHW

NOISE = 16
criterion = nn.BCEWithLogitsLoss()


def make_data(folder: str) -> cerebro.Dataset:
    images = load_digits().images.astype("uint8")[..., None]
    return cerebro.shard({"x": images}, folder, shards=8, exist_ok=True, progress=False)


class Gan(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 2 * width, 4, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, 1, 4, stride=2, padding=1, bias=False),
            nn.Sigmoid(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2, padding=1, bias=False),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 1, 4, bias=False),
            nn.Flatten(0),
        )

    def forward(self, noise):
        return self.generator(noise)


def train_step(net, batch, optimizer_d, optimizer_g):
    real = batch["x"]
    ones, zeros = torch.ones(len(real)), torch.zeros(len(real))

    # (1) Update the discriminator: maximize log(D(x)) + log(1 - D(G(z))).
    net.discriminator.zero_grad()
    loss_real = criterion(net.discriminator(real), ones)
    loss_real.backward()
    fake = net.generator(torch.randn(len(real), NOISE, 1, 1))
    loss_fake = criterion(net.discriminator(fake.detach()), zeros)
    loss_fake.backward()
    optimizer_d.step()

    # (2) Update the generator: maximize log(D(G(z))).
    net.generator.zero_grad()
    loss_g = criterion(net.discriminator(fake), ones)
    loss_g.backward()
    optimizer_g.step()
    return {"loss": loss_g, "loss_d": loss_real + loss_fake}


def build(config):
    net = Gan(config["width"])
    optimizers = [
        torch.optim.Adam(part.parameters(), lr=config["lr"], betas=(0.5, 0.999))
        for part in (net.discriminator, net.generator)
    ]
    return cerebro.torch.Model(net, optimizer=optimizers, train_step=train_step)


SPACE = {"width": [8, 16], "lr": cerebro.loguniform(1e-4, 1e-2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/digits-images")
    parser.add_argument("--run", help="the run's folder (runs/<time>)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()

    data = make_data(options.data).with_transforms({"x": [Scale(1 / 16), ToCHW()]})
    result = cerebro.search(
        build,
        SPACE,
        data,
        epochs=options.epochs,
        n_trials=options.trials,
        metric="loss_d",
        mode="max",
        batch_size=64,
        workers=options.workers,
        run=options.run,
    )
    print(result.summary())
    print(cerebro.replay(result, 0))


if __name__ == "__main__":
    main()

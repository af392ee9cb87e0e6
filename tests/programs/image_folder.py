"""A folder of images in class folders, and a small network, as in tutorials on image folders."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

import cerebro

random = np.random.default_rng(0)
for place, name in enumerate(["ants", "bees"]):
    Path("hymenoptera", name).mkdir(parents=True, exist_ok=True)
    for number in range(24):
        pixels = random.integers(0, 128, (16, 16, 3)) + 127 * (np.arange(3) == place)
        Image.fromarray(pixels.astype(np.uint8)).save(f"hymenoptera/{name}/{number}.png")


class Network(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3)
        self.head = nn.Linear(channels, 2)

    def forward(self, x):
        x = x.permute(0, 3, 1, 2).float() / 255
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


def build(config):
    model = Network(config["channels"])
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    return cerebro.torch.Model(model, optimizer=optimizer, loss=nn.CrossEntropyLoss())  # Cerebro


if __name__ == "__main__":
    # Instead of ImageFolder("hymenoptera", transform), its DataLoader and the training loop:
    space = {"channels": [4, 8], "lr": [1e-1, 1e-2], "batch_size": 8}
    result = cerebro.search(
        build, space, "hymenoptera", epochs=3, validation=0.25, searcher="grid"
    )  # Cerebro
    print(result)

"""A Dataset, a DataLoader and a network, as in PyTorch's quickstart."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

import cerebro


class Digits(Dataset):
    def __init__(self, train):
        digits = load_digits()
        part = slice(0, 1500) if train else slice(1500, None)
        self.images = torch.tensor(digits.images[part], dtype=torch.float32) / 16
        self.labels = torch.tensor(digits.target[part])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


train_dataloader = DataLoader(Digits(train=True), batch_size=64, shuffle=True)
test_dataloader = DataLoader(Digits(train=False), batch_size=64)


class NeuralNetwork(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.flatten = nn.Flatten()
        self.linear_relu_stack = nn.Sequential(
            nn.Linear(8 * 8, hidden), nn.ReLU(), nn.Linear(hidden, 10)
        )

    def forward(self, x):
        return self.linear_relu_stack(self.flatten(x))


loss_fn = nn.CrossEntropyLoss()


def build(config):
    model = NeuralNetwork(config["hidden"])
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    return cerebro.torch.Model(model, optimizer=optimizer, loss=loss_fn)  # Cerebro


if __name__ == "__main__":
    # Instead of the functions train and test, and the loop over epochs that calls them:
    space = {"hidden": [16, 32], "lr": [1e-1, 1e-2], "batch_size": 64}
    result = cerebro.search(
        build, space, train_dataloader, epochs=3, validation=test_dataloader, searcher="grid"
    )  # Cerebro
    print(result)

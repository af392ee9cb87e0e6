"""A skorch net, as in skorch's introduction."""

import torch
from sklearn.datasets import load_digits
from skorch import NeuralNetClassifier
from torch import nn

import cerebro

X, y = load_digits(return_X_y=True)
X = X.astype("float32") / 16


class MyModule(nn.Module):
    def __init__(self, num_units=10):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, num_units), nn.ReLU(), nn.Linear(num_units, 10), nn.Softmax(dim=-1)
        )

    def forward(self, X):
        return self.layers(X)


def build(config):
    return NeuralNetClassifier(
        MyModule,
        module__num_units=config["num_units"],
        criterion=nn.NLLLoss,
        optimizer=torch.optim.SGD,
        lr=config["lr"],
        max_epochs=3,
        verbose=0,
    )


if __name__ == "__main__":
    # Instead of: net = build({"num_units": 32, "lr": 0.1}); net.fit(X, y)
    space = {"num_units": [16, 32], "lr": [0.1, 0.01], "batch_size": 128}  # Cerebro
    result = cerebro.search(
        build, space, (X, y), epochs=3, validation=0.2, searcher="grid", metric="accuracy"
    )  # Cerebro
    print(result)

"""A table of passengers with missing values, as in tutorials on a first competition."""

import numpy as np
import pandas as pd
import torch
from torch import nn

import cerebro

random = np.random.default_rng(0)
train = pd.DataFrame(
    {
        "Pclass": random.integers(1, 4, 300),
        "Age": np.where(random.random(300) < 0.2, np.nan, random.normal(30, 12, 300)),
        "Fare": random.gamma(2.0, 15.0, 300),
        "Embarked": random.choice(["S", "C", "Q", None], 300),
    }
)
train["Survived"] = (train["Fare"] > 30).astype(int)
test = pd.DataFrame([{"Pclass": 3, "Age": None, "Fare": 80.0, "Embarked": "Z"}])


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.port = nn.Embedding(5, 2)
        self.layers = nn.Sequential(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    def forward(self, x, port):
        return self.layers(torch.cat([x, self.port(port)], 1))


def build(config):
    model = Net(config["hidden"])
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    return cerebro.torch.Model(
        model, optimizer=optimizer, loss=nn.CrossEntropyLoss(), inputs=["x", "port"]
    )


if __name__ == "__main__":
    # Instead of fillna, LabelEncoder, TensorDataset and the training loop:
    data = cerebro.shard(  # Cerebro
        train,
        "data/passengers",
        columns={"x": ["Pclass", "Age", "Fare"], "port": "Embarked", "y": "Survived"},
        dtypes={"x": "float32"},
        missing="category",
        unknown="category",
    )
    space = {"hidden": [8, 16], "lr": [1e-1, 1e-2], "batch_size": 32}
    result = cerebro.search(
        build, space, data, epochs=8, validation=0.2, searcher="grid"
    )  # Cerebro
    print(result.best.predict(test, output="class"))

"""What `build` may return as it is: models of other frameworks, and rows for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def make_rows() -> dict[str, Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(96, 4)).astype("float32")
    return {"x": x, "y": (x[:, 0] > 0).astype("int64") + (x[:, 1] > 0)}


def make_skorch(config: dict[str, Any]) -> Any:
    from skorch import NeuralNetClassifier

    return NeuralNetClassifier(
        torch.nn.Linear, module__in_features=4, module__out_features=3, lr=config["lr"],
        criterion=torch.nn.CrossEntropyLoss, optimizer__momentum=0.9, verbose=0,
    )  # fmt: skip


def make_sklearn(config: dict[str, Any]) -> Any:
    from sklearn.linear_model import SGDClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rates = {"learning_rate": "constant", "eta0": config["lr"]}
    return make_pipeline(StandardScaler(), SGDClassifier(loss="log_loss", random_state=0, **rates))


def make_lightning(config: dict[str, Any], *, unpacks: bool = True) -> Any:
    """A module whose steps unpack their batch, or look its columns up."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 3)

        def forward(self, x: Any) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch if unpacks else (batch["x"], batch["y"])
            return torch.nn.functional.cross_entropy(self(x), y)

        def validation_step(self, batch: Any, index: int) -> Any:
            self.log("loss", self.training_step(batch, index))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=config["lr"])

    return Module()

"""A table: class weights for imbalanced data, and models ranked by the area under the ROC curve.

    python examples/tabular.py

569 tumors with 30 measurements each, 63 % of them benign (scikit-learn's breast cancer data). The
AUC is not a mean over batches, so it is an `epoch_metric`: it receives all outputs of the
validation data at once.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from torch import nn

import cerebro
from cerebro.transforms import Normalize


def make_data(folder: str) -> cerebro.Dataset:
    table = load_breast_cancer(as_frame=True).frame
    features = [name for name in table.columns if name != "target"]
    return cerebro.shard(
        table,
        folder,
        shards=4,
        columns={"x": features, "y": "target"},
        dtypes={"x": "float32", "y": "int64"},
        exist_ok=True,
        progress=False,
    )


def auc(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Area under the ROC curve of the scores' difference."""
    return float(roc_auc_score(targets.numpy(), (outputs[:, 1] - outputs[:, 0]).numpy()))


def build(config, info):
    layers: list[nn.Module] = []
    width = info.columns["x"].shape[0]
    for _ in range(config["layers"]):
        layers += [nn.Linear(width, config["hidden"]), nn.ReLU(), nn.Dropout(config["dropout"])]
        width = config["hidden"]
    net = nn.Sequential(*layers, nn.Linear(width, info.num_classes("y")))

    # Rows of rarer classes count more.
    counts = info.data.stats("y").counts
    total = sum(counts.values())
    weights = torch.tensor([total / (len(counts) * n) for n in counts.values()])
    return cerebro.torch.Model(
        net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=config["lr"], weight_decay=1e-2),
        loss=nn.CrossEntropyLoss(weight=weights),
        epoch_metrics={"auc": auc},
    )


SPACE = {
    "layers": [1, 2],
    "hidden": [16, 64],
    "dropout": [0.0, 0.2],
    "lr": [1e-3, 1e-2],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/tumours")
    parser.add_argument("--run", help="the run's folder (runs/<time>)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()

    train, valid, test = make_data(options.data).split(0.6, 0.2, 0.2, stratify="y")
    stats = train.stats("x", axis=0)  # of the training rows only
    scaled = {"x": [Normalize(stats.mean, stats.std)]}
    result = cerebro.search(
        build,
        SPACE,
        train.with_transforms(scaled),
        epochs=options.epochs,
        validation=valid.with_transforms(scaled),
        searcher="grid",
        metric="auc",
        batch_size=32,
        workers=options.workers,
        run=options.run,
    )
    print(result.summary())
    outcome = result.best.evaluate(test.with_transforms(scaled))
    print(f"\nAUC on {len(test)} other rows: {outcome['auc']:.4f}")


if __name__ == "__main__":
    main()

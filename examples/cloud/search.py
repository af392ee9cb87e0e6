"""A search for Kubernetes: data and run in object storage, workers in other pods.

Started again after its pod was lost, it goes on from the copy of the run: docs/guide/storage.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

import cerebro

SPACE = {"lr": cerebro.loguniform(1e-4, 1e-2), "width": [32, 64, 128]}


def build(config: dict[str, Any]) -> cerebro.torch.Model:
    net = torch.nn.Sequential(
        torch.nn.Linear(64, config["width"]), torch.nn.ReLU(), torch.nn.Linear(config["width"], 10)
    )
    return cerebro.torch.Model(
        net,
        optimizer=torch.optim.Adam(net.parameters(), lr=config["lr"]),
        loss=torch.nn.functional.cross_entropy,
        metrics={"accuracy": lambda output, y: (output.argmax(1) == y).float().mean()},
    )


def digits(place: str) -> cerebro.Dataset:
    """Return the dataset at a path or URL; write it if it is not there."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    arrays = {"x": (x / 16).astype("float32"), "y": y}
    return cerebro.shard(arrays, place, shards=16, exist_ok=True)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="a folder, or a URL such as s3://bucket/set")
    parser.add_argument("--run", help="the run's folder")
    parser.add_argument("--mirror", help="the URL of the run's copy, such as s3://bucket/runs/x")
    parser.add_argument("--listen", help="host:port to which agents connect")
    parser.add_argument("--key", help="the file with the agents' key")
    parser.add_argument("--ray", action="store_true", help="train on the Ray cluster of this pod")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--trials", type=int, default=32)
    parser.add_argument("--workers", type=int, help="the number of workers")
    return parser.parse_args(given)


def main() -> None:
    options = arguments()
    executor: Any = None
    if options.ray:
        executor = cerebro.ray.Executor("auto", workers=options.workers)
    if options.listen is not None:
        executor = cerebro.cluster.Executor(options.workers, listen=options.listen, key=options.key)
    mirror = None if options.mirror is None else cerebro.callbacks.Mirror(options.mirror)
    if mirror is not None and mirror.has_run():
        result = cerebro.resume(mirror.url, build, callbacks=[mirror], executor=executor)
    else:
        train, valid = digits(options.data).split(0.8, 0.2)
        result = cerebro.search(
            build,
            SPACE,
            train,
            validation=valid,
            epochs=options.epochs,
            n_trials=options.trials,
            batch_size=32,
            metric="accuracy",
            run=options.run,
            workers=None if executor is not None else options.workers,
            executor=executor,
            callbacks=[] if mirror is None else [mirror],
        )
    print(result.best)


if __name__ == "__main__":
    main()

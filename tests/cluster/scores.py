"""Derive a dataset with a network on a GPU, here and by agents, over the stand-in for CUDA.

As a program: python scores.py DATA FOLDER FUNCTION, where the function is one of this module.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import gpus_by_name

import cerebro
from cerebro.cli import doctor
from cerebro.machine.devices import CUBLAS_VARIABLE


class Scores:
    """The scores of a network with random weights; notes on which GPU a worker computes them.

    Parameters
    ----------
    folder
        Where to note it.
    shift
        What workers add to the scores.
    """

    def __init__(self, folder, shift=0.0):
        self.folder, self.shift = Path(folder), shift
        self.model = None

    def __getstate__(self):
        return {**vars(self), "model": None}

    def __call__(self, batch):
        if self.model is None:
            shape, classes = (1, doctor.SIDE, doctor.SIDE), len(doctor.FIGURES)
            self.model = cerebro.native.Model(shape, classes, seed=1, device="cuda:0")
        scores = self.model.predict_batch(batch)
        if CUBLAS_VARIABLE in os.environ:  # in a worker with a GPU, and nowhere else
            (self.folder / os.environ["CUDA_VISIBLE_DEVICES"]).touch()
            scores = scores + self.shift
        return {"scores": scores}


def shifted(folder):
    return Scores(folder, 1.0)


def derive(data, path, function, executor=None):
    return data.derive(
        path, function, reads=["x"], key="scores", batch_size=8, executor=executor, progress=False
    )


if __name__ == "__main__":
    import scores  # under its module name, so that workers find it
    from clusters import content

    source, folder, name = sys.argv[1:]
    gpus_by_name.pretend()
    data = cerebro.Dataset(source).with_transforms({"x": [cerebro.transforms.Scale(1 / 255)]})
    function = getattr(scores, name)(folder)
    here = scores.derive(data, Path(folder) / "here", function)
    made = scores.derive(data, Path(folder) / "made", function, cerebro.cluster.Executor(2, gpus=1))
    assert content(made.path) == content(here.path)

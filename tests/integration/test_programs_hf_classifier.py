"""The tutorial of transformers trains the same weights with Cerebro and with its Trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("datasets")
pytest.importorskip("accelerate")

PROGRAM = Path(__file__).parent.parent / "programs" / "hf_classifier.py"

TRAINER = """
import json, sys
import torch, transformers
import cerebro, cerebro._core as _core
from cerebro.machine import generators
import hf_classifier as program

torch.set_num_threads(1)  # as a worker
result = cerebro.open(sys.argv[1])
order = cerebro.Dataset(sys.argv[1] + "/data")
trained = {trial.number: trial.load("last").net.state_dict() for trial in result.trials}
columns = ["input_ids", "attention_mask", "label"]

class Ordered(transformers.Trainer):
    '''A Trainer with the rows of Cerebro's batches, and with a trial's random numbers.'''

    def get_train_dataloader(self):
        return Epochs(self.data_collator)

    def evaluate(self, *arguments, **options):
        state = generators.capture(True)
        try:
            return super().evaluate(*arguments, **options)
        finally:
            generators.restore(state)

class Epochs(list):
    def __init__(self, collate):
        self.epoch, self.collate = 0, collate
        super().__init__(order.batches(16, seed=0, epoch=0))

    def __iter__(self):
        self.epoch += 1
        for batch in order.batches(16, seed=0, epoch=self.epoch - 1, columns=columns):
            lengths = batch["input_ids_length"]
            rows = zip(batch["input_ids"], batch["label"], lengths, strict=True)
            yield self.collate(
                [{"input_ids": ids[:n].tolist(), "attention_mask": [1] * n, "label": int(label)}
                 for ids, label, n in rows]
            )

def make_trainer(**options):
    built = generators.capture(True)
    trainer = Ordered(train_dataset=program.train, eval_dataset=program.test, **options)
    keep = transformers.TrainerCallback()
    keep.on_train_begin = lambda *given, **named: generators.restore(built)
    trainer.add_callback(keep)
    return trainer

cerebro.torch.from_transformers = make_trainer
found = {}
for trial in result.trials:
    generators.seed_all(_core.trial_seed(0, trial.number), True)
    trainer = program.build(trial.config, None)
    trainer.train()
    evaluated = [e for e in trainer.state.log_history if "eval_accuracy" in e]
    accuracy = [e["eval_accuracy"] for e in evaluated]
    expected = [e["metrics"]["accuracy"] for e in trial.history]
    theirs = trainer.model.state_dict()
    ours = trained[trial.number]
    equal = [torch.equal(ours[name].cpu(), theirs[name].cpu()) for name in theirs]
    found[trial.number] = {"accuracy": accuracy, "expected": expected,
                           "equal": all(equal), "tensors": len(equal)}
print(json.dumps(found))
"""


def run_python(folder, *arguments):
    path = os.pathsep.join([str(PROGRAM.parent), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_the_tutorial_trains_as_with_its_trainer(tmp_path):
    searched = run_python(tmp_path, PROGRAM, tmp_path / "run")
    assert "not used are per_device_train_batch_size, num_train_epochs" in searched.stderr
    assert "text" not in searched.stderr.partition("UserWarning")[2]
    found = json.loads(
        run_python(tmp_path, "-c", TRAINER, tmp_path / "run").stdout.splitlines()[-1]
    )
    assert len(found) == 2
    for trial in found.values():
        assert trial["equal"] and trial["tensors"] > 20
        assert trial["accuracy"] == trial["expected"]

"""The native network in whole searches: hops, replay, what is loaded, doctor --train."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import cerebro
import cerebro.cli as cli
from cerebro.cli import doctor as proof


def test_doctor_trains_and_compares(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--train"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"cpu, 2 workers: accuracy (0\.9|1\.0)", out)
    assert "reproduces its bits: yes, all 16 states on cpu are the same\n" in out


def test_replays_and_loaded_models_match_the_search(tmp_path: Path) -> None:
    arrays = proof.draw_pictures(240)
    data = cerebro.shard(arrays, tmp_path / "data", shards=3, progress=False)
    data = data.with_transforms({"x": [cerebro.transforms.Scale(1 / 255)]})
    result = cerebro.search(
        proof.build,
        {**proof.SPACE, "device": "cpu"},
        data,
        epochs=2,
        n_trials=2,
        validation=0.25,
        metric="accuracy",
        batch_size=16,
        workers=0,
        devices="cpu",
        run=tmp_path / "run",
        progress=False,
    )
    assert cerebro.replay(tmp_path / "run", 1).identical
    best = cerebro.open(tmp_path / "run").best
    scores = best.predict(data)
    assert scores.shape == (240, len(proof.FIGURES))
    assert best.evaluate(data) == result.best.evaluate(data)
    pictures = np.concatenate([data.shard(i)["x"] for i in range(3)])
    again = best.load().predict_batch({"x": pictures.astype(np.float32) * np.float32(1 / 255)})
    np.testing.assert_allclose(again, scores, rtol=1e-5, atol=1e-5)

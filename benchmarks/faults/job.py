"""The program under test in the campaign: ``python -m benchmarks.faults.job SPEC``.

SPEC is JSON: the problem, ``data``, ``run``, ``workers``, ``keep``, ``state_dir`` and ``how``:
"script" searches, with ``if_exists``; "resume" calls `cerebro.resume`, with ``epochs``. Exit status
0 if the run finished, 1 after a Cerebro error, 2 after any other, 130 after Ctrl-C and 143 after
SIGTERM.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from typing import Any

import cerebro
from benchmarks.faults.models import tell
from benchmarks.faults.problem import Problem
from cerebro.errors import CerebroError


class Told:
    """Reports the coordinator's events to the campaign."""

    def on_unit_end(self, trial: Any, metrics: Any) -> None:
        tell(f"done {trial.number}")

    def on_epoch_end(self, trial: Any, metrics: Any) -> None:
        tell(f"epoch {trial.number} {trial.epoch}")


def main(text: str) -> int:
    faulthandler.enable()
    spec = json.loads(text)
    problem = Problem(**spec["problem"])
    arguments = problem.arguments()
    try:
        if spec["how"] == "resume":
            result = cerebro.resume(
                spec["run"],
                epochs=spec["epochs"],
                workers=spec["workers"],
                progress=False,
                callbacks=[Told()],
            )
        else:
            result = cerebro.search(
                arguments.pop("build"),
                arguments.pop("space"),
                spec["data"],
                run=spec["run"],
                workers=spec["workers"],
                keep=spec["keep"],
                state_dir=spec["state_dir"],
                if_exists=spec["if_exists"],
                callbacks=[Told()],
                **arguments,
            )
    except KeyboardInterrupt:
        return 130
    except (CerebroError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 2
    tell(f"ended {result.status}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""``python -m benchmarks.cluster_soak``: see docs/design/ray.md, "The soak"."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections import Counter

from benchmarks.cluster_soak.soak import ENGINES, Report, Soak
from cerebro.machine.imports import install_hint


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.cluster_soak",
        description="Searches on a cluster with random faults.",
    )
    parser.add_argument("--runs", type=int, default=20, help="number of runs (20)")
    parser.add_argument("--seed", type=int, default=1, help="the first run's seed, times 10000")
    parser.add_argument("--engine", choices=list(ENGINES), default="ray", help="(ray)")
    parser.add_argument("--only", type=int, metavar="SEED", help="repeat one run, in detail")
    options = parser.parse_args()
    cause = unsupported(options.engine)
    if cause is not None:
        print(cause, file=sys.stderr)
        return 1
    first = options.seed * 10_000
    seeds = range(first, first + options.runs) if options.only is None else [options.only]
    began = time.monotonic()
    soak = Soak(options.engine)
    reports = []
    try:
        for seed in seeds:
            reports.append(soak.run(seed))
            tell(reports[-1])
            if options.only is not None:
                print("\n".join(reports[-1].story))
    finally:
        soak.close()
    engine = "" if options.engine == "ray" else f" --engine {options.engine}"
    print(summary(reports, time.monotonic() - began, engine))
    return 1 if any(report.problems for report in reports) else 0


def unsupported(engine: str) -> str | None:
    """Why the soak cannot run here, or None."""
    if not sys.platform.startswith("linux"):
        return "the soak needs Linux: it reads /proc"
    module, extra = {"ray": ("ray.cluster_utils", "ray"), "agents": ("zmq", "cluster")}[engine]
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"the soak needs {module} ({error}): {install_hint(extra)}"
    return None


def tell(report: Report) -> None:
    faults = ", ".join(f"{n} {kind}" if n > 1 else kind for kind, n in report.struck.items())
    verdict = "ok" if not report.problems else f"FAILED: {report.problems[0].splitlines()[0]}"
    print(f"{report.seed}  {report.seconds:5.1f} s  {faults or 'no fault'}: {verdict}", flush=True)


def summary(reports: list[Report], seconds: float, engine: str = "") -> str:
    """The figures, as text; `engine` is the option of commands that repeat a run."""
    struck: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for report in reports:
        struck.update(report.struck)
        missed.update(report.missed)

    def count(word: str) -> int:
        return sum(p.startswith(word) for report in reports for p in report.problems)

    lines = [
        f"runs                         {len(reports)} in {seconds:.0f} s, "
        f"{sum(r.legs for r in reports)} processes that search or resume",
        f"results compared             {sum(r.epochs for r in reports)} epochs of trials",
        f"faults injected              {sum(struck.values())} "
        f"({sum(missed.values())} more came too late)",
    ]
    lines += [f"  {kind:<34} {number:5}" for kind, number in sorted(struck.items())]
    lines += [
        f"results lost                 {count('lost')}",
        f"wrong hashes or metrics      {count('wrong')}",
        f"actors left                  {count('actors')}",
        f"worker processes left        {count('processes')}",
        f"hangs                        {count('hang')}",
        f"errors not explained         {count('unclean') + count('broken')}",
        f"stray files                  {count('stray')}",
        f"runs not finished            {count('unfinished')}",
        f"units that ran again         {sum(r.repeated for r in reports)}, "
        f"{max((r.repeated for r in reports), default=0)} at most in a run",
        f"workers that joined a run    {sum(r.joined for r in reports)}",
    ]
    gone = [value for report in reports for value in report.gone]
    if gone:
        lines.append(
            f"actors outlived their coordinator by {max(gone):.1f} s at most, of {len(gone)}"
        )
    bad = [report for report in reports if report.problems]
    for report in bad:
        lines.append(
            f"\nFAILED: python -m benchmarks.cluster_soak --only {report.seed} (and --engine)"
        )
        lines += report.story
    verdict = "nothing lost" if not bad else f"{len(bad)} of {len(reports)} runs FAILED"
    return "\n".join([*lines, "", f"{len(reports)} runs: {verdict}"])


if __name__ == "__main__":
    sys.exit(main())

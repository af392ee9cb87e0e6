"""``python -m benchmarks.faults``: the fault campaign; see docs/design/faults.md."""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.faults.disks import enter_namespace

NO_MOUNTS = enter_namespace()  # before NumPy is imported: fails in a process with threads

from benchmarks.faults.campaign import Campaign, default_jobs, summary, supported  # noqa: E402
from benchmarks.faults.plan import calm  # noqa: E402
from benchmarks.faults.running import Report  # noqa: E402
from benchmarks.faults.sabotage import CAUGHT_AS  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.faults", description="The fault campaign."
    )
    parser.add_argument("--runs", type=int, default=200, help="number of runs (200)")
    parser.add_argument("--seed", type=int, default=1, help="the first run's seed, times 10000")
    parser.add_argument("--only", type=int, metavar="SEED", help="repeat one run, in detail")
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="runs in parallel")
    parser.add_argument("--self-test", action="store_true", help="corrupt runs: is it detected?")
    parser.add_argument("--keep-failed", action="store_true", help="keep folders of failed runs")
    options = parser.parse_args()
    cause = supported()
    if cause is not None:
        print(cause, file=sys.stderr)
        return 1
    campaign = Campaign(NO_MOUNTS, keep_failed=options.keep_failed)
    try:
        if options.self_test:
            return self_test(campaign)
        if options.only is not None:
            report = campaign.run(options.only)
            print("\n".join(report.story))
            print(summary([report], campaign.means.notes, report.seconds))
            return 1 if report.problems else 0
        began = time.monotonic()
        seeds = range(options.seed * 10_000, options.seed * 10_000 + options.runs)
        reports = campaign.run_all(seeds, options.jobs, tell)
        print(summary(reports, campaign.means.notes, time.monotonic() - began))
        return 1 if any(report.problems for report in reports) else 0
    finally:
        campaign.close()


def tell(report: Report) -> None:
    faults = ", ".join(f"{n} {kind}" if n > 1 else kind for kind, n in report.struck.items())
    verdict = "ok" if not report.problems else f"FAILED: {report.problems[0].splitlines()[0]}"
    print(f"{report.seed}  {report.seconds:5.1f} s  {faults or 'no fault'}: {verdict}", flush=True)


def self_test(campaign: Campaign) -> int:
    """Corrupt a fault-free run in every way: each must be detected, without false alarms on an
    intact run."""
    missed = 0
    for number, (what, word) in enumerate([("nothing", ""), *CAUGHT_AS.items()]):
        report = campaign.carry_out(calm(number), sabotage=what if word else None)
        found = [problem for problem in report.problems if problem.startswith(word)]
        right = bool(found) if word else not report.problems
        missed += not right
        said = found[0].splitlines()[0] if found else "no problem"
        print(f"{what}: {'' if right else 'WRONGLY '}{said}")
    print(f"{len(CAUGHT_AS)} ways to corrupt a run, {missed} not detected")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

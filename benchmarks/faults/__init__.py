"""The fault campaign: real searches that are killed, starved and cut off at random times.

``python -m benchmarks.faults --runs 200 --seed 1``; docs/design/faults.md describes it.
"""

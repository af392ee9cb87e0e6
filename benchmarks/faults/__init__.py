"""The fault campaign: real searches that are killed, starved and cut off at random moments.

``python -m benchmarks.faults --runs 200 --seed 1``; docs/design/faults.md says how it works.
"""

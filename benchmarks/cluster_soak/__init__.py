"""Searches on a Ray cluster with random faults: see docs/design/ray.md, "The soak"."""

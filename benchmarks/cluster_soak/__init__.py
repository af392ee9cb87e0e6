"""Searches on a cluster of Ray, struck at random: see docs/design/ray.md, "The soak"."""

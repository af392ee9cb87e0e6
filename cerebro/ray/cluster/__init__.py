"""Run a search on a Ray cluster: its nodes, and the shards and states on them. Internal."""

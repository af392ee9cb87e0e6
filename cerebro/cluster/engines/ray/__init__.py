"""Run a search on a Ray cluster: its nodes, and an agent in an actor for each worker."""

"""A Ray cluster behind a search: nodes, shards and states on them. Internal."""

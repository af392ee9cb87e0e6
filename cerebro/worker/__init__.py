"""Run one unit of work: build or load a model, train on a shard, pack its state. Internal."""

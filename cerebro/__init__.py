"""Cerebro: model selection with model hopper parallelism."""

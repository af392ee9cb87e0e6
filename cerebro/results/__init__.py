"""A run's results, read back: `Result`, `Trial`. Internal; import them from `cerebro`."""

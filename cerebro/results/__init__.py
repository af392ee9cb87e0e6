"""Read a run's results: `Result`, `Trial`. Internal; import them from `cerebro`."""

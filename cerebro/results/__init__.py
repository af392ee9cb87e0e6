"""What a run has found, read back: `Result`, `Trial`. Internal; import them from `cerebro`."""

"""Every system of the papers beside Cerebro, in one run: ``python -m benchmarks.comparison``."""

"""The loop of a run: ask, train, report, record, restore. Internal."""

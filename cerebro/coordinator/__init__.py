"""Run the loop of a search: ask, train, report, record, restore. Internal."""

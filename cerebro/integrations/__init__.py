"""Other libraries: each folder or file stands on Cerebro's contracts, and nothing stands on it."""

"""Read and write a run's folder on disk: records, settings, store, states, owner. Internal."""

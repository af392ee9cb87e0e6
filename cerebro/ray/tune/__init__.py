"""Ray Tune in front of a search. Internal; use `cerebro.ray.trainable` and `cerebro.ray.fit`."""

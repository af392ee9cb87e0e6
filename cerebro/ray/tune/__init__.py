"""Run searches that Ray Tune controls; `cerebro.ray.trainable` and `fit` are public. Internal."""

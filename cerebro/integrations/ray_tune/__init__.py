"""Ray Tune: `trainable` for its Tuner, and `fit`, which needs none of its processes."""

"""Keras 3 models, on PyTorch or JAX: `steps.py` has the steps of both backends."""

"""Keras 3 models, on PyTorch or JAX: `model.py` trains them, by the steps of a backend."""

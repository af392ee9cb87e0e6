"""Keras 3 models, on PyTorch or JAX: `model.py` trains them, `variables.py` names their state."""

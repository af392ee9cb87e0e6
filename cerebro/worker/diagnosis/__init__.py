"""Find likely mistakes in a model and its data, using a copy of the model that is discarded.

`diagnose.py` looks at losses, metrics and outputs, `data.py` at rows; neither depends on a
framework. :mod:`cerebro.torch.diagnosis` observes the calls of a PyTorch model.
"""

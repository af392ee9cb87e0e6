"""Find likely mistakes in a model and its data, using a copy of the model that is discarded.

`diagnose.py` is the entry point. `data.py` looks at rows, `training.py` at losses and metrics, and
`outputs.py` at outputs; none of them depends on a framework. :mod:`cerebro.torch.diagnosis`
observes the calls of a PyTorch model.
"""

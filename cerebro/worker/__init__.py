"""Run units: build or load a model, train on a part of an epoch, pack its state. Internal."""

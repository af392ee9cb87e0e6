"""JAX models: `model.py` has the interface, `program.py` the compiled steps and the states."""

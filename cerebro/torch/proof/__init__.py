"""The proof that a training step is the same program for every batch.

A recorded step repeats the operators that ran once. It may replace later steps only if the code
around the operators takes the same path every time. The modules, from the lowest layer up:

- `values`: the possible values of an expression, and the arguments of a call.
- `unchanged`: what the step reads besides tensors, and whether it has changed.
- `genuine`: whether functions, modules, optimizers and modes are PyTorch's own.
- `syntax`: the syntax tree of a function, checked against its compiled code.
- `expressions`, `calls`, `functions`: what a user's function does, read from its syntax tree.
- `same_program`: the code of a step, followed through modules, attributes and calls.
- `schedulers`: whether a learning-rate scheduler changes only its optimizer's settings.
"""

"""Found by every Python that is started with this folder in ``PYTHONPATH``: its GPUs are there by
name, as many as ``CUDA_VISIBLE_DEVICES`` has, and the CUDA runtime is the stand-in."""

import gpus_by_name

gpus_by_name.pretend()

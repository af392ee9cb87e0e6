"""This machine and this process: files, memory, cores, GPUs, flags, signals. Internal."""

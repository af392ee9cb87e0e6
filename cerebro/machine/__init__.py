"""Manage this machine and process: files, memory, cores, GPUs, flags, signals. Internal."""

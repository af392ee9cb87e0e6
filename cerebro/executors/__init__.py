"""Run workers: in this process, in other processes, or on a simulated clock. Internal."""

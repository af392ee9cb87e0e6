"""Where workers run: in this process, in others, on a simulated clock. Internal."""

"""Where workers are: in this process, in others, on a simulated clock. Internal."""

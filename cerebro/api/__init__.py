"""Define the functions of `cerebro`: search, resume, replay, check, plan. Internal."""

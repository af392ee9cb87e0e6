"""Optuna: its studies as searches, its samplers as searchers, and runs as studies."""

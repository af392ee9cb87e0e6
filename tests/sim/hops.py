"""How often trials change workers in a simulation."""

from __future__ import annotations

from cerebro.executors.simulated import Simulation


def hop_share(simulation: Simulation) -> float:
    """Share of the units that ran on another worker than their trial's last."""
    return sum(unit.hopped for unit in simulation.units) / max(1, len(simulation.units))

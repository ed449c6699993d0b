"""Simulation: the engine's own scheduler in virtual time, over a cost model instead of a device."""

"""The simulator, which runs the engine's scheduler in virtual time with a cost model instead of a device."""

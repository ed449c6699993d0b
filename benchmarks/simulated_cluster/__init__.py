"""A cluster in virtual time: the scheduler of the engine, and the router of the cluster."""

"""Workloads: how long requests are, when they arrive, what they hold."""

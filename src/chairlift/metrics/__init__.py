"""Metrics: everything that is measured is computed from events."""

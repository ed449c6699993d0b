"""Simulation, planning studies, workloads, benchmarks and reports; imported by `chairlift.cli.main` only."""

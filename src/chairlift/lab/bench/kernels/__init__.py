"""Benchmark of the CPU kernels."""

"""Benchmark of a server over HTTP."""

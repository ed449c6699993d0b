"""The first session on a GPU in one command, `python -m benchmarks.gpu`."""

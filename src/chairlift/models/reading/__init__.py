"""Readers of the metadata of model files, which the architectures share."""

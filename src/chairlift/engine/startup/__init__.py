"""Loads the model and plans the memory and the token budget of an engine."""

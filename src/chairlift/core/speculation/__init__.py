"""Speculative decoding: which draft tokens a step verifies."""

"""Preparation of requests: converts a valid body to the prompts and sampling parameters for the engine."""

"""Workloads: the prompts, lengths and arrival times of requests, synthetic or recorded."""

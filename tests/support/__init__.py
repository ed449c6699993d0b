"""Modules that tests share: fakes, servers, tiny models and what waits for conditions."""

"""Explains the waits of requests from their events, with the orders of the queue and the memory managers of core."""

"""The engine core in a thread or a process of its own, and its client."""

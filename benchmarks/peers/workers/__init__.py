"""What runs in a process of its own: one engine through one job. Apart from Chairlift's, a worker imports the standard
library, the engine, and `benchmarks.peers.records`: it runs in the peer's environment."""

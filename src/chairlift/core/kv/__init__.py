"""KV memory: block pool, prefix cache, KV cache manager and accounting."""

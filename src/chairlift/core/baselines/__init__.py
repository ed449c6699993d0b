"""What the literature compares with: static batching, and reservations of contiguous KV memory."""

"""KV on the device: the pool, and how pages get into it."""

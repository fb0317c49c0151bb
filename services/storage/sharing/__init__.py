"""Host memory of one node, read by the storages of others."""

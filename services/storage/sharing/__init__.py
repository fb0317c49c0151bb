"""Sharing of one node's host memory with the storages of others, which read it."""

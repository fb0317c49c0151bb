"""Announcements of what the cell has cached, to routers outside of it: vLLM's KV events over ZeroMQ."""

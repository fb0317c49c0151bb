"""Restoration from below the device: fetches ahead of a request's turn, waits for them, and the choice of a way."""

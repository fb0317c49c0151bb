"""Decisions of the storage, as plain data and functions: no I/O, no clock, no event loop."""

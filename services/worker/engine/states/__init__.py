"""Layers that keep a state instead of keys and values: linear attention, state-space models, short convolutions."""

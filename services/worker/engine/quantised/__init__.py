"""Quantised checkpoints: what their tensors say, as integer codes or as weights of a floating type."""

"""Quantised checkpoints: their tensors read as integer codes or as weights of a floating type."""

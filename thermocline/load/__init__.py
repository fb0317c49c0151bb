"""Measures any OpenAI-compatible server: ours or another."""

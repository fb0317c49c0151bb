"""Synthetic documents that state facts, and questions about them: for the demo, chaos runs, evaluation and training."""

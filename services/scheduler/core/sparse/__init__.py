"""Sparse prefixes: parts of a prompt from which each layer reads only the important tokens, and what they cost."""

"""Tokens of known texts: texts are cut where tokenizers must cut them, and each segment's tokens kept by digest."""

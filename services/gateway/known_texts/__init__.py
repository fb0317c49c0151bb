"""Tokens of known texts: texts cut where tokenisers must cut them, and the tokens of their segments by digest."""

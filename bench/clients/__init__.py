"""Whether clients that people use work against a cell, unmodified, each in an environment of its own."""

"""Constrained answers: from the fields of a request to a grammar that is known to compile."""

"""Explanations of admissions: where each part of a prompt came from, and why the rest was computed."""

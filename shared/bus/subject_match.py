"""Matching of subjects against patterns with ``*`` (one token) and a final ``>`` (one token or more)."""

from __future__ import annotations


def matches(pattern: str, subject: str) -> bool:
    """Return whether a subscription to ``pattern`` gets messages of ``subject``, as NATS defines it."""
    wanted, given = pattern.split("."), subject.split(".")
    for position, token in enumerate(wanted):
        if token == ">":
            return len(given) > position
        if position >= len(given) or token not in ("*", given[position]):
            return False
    return len(given) == len(wanted)

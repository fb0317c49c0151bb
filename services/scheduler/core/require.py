"""The check behind every invariant."""

from __future__ import annotations

from shared.errors import InvariantViolated


def require(holds: bool, text: str) -> None:
    """Raise InvariantViolated with ``text`` unless ``holds``."""
    if not holds:
        raise InvariantViolated(text)

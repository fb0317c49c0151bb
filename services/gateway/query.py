"""Parameters of query strings."""

from __future__ import annotations

from fastapi import Request

from shared.errors import InvalidRequest


def whole_number(http: Request, name: str, default: int, least: int, most: int) -> int:
    """Return a parameter as an integer from ``least`` to ``most``, ``default`` where left out.

    Raises InvalidRequest.
    """
    text = http.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and least <= int(text) <= most):
        raise InvalidRequest(f"{name} must be a number from {least} to {most}", param=name)
    return int(text)

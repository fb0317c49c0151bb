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


def flag(http: Request, name: str) -> bool:
    """Return a parameter as a boolean, false where left out. Raises InvalidRequest."""
    text = http.query_params.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name} must be true or false", param=name)
    return text in ("true", "1")


def check_names(http: Request, *known: str) -> None:
    """Raise InvalidRequest for a parameter of another name."""
    for name in http.query_params:
        if name not in known:
            raise InvalidRequest(
                f"unknown query parameter {name[:64]!r}; there are: {', '.join(known)}", param=name[:64]
            )

"""Quoted strings of nats-server's configuration language. Pure."""

from __future__ import annotations

_ESCAPES = {**{code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F)}, ord('"'): '\\"', ord("\\"): "\\\\"}


def nats_quoted(text: str) -> str:
    """Return ``text`` as a quoted string, for a file in UTF-8.

    The language has escapes for single bytes only, none for a code point as in JSON. So control characters, quotes and
    backslashes are escaped, and all other characters stand for themselves.
    """
    return f'"{text.translate(_ESCAPES)}"'

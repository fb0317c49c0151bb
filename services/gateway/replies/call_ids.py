"""Ids of tool calls: pure functions of the request and the call's number, so they are the same wherever computed."""

from __future__ import annotations

import hashlib

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

SHORT_ID_CHARACTERS = 9
"""Templates of Mistral's models refuse ids that are not nine letters or digits."""


def call_id(request_id: str, index: int, *, is_short: bool = False) -> str:
    """Return the id of call ``index`` of one choice: ``call_`` and 24 hex digits, or nine letters and digits."""
    digest = hashlib.blake2b(f"tool-call-1:{request_id}:{index}".encode(), digest_size=12).digest()
    if not is_short:
        return f"call_{digest.hex()}"
    number, letters = int.from_bytes(digest, "big"), ""
    for _ in range(SHORT_ID_CHARACTERS):
        number, place = divmod(number, len(_LETTERS))
        letters += _LETTERS[place]
    return letters

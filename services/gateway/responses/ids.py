"""Ids of responses. They encode the cell in which a response is kept, so that a router in front of several finds it."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from hashlib import blake2b

PREFIX = "resp_"
_TAG_CHARACTERS = 8
_LENGTH = len(PREFIX) + 40
_CHARACTERS = frozenset("0123456789abcdef")


def new_response_id(cell: str) -> str:
    """Return a fresh id of a response of ``cell``, "" for a cell without a name. Random: never called in a core."""
    return f"{PREFIX}{_tag(cell)}{secrets.token_hex(16)}"


def is_response_id(text: str) -> bool:
    """Return whether a text has the form of these ids; callers may send anything."""
    return text.startswith(PREFIX) and len(text) == _LENGTH and _CHARACTERS.issuperset(text[len(PREFIX) :])


def suffix_of(response_id: str) -> str:
    """Return the id's unique part, for ids that derive from it."""
    return response_id[len(PREFIX) + _TAG_CHARACTERS :]


def cell_of(response_id: str, cells: Iterable[str]) -> str:
    """Return which of ``cells`` keeps this response, "" if none does."""
    if not is_response_id(response_id):
        return ""
    tag = response_id[len(PREFIX) : len(PREFIX) + _TAG_CHARACTERS]
    return next((cell for cell in cells if _tag(cell) == tag), "")


def _tag(cell: str) -> str:
    return blake2b(cell.encode(), digest_size=_TAG_CHARACTERS // 2).hexdigest()

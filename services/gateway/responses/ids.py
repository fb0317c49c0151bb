"""Ids of kept answers, which are responses and messages of threads, and of responses' items.

They encode the cell in which an answer is kept, so that a router in front of several finds it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from hashlib import blake2b

PREFIX = "resp_"
MESSAGE_PREFIX = "msg_"
_TAG_CHARACTERS = 8
_LENGTH = 40
_CHARACTERS = frozenset("0123456789abcdef")
_ITEM = re.compile(r"[a-z]{2,4}_([0-9a-f]{40})[0-9]{1,6}")


def new_response_id(cell: str) -> str:
    """Return a fresh id of a response of ``cell``, "" for a cell without a name. Random: never called in a core."""
    return f"{PREFIX}{_tag(cell)}{secrets.token_hex(16)}"


def new_message_id(cell: str) -> str:
    """Return a fresh id of a message of ``cell``, as for a response."""
    return f"{MESSAGE_PREFIX}{_tag(cell)}{secrets.token_hex(16)}"


def is_response_id(text: str) -> bool:
    """Return whether a text has the form of these ids; callers may send anything."""
    return _is_kept_id(text, PREFIX)


def is_message_id(text: str) -> bool:
    """Return whether a text has the form of a message's id."""
    return _is_kept_id(text, MESSAGE_PREFIX)


def _is_kept_id(text: str, prefix: str) -> bool:
    digits = text.removeprefix(prefix)
    return text.startswith(prefix) and len(digits) == _LENGTH and _CHARACTERS.issuperset(digits)


def suffix_of(response_id: str) -> str:
    """Return what the ids of a response's items begin with, behind their own prefix."""
    return response_id[len(PREFIX) :]


def response_of(item_id: str) -> str:
    """Return the id of the response that an item is of by its own id, "" for an id of another form."""
    found = _ITEM.fullmatch(item_id)
    return PREFIX + found[1] if found else ""


def cell_of(answer_id: str, cells: Iterable[str]) -> str:
    """Return which of ``cells`` keeps this response or message, "" if none does."""
    if not (is_response_id(answer_id) or is_message_id(answer_id)):
        return ""
    tag = answer_id[-_LENGTH:][:_TAG_CHARACTERS]
    return next((cell for cell in cells if _tag(cell) == tag), "")


def _tag(cell: str) -> str:
    return blake2b(cell.encode(), digest_size=_TAG_CHARACTERS // 2).hexdigest()

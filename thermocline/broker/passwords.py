"""The password that a cell draws for each user of its broker."""

from __future__ import annotations

import secrets

OPERATOR = "operator"
"""The user of commands that look into the cell."""


def new_password() -> str:
    """192 bits by chance, in characters that need no quoting anywhere."""
    # Letters in front: the server reads digits alone as a number.
    return "tc" + secrets.token_hex(24)

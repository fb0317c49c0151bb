"""The password that a cell draws for each user of its broker."""

from __future__ import annotations

import secrets

OPERATOR = "operator"
"""Name of the user for commands that inspect or repair the cell."""


def new_password() -> str:
    """Return 192 random bits as text that needs no quoting anywhere."""
    # Letters in front: the server reads digits alone as a number.
    return "tc" + secrets.token_hex(24)

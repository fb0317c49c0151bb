"""What tells this run of tests from every other on the machine."""

from __future__ import annotations

import os
import secrets

RUN = f"test-{os.getpid()}-{secrets.token_hex(3)}"
"""Start of the names that this process gives to things which all processes of the machine see."""

RUN_VARIABLE = "TC_TEST_RUN"
"""Variable by which the processes that tests start can be told: its value is RUN."""


def shm_prefix(what: str) -> str:
    """Prefix of shared segments that no other run uses. Equal within this run for equal ``what``."""
    return f"{RUN}-{what}"

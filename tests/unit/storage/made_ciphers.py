"""Ciphers for tests, whose keys are a number repeated."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable

from services.storage.cipher import Cipher
from services.storage.key_ring import KeyRing


def encoded(number: int) -> str:
    return base64.b64encode(bytes([number]) * 32).decode()


def make_cipher(*, default: int | None = None, nonces: Callable[[int], bytes] = os.urandom, **salts: int) -> Cipher:
    """With a key for each salt, and for requests without one."""
    lines = [] if default is None else [f'default = "{encoded(default)}"']
    setting = "\n".join([*lines, "[salts]", *(f'{salt} = "{encoded(number)}"' for salt, number in salts.items())])
    return Cipher(KeyRing(setting, environ={}, now_s=0.0), clock=lambda: 0.0, nonces=nonces)

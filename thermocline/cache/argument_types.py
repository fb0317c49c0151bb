"""Types of command-line arguments, checked before anything is sent. All raise ArgumentTypeError."""

from __future__ import annotations

import argparse
import math
import re

from shared.config import parse_bytes
from shared.ids import is_valid_name

MAX_TTL_S = 366 * 86_400
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def duration_ms(text: str) -> int:
    """Return a time such as ``1h``, ``30m``, ``250ms`` or ``2d`` in milliseconds; a bare number is seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?", text.strip())
    seconds = float(match[1]) * _SECONDS[match[2] or "s"] if match else 0.0
    if not 0.001 <= seconds <= MAX_TTL_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 1h, 30m or 3600s, of a year at the most")
    return math.ceil(seconds * 1000)


def namespace(text: str) -> str:
    """Return the text unchanged if it is a namespace: 32 lower-case hex digits."""
    if not re.fullmatch(r"[0-9a-f]{32}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a namespace, which is 32 hex digits")
    return text


def name(text: str) -> str:
    """Return the text unchanged if it is a valid name of a pin or storage."""
    if not is_valid_name(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 to 64 letters, digits, - or _")
    return text


def size(text: str) -> str:
    """Return the text unchanged if :func:`shared.config.parse_bytes` accepts it."""
    try:
        parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text

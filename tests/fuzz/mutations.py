"""Bytes that are no message, or nearly one: random ones, and samples that were changed here and there."""

from __future__ import annotations

import random
from collections.abc import Sequence

MOST_BYTES = 64 * 1024
"""No mutation makes an input longer, so that a decoder's time is the decoder's own."""

_NUMBERS = (0, 1, 2, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1)

# Heads of containers that claim more than there is, deep nests, and what decoders of text stumble over.
_PIECES = (
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", b"\xd3\x80\0\0\0\0\0\0\0", b"\xcb\x7f\xf8\0\0\0\0\0\0", b"\xc1", b"\xc0",
    b"\x91" * 3000, b"\x81\xa1a" * 1500, b"[" * 3000, b'{"a":' * 1500, b"a=" + b"[" * 2000, b"9" * 5000,
    b"1e999", b"-1e-999", b"NaN", b"Infinity", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xff\xfe", b"\\ud800", b"\0" * 8,
)  # fmt: skip


def mutate(samples: Sequence[bytes], chance: random.Random) -> bytearray:
    """An input: mostly one of ``samples`` with a few changes, sometimes unchanged, sometimes of nothing but noise."""
    if not samples or chance.random() < 0.05:
        return bytearray(chance.randbytes(chance.choice((0, 1, 2, 8, 64, 300, 4096))))
    data = bytearray(chance.choice(samples))
    for _ in range(chance.choice((0, 1, 1, 1, 2, 2, 3, 5, 9))):
        _change(data, samples, chance)
    del data[MOST_BYTES:]
    return data


def _change(data: bytearray, samples: Sequence[bytes], chance: random.Random) -> None:
    """One change, in place."""
    at = chance.randrange(len(data) + 1)
    end = min(len(data), at + chance.choice((1, 1, 2, 4, 8, 16, 100, 1000)))
    kind = chance.randrange(9)
    if kind <= 1 and at < len(data):
        data[at] ^= 1 << chance.randrange(8)
    elif kind == 2 and at < len(data):
        data[at] = chance.randrange(256)
    elif kind == 3:
        width = chance.choice((1, 2, 4, 8))
        order = chance.choice(("little", "big"))
        number = (chance.choice(_NUMBERS) + chance.choice((-1, 0, 0, 1))) % 2 ** (8 * width)
        data[at : at + width] = number.to_bytes(width, order)
    elif kind == 4:
        del data[at:end]
    elif kind == 5:
        data[at:at] = data[at:end]
    elif kind == 6:
        other = chance.choice(samples)
        begin = chance.randrange(len(other) + 1)
        data[at:end] = other[begin : begin + chance.choice((1, 4, 16, 100, len(other)))]
    elif kind == 7:
        data[at : chance.choice((at, end))] = chance.choice(_PIECES)
    else:
        del data[at:]

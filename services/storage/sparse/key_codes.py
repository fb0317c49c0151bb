"""Keys of probe heads as codes of eight bits, by which tokens are chosen and over which nothing attends.

A key of one head is ``head_dim`` codes, int8 from -127 to 127, and a scale, float32, at the next multiple of four
bytes: its largest absolute value over 127. Workers compute the same from keys that they have, to the bit
(``importance/key_codes.py``). A key with a value that is not finite has a scale that is NaN.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shared.messages.pools import scale_offset
from shared.messages.sparse_reads import LARGEST_CODE, code_bytes

Bytes = npt.NDArray[np.uint8]


def encode_keys(keys: Bytes, dtype: str) -> Bytes:
    """Return uint8 [..., code_bytes] of keys, uint8 [..., head_bytes] of values of ``dtype``."""
    with np.errstate(invalid="ignore"):  # Values that are no numbers make their scale one.
        values = _as_float32(np.ascontiguousarray(keys), dtype)
        largest = np.abs(values).max(axis=-1, keepdims=True)
        scale = np.where(np.isfinite(largest), largest / np.float32(LARGEST_CODE), np.float32(np.nan))
        codes = np.rint(np.divide(values, scale, out=np.zeros_like(values), where=scale > 0))
    head_dim = values.shape[-1]
    encoded = np.zeros((*values.shape[:-1], code_bytes(head_dim)), np.uint8)
    # A scale among the least floats is rounded so much that a quotient may exceed the largest code.
    encoded[..., :head_dim] = np.clip(codes, -LARGEST_CODE, LARGEST_CODE).astype(np.int8).view(np.uint8)
    encoded[..., scale_offset(head_dim) :] = scale.astype("<f4").view(np.uint8)
    return encoded


def _as_float32(keys: Bytes, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":  # The upper half of a float32.
        return (keys.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return keys.view({"float32": "<f4", "float16": "<f2"}[dtype]).astype(np.float32)

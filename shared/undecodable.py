"""What decoders of libraries raise for malformed bytes. The caller turns it into a typed error.

Nests that are too deep end in a RecursionError rather than in the decoder's own error, and text that is no UTF-8 in
Python's: a few hundred bytes from outside are enough for either.
"""

from __future__ import annotations

import msgspec

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Of msgspec, for JSON and msgpack, typed or not."""

UNPARSABLE = (ValueError, RecursionError)
"""Of ``tomllib`` and ``json``. A number of more digits than Python converts is a plain ValueError there."""

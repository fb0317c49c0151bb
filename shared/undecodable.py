"""Exceptions of library decoders for malformed bytes. Callers turn them into typed errors.

Too deep a nesting raises RecursionError rather than the decoder's own error, and text that is not UTF-8 Python's own: a
few hundred bytes from outside are enough for either.
"""

from __future__ import annotations

import msgspec

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of msgspec, for JSON and msgpack, typed or not."""

UNPARSABLE = (ValueError, RecursionError)
"""Exceptions of ``tomllib`` and ``json``. A number of more digits than Python converts is a plain ValueError there."""

"""Decoding of request bodies that arrive compressed, piece by piece, so that a small one cannot become a large one."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from shared.errors import InvalidRequest

PIECE_BYTES = 2**18
"""Most bytes of one decoded piece, which takes about a millisecond."""

_ZLIB_OR_GZIP = zlib.MAX_WBITS + 32
_SERVED = ("gzip", "x-gzip", "deflate")


class BodyDecoder:
    """The decoder of one body of gzip or deflate. Holds no more than the part that it was given last."""

    def __init__(self) -> None:
        """Begin a body."""
        self._decoder = zlib.decompressobj(_ZLIB_OR_GZIP)

    def pieces(self, part: bytes) -> Iterator[bytes]:
        """Yield the decoded bytes of the next part, at most PIECE_BYTES each. Raises InvalidRequest."""
        left = part
        while left:
            if self._decoder.eof:
                raise _invalid("there is more behind its end")
            try:
                yield self._decoder.decompress(left, PIECE_BYTES)
            except zlib.error as error:
                raise _invalid(str(error)) from error
            left = self._decoder.unconsumed_tail or self._decoder.unused_data

    def end(self) -> None:
        """Raise InvalidRequest unless the body is whole."""
        if not self._decoder.eof:
            raise _invalid("it is incomplete")


def decoder_of(encoding: str) -> BodyDecoder | None:
    """Return the decoder for a ``content-encoding``, None where there is nothing to decode. Raises InvalidRequest."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return None
    if name in _SERVED:
        return BodyDecoder()
    raise InvalidRequest(
        f"content-encoding {encoding[:64]!r} is not supported: send gzip, deflate or none",
        code="request_body_encoding_unsupported",
        status=415,
    )


def _invalid(why: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not what content-encoding says: {why}", code="request_body_encoding_invalid")

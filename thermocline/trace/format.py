"""The Mooncake trace format: one JSON object per line, whose ``hash_ids`` name blocks of 512 tokens.

Two requests share a prefix exactly as far as their ``hash_ids`` agree from the start. Where blocks have another size,
each line says so by ``block_tokens``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.errors import InvalidRequest
from shared.undecodable import UNDECODABLE

BLOCK_TOKENS = 512
"""Tokens of a block where a line does not say another number."""

MOST_TOKENS, MOST_MS = 2**31 - 1, 2**63 - 1
"""Most tokens of a prompt or answer, and the latest time in milliseconds."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Three bytes without a meaning, with which some programs begin a file of text."""

GZIP = b"\x1f\x8b"
"""The first bytes of a file that gzip compressed."""

SAMPLE = Path(__file__).with_name("sample.jsonl")
"""A generated trace: 1,000 requests in 18 minutes, made by ``python -m tools.sample_trace``, which has its seed."""


class TraceRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request of a trace. ``timestamp`` is milliseconds since its start; lengths are tokens."""

    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: list[int]
    block_tokens: int = BLOCK_TOKENS


@dataclass(frozen=True)
class Scale:
    """Divisors of lengths and times, to fit a trace to a machine."""

    length: float
    time: float

    def block_tokens(self, request: TraceRequest) -> int:
        """Return the scaled tokens of a request's blocks. Raises InvalidRequest for less than one token."""
        if self.length > request.block_tokens:
            raise InvalidRequest(
                f"lengths divided by {self.length:g} leave nothing of a block of {request.block_tokens} tokens: give "
                f"a --length-scale of {request.block_tokens} at most"
            )
        return round(request.block_tokens / self.length)

    def output_tokens(self, request: TraceRequest) -> int:
        """Return the scaled length of a request's answer, at least 1."""
        return max(1, round(request.output_length / self.length))

    def starts_at_s(self, request: TraceRequest) -> float:
        """Return a request's scaled time of arrival, in seconds from the start of the trace."""
        return request.timestamp / 1e3 / self.time


_DECODER = msgspec.json.Decoder(TraceRequest)


def read_trace(path: Path, limit: int | None = None) -> Iterator[TraceRequest]:
    """Stream the first ``limit`` requests of a trace. Raises InvalidRequest, with the line, for a malformed one.

    Blank lines are passed over.
    """
    read = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1:
                    refuse_compressed(path, line)
                    line = line.removeprefix(BYTE_ORDER_MARK)
                if not line.strip():
                    continue
                if limit is not None and read >= limit:
                    return
                read += 1
                try:
                    yield parse_request(line)
                except InvalidRequest as error:
                    raise InvalidRequest(f"{path}:{number}: {error.message}") from error
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error


def refuse_compressed(path: Path, first_line: bytes) -> None:
    """Raise InvalidRequest where a file begins as gzip's do."""
    if first_line.startswith(GZIP):
        raise InvalidRequest(f"{path} is compressed by gzip: unpack it first")


def parse_request(line: bytes, *, block_tokens: int | None = None) -> TraceRequest:
    """Parse one line; ``block_tokens`` is the size of blocks in formats that do not say it.

    Raises InvalidRequest with the fault.
    """
    try:
        request = _DECODER.decode(line)
    except UNDECODABLE as error:
        raise InvalidRequest(str(error)) from error
    if block_tokens is not None:
        request = msgspec.structs.replace(request, block_tokens=block_tokens)
    for name, value, least, most in (
        ("timestamp", request.timestamp, 0, MOST_MS),
        ("input_length", request.input_length, 1, MOST_TOKENS),
        ("output_length", request.output_length, 0, MOST_TOKENS),
        ("block_tokens", request.block_tokens, 1, MOST_TOKENS),
    ):
        if not least <= value <= most:
            raise InvalidRequest(f"{name} is {value}; it must be from {least} to {most}")
    named, tokens = len(request.hash_ids), request.block_tokens
    # Some writers name only whole blocks: then a last block that is not full has no name.
    whole, rest = divmod(request.input_length, tokens)
    if not whole <= named <= whole + (rest > 0):
        blocks = whole + (rest > 0)
        raise InvalidRequest(
            f"hash_ids names {named:,} block{'s' * (named != 1)}; {request.input_length:,} tokens are {blocks:,} "
            f"block{'s' * (blocks > 1)} of {tokens}{'' if tokens != BLOCK_TOKENS else _OTHER_SIZE}"
        )
    return request


_OTHER_SIZE = ", which is the size unless block_tokens in each line says another"


def prompt_tokens(request: TraceRequest, scale: Scale, *, vocabulary: range, number: int = 0) -> list[int]:
    """Return deterministic token ids in ``vocabulary`` for a request: equal hash_ids give equal blocks.

    The last block is cut to the request's scaled length, as in the trace. Tokens behind the last named block are drawn
    by ``number``, the request's own, and not shared. Raises InvalidRequest for a scale that leaves nothing of a block.
    """
    block = scale.block_tokens(request)
    length = max(1, round(request.input_length / scale.length))
    tokens: list[int] = []
    for hash_id in request.hash_ids:
        tokens += _drawn((hash_id * 2_654_435_761 + 97) % 4_294_967_291, block, vocabulary)
        if len(tokens) >= length:
            return tokens[:length]
    # Another multiplier than that of blocks, so that a request's own end equals no block.
    tokens += _drawn((number * 2_246_822_519 + 3_266_489_917) % 4_294_967_291, length - len(tokens), vocabulary)
    return tokens


def _drawn(state: int, tokens: int, vocabulary: range) -> Iterator[int]:
    """Yield so many tokens of a 32-bit linear congruential generator: cheap, and the same on every machine."""
    span = len(vocabulary)
    for _ in range(tokens):
        state = (state * 1_664_525 + 1_013_904_223) % 4_294_967_296
        yield vocabulary.start + (state >> 8) % span

"""The Mooncake trace format: one JSON object per line, whose ``hash_ids`` name 512-token prefix blocks.

Two requests share a prefix exactly as far as their ``hash_ids`` agree from the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.errors import InvalidRequest
from shared.undecodable import UNDECODABLE

BLOCK_TOKENS = 512
MOST_TOKENS, MOST_MS = 2**31 - 1, 2**63 - 1
"""Most tokens of a prompt or answer, and the latest time in milliseconds."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Three bytes without a meaning, with which some programs begin a file of text."""

SAMPLE = Path(__file__).with_name("sample.jsonl")
"""A generated trace: 1,000 requests in 18 minutes, made by ``python -m tools.sample_trace``, which has its seed."""


class TraceRequest(msgspec.Struct, frozen=True):
    """One request of a trace. ``timestamp`` is milliseconds since its start; lengths are tokens."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass(frozen=True)
class Scale:
    """Divisors of lengths and times, to fit a trace to a machine."""

    length: float
    time: float

    def block_tokens(self) -> int:
        """Return the scaled tokens of a block of 512, at least 1."""
        return max(1, round(BLOCK_TOKENS / self.length))

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


def parse_request(line: bytes) -> TraceRequest:
    """Parse one line. Raises InvalidRequest with the fault."""
    try:
        request = _DECODER.decode(line)
    except UNDECODABLE as error:
        raise InvalidRequest(str(error)) from error
    for name, value, least, most in (
        ("timestamp", request.timestamp, 0, MOST_MS),
        ("input_length", request.input_length, 1, MOST_TOKENS),
        ("output_length", request.output_length, 0, MOST_TOKENS),
    ):
        if not least <= value <= most:
            raise InvalidRequest(f"{name} is {value}; it must be from {least} to {most}")
    if not request.hash_ids:
        raise InvalidRequest("hash_ids is empty")
    return request


def prompt_tokens(request: TraceRequest, scale: Scale, *, vocabulary: range) -> list[int]:
    """Return deterministic token ids in ``vocabulary`` for a request: equal hash_ids give equal blocks.

    The last block is cut to the request's scaled length, as in the trace.
    """
    block = scale.block_tokens()
    length = max(1, round(request.input_length / scale.length))
    span = len(vocabulary)
    tokens: list[int] = []
    for hash_id in request.hash_ids:
        state = (hash_id * 2_654_435_761 + 97) % 4_294_967_291
        for _ in range(block):
            # A 32-bit linear congruential generator: cheap, and the same on every machine.
            state = (state * 1_664_525 + 1_013_904_223) % 4_294_967_296
            tokens.append(vocabulary.start + (state >> 8) % span)
        if len(tokens) >= length:
            break
    return tokens[:length]

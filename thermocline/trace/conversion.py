"""Conversion of a log's lines to requests of a trace, by format, with counters."""

from __future__ import annotations

import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
from tokenizers import Tokenizer

from shared.errors import ConfigError, InvalidRequest
from thermocline.trace.block_names import BlockNames
from thermocline.trace.format import BLOCK_TOKENS, parse_request
from thermocline.trace.openai_log import LogFault, LoggedRequest, Prompt, read_line

_PACKED_TOKEN = 4
LEAST_BYTES, MOST_BYTES = 0.5, 16.0
"""Bounds of the mean size of a token of text."""


class Facts(msgspec.Struct):
    """Counters of a conversion. Prompt tokens are those of the trace, and the server's where the log has them."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    blocks: int = 0
    counted_by_server: int = 0  # Requests with the server's count of prompt tokens.
    server_prompt_tokens: int = 0  # Prompt tokens of those by the server's count,
    their_prompt_tokens: int = 0  # and by the trace's.
    outputs_from_text: int = 0  # Answers measured by their text, because the log lacks the length.
    outputs_from_limit: int = 0  # Answers as long as the caller's limit, because the log lacks length and text.
    other_parts: int = 0  # Images and other parts, which have no length in the trace.


@dataclass(slots=True)
class Timed:
    """A request of the trace with its time on the log's own clock, in milliseconds."""

    time_ms: float
    input_length: int
    output_length: int
    hash_ids: array.array[int] | list[int]
    block_tokens: int = BLOCK_TOKENS


class Format(Protocol):
    """A format of logs: converts lines, and counts in ``facts``."""

    facts: Facts

    def requests(self, line: bytes) -> Iterator[Timed]:
        """Yield the requests of a line. Raises LogFault where it is no request."""


@dataclass(slots=True)
class NamedBlocks:
    """Traces that have lengths and names of blocks already; importing checks and sorts them, with times from 0."""

    unit_ms: float = 1.0  # Of their times.
    block_tokens: int | None = None  # None where lines say it, or blocks have 512 tokens.
    facts: Facts = field(default_factory=Facts)

    def requests(self, line: bytes) -> Iterator[Timed]:
        """Yield the one request of a line. Raises LogFault where it is malformed."""
        try:
            request = parse_request(line, block_tokens=self.block_tokens)
        except InvalidRequest as error:
            raise LogFault(error.message) from error
        self.facts.requests += 1
        self.facts.prompt_tokens += request.input_length
        self.facts.output_tokens += request.output_length
        self.facts.blocks += len(request.hash_ids)
        yield Timed(
            request.timestamp * self.unit_ms,
            request.input_length,
            request.output_length,
            request.hash_ids,
            request.block_tokens,
        )


@dataclass(slots=True)
class OpenAiLog:
    """Logs of chat completions and completions. Only the names of blocks are kept of their text."""

    names: BlockNames
    bytes_per_token: float  # Mean size of a token of text; unused with a tokenizer.
    tokenizer: Tokenizer | None = None
    facts: Facts = field(default_factory=Facts)

    def requests(self, line: bytes) -> Iterator[Timed]:
        """Yield a request for each prompt of a line. Raises LogFault for no request, time, token or answer length."""
        logged = read_line(line)
        made = [self.names.of(logged.model, *self._packed(prompt)) for prompt in logged.prompts]
        if not all(names for _, names in made):
            raise LogFault("a prompt without a token")
        output = self._output_tokens(logged)
        facts, tokens = self.facts, sum(tokens for tokens, _ in made)
        facts.requests += len(made)
        facts.prompt_tokens += tokens
        facts.output_tokens += output * len(made)
        facts.blocks += sum(len(names) for _, names in made)
        facts.other_parts += logged.other_parts
        if logged.prompt_tokens is not None:
            facts.counted_by_server += 1
            facts.server_prompt_tokens += logged.prompt_tokens
            facts.their_prompt_tokens += tokens
        for length, names in made:
            yield Timed(logged.time_s * 1e3, length, output, array.array("q", names))

    def _packed(self, prompt: tuple[Prompt, ...]) -> tuple[bytes, float]:
        """Return (a prompt's text or token ids as bytes, bytes per token)."""
        ids = array.array("I")
        texts = []
        for part in prompt:
            if not isinstance(part, str):
                ids.extend(part)
            elif self.tokenizer is None:
                texts.append(part.encode())
            else:
                # Each text by itself: the front of a longer conversation has the tokens of the shorter one.
                ids.extend(self.tokenizer.encode(part, add_special_tokens=False).ids)
        if texts:
            return b"".join(texts), self.bytes_per_token
        return ids.tobytes(), _PACKED_TOKEN

    def _output_tokens(self, logged: LoggedRequest) -> int:
        if logged.output_tokens is not None:
            return logged.output_tokens
        if logged.answer is not None:
            self.facts.outputs_from_text += 1
            packed, bytes_per_token = self._packed((logged.answer,))
            return round(len(packed) / bytes_per_token)
        if logged.max_tokens is not None:
            self.facts.outputs_from_limit += 1
            return logged.max_tokens
        raise LogFault("no length of the answer: neither usage, choices nor max_tokens")


def measured_bytes_per_token(logged: Iterator[LoggedRequest]) -> float | None:
    """Return the mean bytes of text per token by the server's counts, within the bounds; None without counts."""
    size = tokens = 0
    for request in logged:
        texts = [part for prompt in request.prompts for part in prompt]
        sizes = [len(text.encode()) for text in texts if isinstance(text, str)]
        if request.prompt_tokens is not None and not request.other_parts and len(sizes) == len(texts):
            size += sum(sizes)
            tokens += request.prompt_tokens
    return round(min(max(size / tokens, LEAST_BYTES), MOST_BYTES), 3) if tokens else None


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a ``tokenizer.json``, or the one in a model's folder. Raises ConfigError where there is none."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises its base class.
        raise ConfigError(f"cannot read a tokenizer from {file}: {error}") from error

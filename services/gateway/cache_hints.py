"""Leases of the cell, from what a caller says about caching. Pure; run :func:`chat_leases` in a thread.

A breakpoint stands at the end of a text in the conversation. Its position in the prompt's tokens follows from the
model's template: it is rendered once more with a mark behind the text, and both renderings are equal up to there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from services.gateway.openai_schema.chat import ChatRequest
from services.gateway.openai_schema.leases import CacheControl
from services.gateway.openai_schema.sampling import SamplingFields
from shared.errors import InvalidRequest
from shared.messages.requests import CacheHints, Lease
from shared.undecodable import UNDECODABLE

MAX_BREAKPOINTS = 4
"""Anthropic's limit."""

TTL_MS = {"5m": 300_000, "1h": 3_600_000}
RETENTION_MS = {"in_memory": 300_000, "in-memory": 300_000, "24h": 86_400_000}

_MARK = "\ue002"
"""A character of the private use area, to which templates and tokenizers give no meaning."""


class Render(Protocol):
    """Renders a prompt's text from messages and tools in the template's form."""

    def __call__(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Return the text that the template makes of these messages and tools. May raise InvalidRequest."""


class Encode(Protocol):
    """The part of a tokenizer that leases need."""

    def encode_rendered(self, text: str) -> Sequence[int]:
        """Return the tokens of a rendered text, or of a part of it."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the tokens' text, special tokens included."""


S = TypeVar("S", str, Sequence[int])


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """Keep the prompt up to here: ``characters`` of a message's content, or a whole tool if ``tool`` is not None."""

    ttl_ms: int
    message: int = 0
    characters: int = 0
    tool: int | None = None


def breakpoints(request: ChatRequest) -> list[Breakpoint]:
    """Return the breakpoints of a conversation's ``cache_control`` fields, tools first.

    Raises InvalidRequest for more than :data:`MAX_BREAKPOINTS`, and for a malformed one of a tool.
    """
    found = []
    for place, tool in enumerate(request.tools or ()):
        if tool.get("cache_control") is not None:
            found.append(Breakpoint(TTL_MS[_control(tool["cache_control"], place).ttl], tool=place))
    for place, message in enumerate(request.messages):
        content = message.content
        if isinstance(content, list):
            end = -1  # Parts are joined by a newline, which the first does not have before it.
            for part in content:
                end += 1 + len(part.text or "")
                if part.cache_control is not None:
                    found.append(Breakpoint(TTL_MS[part.cache_control.ttl], place, end))
        elif message.cache_control is not None:
            found.append(Breakpoint(TTL_MS[message.cache_control.ttl], place, len(content or "")))
    if len(found) > MAX_BREAKPOINTS:
        raise InvalidRequest(
            f"{len(found)} breakpoints of cache_control are more than {MAX_BREAKPOINTS}", param="cache_control"
        )
    return found


def without_controls(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the tools without ``cache_control``, which the model should not see."""
    if not tools or not any("cache_control" in tool for tool in tools):
        return tools
    return [{name: value for name, value in tool.items() if name != "cache_control"} for tool in tools]


def chat_leases(
    marks: Sequence[Breakpoint],
    tokens: Sequence[int],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    render: Render,
    tokenizer: Encode,
) -> tuple[Lease, ...]:
    """Return the leases that breakpoints ask for in a prompt of these ``tokens``, one for each.

    ``messages`` and ``tools`` are those from which ``render`` made the prompt. A breakpoint that the prompt does not
    show covers no token, and the cell refuses its lease.
    """
    if not marks:
        return ()
    text = render(messages, tools=tools)
    ends = [_end_in_text(mark, text, messages, tools, render) for mark in marks]
    counts = _token_counts(sorted(set(ends)), text, tokens, tokenizer)
    return tuple(Lease(tokens=counts[end], ttl_ms=mark.ttl_ms) for mark, end in zip(marks, ends, strict=True))


def keeps_text(fields: SamplingFields) -> bool:
    """Return whether tokens of the prompt may be kept for later ones: the caller has not turned writing off."""
    return fields.cache is None or fields.cache.write


def session_lease(fields: SamplingFields, prompt_tokens: int, prompt: int = 0) -> tuple[Lease, ...]:
    """Return the lease of ``prompt_cache_key`` and ``prompt_cache_retention``: all of the prompt and its answer.

    Each prompt of one request is a session of its own; ``prompt`` is this one's place.
    """
    if fields.prompt_cache_key is None and fields.prompt_cache_retention is None:
        return ()
    key = fields.prompt_cache_key or ""
    ttl_ms = RETENTION_MS[fields.prompt_cache_retention or "in_memory"]
    name = f"{key}#{prompt}" if key and prompt else key
    return (Lease(tokens=prompt_tokens, ttl_ms=ttl_ms, key=name, with_answer=True),)


def returns_in_ms(fields: SamplingFields) -> int:
    """Return the milliseconds from the answer to the session's next request, as its caller expects; 0 if not given."""
    returns_in_s = fields.cache.returns_in_s if fields.cache is not None else None
    return 0 if returns_in_s is None else max(1, round(returns_in_s * 1000))


def with_leases(hints: CacheHints, leases: tuple[Lease, ...], max_leased_tokens: int, back_in_ms: int) -> CacheHints:
    """Return the hints with leases, the token budget that grants them, and when the caller expects to return, in ms."""
    if not leases and not back_in_ms:
        return hints
    return msgspec.structs.replace(hints, leases=leases, max_leased_tokens=max_leased_tokens, returns_in_ms=back_in_ms)


def _control(given: object, place: int) -> CacheControl:
    try:
        return msgspec.convert(given, CacheControl)
    except UNDECODABLE as error:
        raise InvalidRequest(f"cache_control: {error}", param=f"tools[{place}].cache_control") from error


def _end_in_text(
    mark: Breakpoint,
    text: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    render: Render,
) -> int:
    """Return the number of characters of the prompt's text before a breakpoint; 0 where it does not show."""
    said, shown = list(messages), list(tools or ())
    if mark.tool is None:
        content = str(said[mark.message].get("content") or "")
        marked = content[: mark.characters] + _MARK + content[mark.characters :]
        said[mark.message] = {**said[mark.message], "content": marked}
    elif mark.tool < len(shown):
        # Where another tool would come next, the prompt is the same up to this one's end.
        shown[mark.tool + 1 :] = [{"type": "function", "function": {"name": _MARK, "description": _MARK}}]
    else:
        return 0
    other = render(said, tools=shown or None)
    return 0 if other == text else common_length(text, other)


def _token_counts(ends: Sequence[int], text: str, tokens: Sequence[int], tokenizer: Encode) -> dict[int, int]:
    """Return, for each of these positions of the text in ascending order, how many of ``tokens`` lie before it.

    Pieces between them are tokenised one after another, which is right where a token ends at each position. Where one
    does not, or the prompt has other tokens for the same text (an answer's own), positions are searched in the decoded
    tokens.
    """
    counts: dict[int, int] = {0: 0}
    at, known = 0, 0
    for end in ends:
        if not end:
            continue
        piece = tokenizer.encode_rendered(text[at:end])
        if tokens[known : known + len(piece)] == piece:
            counts[end] = known + len(piece)
        else:
            counts[end] = _decoded_count(end, text, tokens, tokenizer)
        at, known = end, counts[end]
    return counts


def _decoded_count(end: int, text: str, tokens: Sequence[int], tokenizer: Encode) -> int:
    """Return the largest number of first tokens that decode to at most the first ``end`` characters of ``text``.

    Where tokens decode to another text, count those shared with the tokens of the beginning tokenised alone.
    """
    low, high = 0, len(tokens)
    while low < high:
        middle = (low + high + 1) // 2
        if len(tokenizer.decode(tokens[:middle])) <= end:
            low = middle
        else:
            high = middle - 1
    if text.startswith(tokenizer.decode(tokens[:low])):
        return low
    return common_length(tokens, tokenizer.encode_rendered(text[:end]))


def common_length(one: S, other: S) -> int:
    """Return how many first elements are equal. Compares slices, so that no loop runs over elements."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

"""Heads of a prompt: digests of its text from the start to growing depths, by which it is known without a tokenizer.

Gateways and routers compute the same digests from the same request body. Depths are the same for all prompts, so two
prompts share exactly the digests of the depths to which their texts agree. They are no cryptographic hashes: two texts
with one digest cost a worse choice of a cell, and never a wrong answer, since the cell compares tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from services.gateway.responses.ids import response_of
from shared.messages.base import pack_int32

FIRST_DEPTH_BYTES = 256
"""About 64 tokens. Up to sixteen times this, depths are so far apart; from there on, a sixteenth of the depth."""

_FORM = b"thermocline-heads-1"
_ROLE, _TEXT, _CALLS = b"\x1e", b"\x1f", b"\x1d"


@dataclass(frozen=True, slots=True)
class Head:
    """Digests (64 bits) of the first ``depths`` bytes, shallowest first. ``nbytes`` is the length of the whole text."""

    digests: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """The facts of a request that a router needs. ``session`` names a conversation, "" where the body names none."""

    head: Head = Head()
    model: str = ""
    session: str = ""
    is_stream: bool = False
    previous: str = ""  # The kept response or message that it continues, whose text is not in the body.


class _Message(msgspec.Struct):
    role: Any = None
    content: Any = None
    tool_calls: Any = None
    # Fields of items of the Responses API that are no messages.
    type: Any = None
    id: Any = None
    name: Any = None
    arguments: Any = None
    output: Any = None


class _Body(msgspec.Struct):
    """The body of a request to any of the APIs. Nothing is refused here: the cell's gateway gives better errors."""

    model: Any = None
    messages: list[_Message] | None = None
    prompt: Any = None
    system: Any = None
    instructions: Any = None
    input: str | list[_Message] | None = None
    previous_response_id: Any = None
    thread: Any = None
    tools: Any = None
    cache_salt: Any = None
    prompt_cache_key: Any = None
    stream: Any = None


_DECODER = msgspec.json.Decoder(_Body)


def next_depth(depth: int) -> int:
    """Return the next depth after ``depth``, in bytes."""
    return depth + max(FIRST_DEPTH_BYTES, depth // (16 * FIRST_DEPTH_BYTES) * FIRST_DEPTH_BYTES)


def asked_of(body: bytes | bytearray, default_model: str = "") -> Asked:
    """Return what a request's body asks for; without a head if it cannot be read or holds only a part of the prompt.

    ``default_model`` is the name of the model that answers a request without one, "" if that is not known: the head is
    that of a request that names it.
    """
    try:
        read = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Asked()
    previous = read.previous_response_id if isinstance(read.previous_response_id, str) else _referred(read)
    if isinstance(read.thread, dict) and isinstance(read.thread.get("previous_message_id"), str):
        previous = read.thread["previous_message_id"]
    return Asked(
        head=Head() if previous else _head_of(_parts(read, default_model)),
        model=read.model if isinstance(read.model, str) else "",
        session=read.prompt_cache_key if isinstance(read.prompt_cache_key, str) else "",
        is_stream=read.stream is True,
        previous=previous,
    )


def _referred(body: _Body) -> str:
    """Return the response that has the last item to which the input refers, "" where it refers to none."""
    items = body.input if isinstance(body.input, list) else ()
    ids = (item.id for item in reversed(items) if item.type == "item_reference" and isinstance(item.id, str))
    return response_of(next(ids, ""))


def _parts(body: _Body, default_model: str) -> Iterator[bytes]:
    """Yield the text in the order in which templates write it, after the fields that keep different requests apart."""
    model = default_model if body.model is None else body.model
    yield from (_FORM, _ROLE, _text(model), _ROLE, _text(body.cache_salt), _ROLE, _written(body.tools))
    for system in (body.system, body.instructions):
        if system:
            yield from (_ROLE, b"system", _TEXT)
            yield from _content(system)
            yield _CALLS
    messages = body.messages if body.messages is not None else body.input
    if messages is None:
        yield _prompt(body.prompt)
    elif isinstance(messages, str):
        yield from (_ROLE, b"user", _TEXT, _text(messages), _CALLS)
    else:
        for message in messages:
            yield from _message(message)


def _message(message: _Message) -> Iterator[bytes]:
    yield from (_ROLE, _text(message.role), _TEXT)
    yield from _content(message.content)
    for part in (message.name, message.arguments, message.output):
        if part is not None:
            yield from _content(part)
    yield from (_CALLS, _written(message.tool_calls))


def _content(content: object) -> Iterator[bytes]:
    """Yield the texts of content in either form; for blocks of tools, their names and contents."""
    if not isinstance(content, list):
        yield _text(content)
        return
    for part in content:
        if isinstance(part, dict):
            yield _text(part.get("text"))
            if part.get("type") in ("tool_use", "tool_result"):
                yield _text(part.get("name"))
                yield from _content(part.get("content"))


def _written(value: object) -> bytes:
    """Return JSON as one text, however its sender wrote spaces and escapes: templates write it again.

    Keys keep their order, since templates do, too. Nothing is b"", and so is what no text can be made of.
    """
    if not value:
        return b""
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, RecursionError):
        return b""


def _prompt(prompt: object) -> bytes:
    """Return the prompt's text or packed tokens; of several prompts, the first stands for all."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, list):
        try:
            return pack_int32(prompt)
        except (TypeError, ValueError, OverflowError):
            return b""
    return _text(prompt)


def _text(value: object) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else b""


def _head_of(parts: Iterator[bytes]) -> Head:
    digest = xxhash.xxh3_64()
    digests: list[int] = []
    depths: list[int] = []
    done, depth = 0, FIRST_DEPTH_BYTES
    for part in parts:
        start = 0
        while done + len(part) - start >= depth:
            cut = start + depth - done
            digest.update(part[start:cut])
            start, done = cut, depth
            digests.append(digest.intdigest())
            depths.append(depth)
            depth = next_depth(depth)
        digest.update(part[start:])
        done += len(part) - start
    return Head(tuple(digests), tuple(depths), done)

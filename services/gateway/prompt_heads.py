"""Heads of a prompt: digests of its text from the start to growing depths, by which it is known without a tokenizer.

Gateways and routers compute the same digests from the same body of a request. Depths depend on nothing but themselves,
so two prompts share exactly the digests of the depths to which their texts agree. They are no cryptographic hashes: two
texts of one digest cost a worse choice of a cell, and never an answer, for the cell compares tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from shared.messages.base import pack_int32

FIRST_DEPTH_BYTES = 256
"""About 64 tokens. Depths lie so far apart up to sixteen of them, and by a sixteenth of the depth from there on."""

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
    """What a router wants to know of a request. ``session`` names a conversation, "" where the body names none."""

    head: Head = Head()
    model: str = ""
    session: str = ""
    is_stream: bool = False


class _Message(msgspec.Struct):
    role: Any = None
    content: Any = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class _Body(msgspec.Struct):
    """Of both APIs; nothing is refused here, for the cell's gateway says better what is wrong."""

    model: Any = None
    messages: list[_Message] | None = None
    prompt: Any = None
    tools: msgspec.Raw = msgspec.Raw()
    cache_salt: Any = None
    prompt_cache_key: Any = None
    stream: Any = None


_DECODER = msgspec.json.Decoder(_Body)


def next_depth(depth: int) -> int:
    """The depth behind ``depth``, in bytes."""
    return depth + max(FIRST_DEPTH_BYTES, depth // (16 * FIRST_DEPTH_BYTES) * FIRST_DEPTH_BYTES)


def asked_of(body: bytes | bytearray) -> Asked:
    """What a body of a completion or a chat asks for; a body that cannot be read has no head."""
    try:
        read = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Asked()
    return Asked(
        head=_head_of(_parts(read)),
        model=read.model if isinstance(read.model, str) else "",
        session=read.prompt_cache_key if isinstance(read.prompt_cache_key, str) else "",
        is_stream=read.stream is True,
    )


def _parts(body: _Body) -> Iterator[bytes]:
    """The text in the order in which templates write it, with what keeps different requests apart in front."""
    yield from (_FORM, _ROLE, _text(body.model), _ROLE, _text(body.cache_salt), _ROLE, bytes(body.tools))
    if body.messages is None:
        yield _prompt(body.prompt)
        return
    for message in body.messages:
        yield from (_ROLE, _text(message.role), _TEXT)
        if isinstance(message.content, list):
            yield from (_text(part.get("text")) for part in message.content if isinstance(part, dict))
        else:
            yield _text(message.content)
        yield from (_CALLS, bytes(message.tool_calls))


def _prompt(prompt: object) -> bytes:
    """Of several prompts the first, which stands for all."""
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

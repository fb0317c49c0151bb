"""Bodies may come compressed, within the same bounds as others."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable

import pytest
from starlette.requests import Request
from starlette.types import Message

from services.gateway.body import Bodies
from services.gateway.body_encoding import PIECE_BYTES, BodyDecoder
from shared.errors import InvalidRequest, PayloadTooLarge, TooManyConnections
from tests.unit.gateway.running_gateway import running_gateway, says

CHAT = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}).encode()
PACKED = gzip.compress(CHAT)
PARTS = 7
"""Bytes of a part in which a body arrives here: no part has a whole header."""


def sent(body: bytes, encoding: str, part_bytes: int = PARTS) -> Request:
    """A request whose body arrives in small parts."""
    parts = [body[start : start + part_bytes] for start in range(0, len(body), part_bytes)] or [b""]

    async def receive() -> Message:
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    headers = [(b"content-type", b"application/json"), (b"content-encoding", encoding.encode())]
    return Request({"type": "http", "headers": headers}, receive)


@pytest.mark.parametrize(
    ("encoding", "encode"),
    [("gzip", gzip.compress), ("X-GZIP", gzip.compress), ("deflate", zlib.compress), (" identity ", bytes)],
)
async def test_a_compressed_body_is_read(encoding: str, encode: Callable[[bytes], bytes]) -> None:
    """However it is cut into parts."""
    async with Bodies(2**20, 1.0, 2**24).read(sent(encode(CHAT), encoding)) as body:
        assert bytes(body) == CHAT


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (CHAT, "incorrect header check"),
        (PACKED[:-1], "incomplete"),
        (PACKED + b"{}", "more behind its end"),
        (b"", "incomplete"),
    ],
    ids=["plain", "cut off", "longer", "empty"],
)
async def test_a_body_that_is_not_what_it_says_is_refused(body: bytes, why: str) -> None:
    """Instead of the JSON that is missing from it."""
    with pytest.raises(InvalidRequest, match=why) as caught:
        async with Bodies(2**20, 1.0, 2**24).read(sent(body, "gzip")):
            pass

    assert (caught.value.status, caught.value.code) == (400, "request_body_encoding_invalid")


async def test_a_small_body_cannot_become_a_large_one() -> None:
    """It is refused at the bound on a body, and at that on all of them; nothing of it is held afterwards."""
    bomb = gzip.compress(bytes(2**26))
    one, all_of_them = Bodies(2**20, 1.0, 2**24), Bodies(2**26, 1.0, 2**20)
    with pytest.raises(PayloadTooLarge) as caught:
        async with one.read(sent(bomb, "gzip", len(bomb))):
            pass
    with pytest.raises(TooManyConnections):
        async with all_of_them.read(sent(bomb, "gzip", len(bomb))):
            pass

    assert (caught.value.status, caught.value.code) == (413, "request_body_too_large_after_decoding")
    assert (one.held_bytes, all_of_them.held_bytes) == (0, 0)


async def test_what_decodes_to_nothing_is_bounded_as_well() -> None:
    """A compressed body may go on for ever without a byte in it."""
    nothing = zlib.compressobj(wbits=31).flush(zlib.Z_FULL_FLUSH) + b"\x00\x00\x00\xff\xff" * 10_000
    with pytest.raises(PayloadTooLarge):
        async with Bodies(2**10, 1.0, 2**24).read(sent(nothing, "gzip", 2**10)):
            pass


def test_no_piece_is_long() -> None:
    """Each is decoded only when the one before it was taken."""
    pieces = BodyDecoder().pieces(gzip.compress(bytes(5 * PIECE_BYTES)))

    assert max(map(len, pieces)) <= PIECE_BYTES


@pytest.mark.parametrize("encoding", ["zstd", "br", "gzip, gzip"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_another_encoding_is_named(path: str, encoding: str) -> None:
    """In the shape of the API; Anthropic's has a code of its own for it."""
    async with running_gateway(says("hi")) as harness:
        headers = {"content-encoding": encoding}
        answer = await harness.client.post(path, content=CHAT, headers=headers)
        served = await harness.client.post(path, content=gzip.compress(CHAT), headers={"content-encoding": "gzip"})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (415, "request_body_encoding_unsupported")
    assert ("details" in error) == (path == "/v1/messages")
    assert served.status_code == 200

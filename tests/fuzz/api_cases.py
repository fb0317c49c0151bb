"""Numbered cases against the HTTP API: what is sent over one connection, and how."""

from __future__ import annotations

import json
import random
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tests.fuzz.mutations import mutate
from tests.fuzz.schema_values import SchemaValues

Ending = Literal["answered", "half_closed", "aborted", "garbage"]

ADMIN_KEY = "fuzzed-admin-key"
ENDLESS = "/v1/cell/events"


@dataclass(frozen=True)
class Case:
    """``pieces`` are written one after another. With the ending ``answered`` there are ``answers`` responses, and the
    server has to give all of them; otherwise it may give any number that is right.
    """

    kind: str
    pieces: tuple[bytes, ...]
    ending: Ending = "answered"
    answers: int = 1
    is_head: bool = False
    is_endless: bool = False


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    body: bytes | None
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def encoded(self) -> bytes:
        headers = [(b"Host", b"fuzz"), (b"X-Admin-Key", ADMIN_KEY.encode()), *self.headers]
        if self.body is not None:
            headers.append((b"Content-Length", b"%d" % len(self.body)))
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        return f"{self.method} {self.target} HTTP/1.1\r\n".encode() + lines + b"\r\n" + (self.body or b"")


_JSON = ((b"Content-Type", b"application/json"),)

_BODY_PIECES = (
    b"[" * 5000, b'{"a":' * 3000, b'"\\ud800"', b"\xff", b"\xed\xa0\x80", b"1e999", b"9" * 5000, b"-", b"NaN", b"\0",
    b'{"model":1,"model":2}', b"\xef\xbb\xbf", b"/*", b"'", b"tru",
)  # fmt: skip

_HEADERS = (
    (b"Content-Type", b"text/plain"), (b"Content-Type", b"application/json; charset=utf-16"), (b"Content-Type", b""),
    (b"Content-Type", b"multipart/form-data; boundary=x"), (b"Content-Type", b"\xff\xfe"), (b"Accept", b"a" * 3000),
    (b"Content-Encoding", b"gzip"), (b"Content-Encoding", b"\xff"), (b"Authorization", b"Bearer \xff\xfe"),
    (b"Authorization", b"Bearer " + b"k" * 5000), (b"Authorization", b"Basic"), (b"X-Admin-Key", b"\xe9"),
    (b"X-Request-Id", b"a" * 500), (b"traceparent", b"00-zz-1"), (b"traceparent", b"00-" + b"a" * 600),
    (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), (b"Cookie", b"a=b;" * 900),
    (b"Range", b"bytes=5-1"), (b"If-None-Match", b"*"), (b"Expect", b"100-continue"), (b"X-Forwarded-For", b"::1"),
)  # fmt: skip
"""Headers that leave a request whole: the server has to answer."""

_BROKEN_HEADERS = (
    (b"Content-Length", b"-1"), (b"Content-Length", b"99999999999999999999"), (b"Content-Length", b"5, 6"),
    (b"Transfer-Encoding", b"chunked"), (b"Transfer-Encoding", b"gzip, chunked"), (b"Host", b"a\0b"),
    (b"A" * 70_000, b"b"), (b"A", b"b" * 70_000), (b"bad name", b"x"), (b"", b"x"), (b"A\r\nB", b"c"),
    (b"Upgrade", b"websocket"), (b"Connection", b"Upgrade, HTTP2-Settings"),
)  # fmt: skip
"""Headers that make the framing wrong, or may: any right answer, or a closed connection, will do."""


_BROKEN_CHUNKS = (b"zz\r\n", b"ffffffffffffffffff\r\n", b"-1\r\n\r\n", b"5\r\nab\r\n0\r\n\r\n", b"\r\n" * 9)


class Cases:
    """Cases by seed and number, made from the OpenAPI document of the gateway under test."""

    def __init__(self, seed: int, document: Mapping[str, Any], hints: Mapping[str, Sequence[Any]]) -> None:
        self._seed = seed
        self._values = SchemaValues(document["components"]["schemas"], hints)
        self._operations = [
            (path, method.upper(), operation)
            for path, operations in sorted(document["paths"].items())
            for method, operation in sorted(operations.items())
        ]
        # Bodies are where most can go wrong.
        self._weights = [6 if "requestBody" in operation else 1 for _, _, operation in self._operations]

    def at(self, number: int) -> Case:
        chance = random.Random(f"{self._seed}/api/{number}")
        kind = chance.choices(
            ("valid", "spoilt", "raw", "headers", "route", "broken", "pipelined", "chunked", "slow", "half_closed",
             "aborted", "noise"),
            (30, 30, 12, 7, 6, 3, 3, 3, 1, 2, 2, 1),
        )[0]  # fmt: skip
        return getattr(self, f"_{kind}")(chance)  # type: ignore[no-any-return]

    def _request(self, chance: random.Random, *, spoil: bool = False, served: bool = False) -> Request:
        """Of any operation. ``served``: not the one whose answer has no end."""
        while True:
            path, method, operation = chance.choices(self._operations, self._weights)[0]
            if not served or path != ENDLESS:
                break
        names = {"{model}": "test-model", "{name}": "pin-1", "{response_id}": "resp_" + "0" * 40}
        for name, good in names.items():
            value = chance.choice((good, "a b", "..", "%", "é" * 9, "a" * 3000, "\0", "chatcmpl-1")) if spoil else good
            path = path.replace(name, urllib.parse.quote(value, safe=""))
        query = [
            (parameter["name"], str(chance.choice((1, 10, 0, -1, 10**30, "ab" * 16, "a", "", "é", "1.5", "١"))))
            for parameter in operation.get("parameters", ())
            if parameter["in"] == "query" and chance.random() < 0.4
        ]
        body = None
        if "requestBody" in operation:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            value = self._values.valid(schema, chance)
            for _ in range(chance.choice((1, 1, 2, 3)) if spoil else 0):
                value = self._values.spoilt(value, chance)
            body = json.dumps(value, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
        target = path + ("?" + urllib.parse.urlencode(query) if query else "")
        return Request(method, target, body, _JSON if body is not None else ())

    def _case(self, kind: str, request: Request) -> Case:
        is_endless = request.target.partition("?")[0] == ENDLESS and request.method == "GET"
        return Case(kind, (request.encoded(),), is_head=request.method == "HEAD", is_endless=is_endless)

    def _valid(self, chance: random.Random) -> Case:
        return self._case("valid", self._request(chance))

    def _spoilt(self, chance: random.Random) -> Case:
        return self._case("spoilt", self._request(chance, spoil=True))

    def _raw(self, chance: random.Random) -> Case:
        """Bodies that are no JSON, or hardly: cut off, with keys twice, nested, not UTF-8."""
        request = self._request(chance)
        body = request.body or b"{}"
        change = chance.randrange(4)
        if change == 0:
            body = body[: chance.randrange(len(body) + 1)]
        elif change == 1:
            body = body[:1] + body[1:-1] + (b"," if len(body) > 2 else b"") + body[1:]
        elif change == 2:
            at = chance.randrange(len(body) + 1)
            body = body[:at] + chance.choice(_BODY_PIECES) + body[at:]
        else:
            body = bytes(mutate([body, b'{"prompt": "a"}'], chance))
        return self._case("raw", Request(request.method, request.target, body, _JSON))

    def _headers(self, chance: random.Random) -> Case:
        request = self._request(chance)
        extra = tuple(chance.sample(_HEADERS, chance.choice((1, 1, 2, 3))))
        return self._case("headers", Request(request.method, request.target, request.body, extra))

    def _route(self, chance: random.Random) -> Case:
        """Methods and paths that do not exist, or not together."""
        request = self._request(chance)
        method = chance.choice(("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "POST", "TRACE", "PROPFIND"))
        path = request.target.partition("?")[0]
        target = chance.choice((path, path + "/", path.upper(), "//" + path, path + "%00", "/", "/v1", "*", "/v1/é"))
        target = urllib.parse.quote(target, safe="/%*") + chance.choice(("", "?", "?limit=1&limit=2", "?%ff=%zz"))
        return self._case("route", Request(method, target, request.body))

    def _broken(self, chance: random.Random) -> Case:
        request = self._request(chance, served=True)
        extra = (*request.headers, chance.choice(_BROKEN_HEADERS))
        return Case("broken", (Request(request.method, request.target, request.body, extra).encoded(),), "garbage")

    def _pipelined(self, chance: random.Random) -> Case:
        requests = [
            self._request(chance, spoil=chance.random() < 0.5, served=True) for _ in range(chance.randint(2, 5))
        ]
        return Case("pipelined", (b"".join(each.encoded() for each in requests),), answers=len(requests))

    def _chunked(self, chance: random.Random) -> Case:
        """A body in chunks, and sometimes chunks that are none."""
        request = self._request(chance, served=True)
        body, parts = request.body or b"{}", []
        while body:
            size = chance.choice((1, 7, 64, 5000))
            parts.append(b"%x\r\n%s\r\n" % (len(body[:size]), body[:size]))
            body = body[size:]
        headers = (*_JSON, (b"Transfer-Encoding", b"chunked"))
        head = Request(request.method, request.target, None, headers).encoded()
        if chance.random() < 0.6:
            return Case("chunked", (head, *parts[:40], b"".join(parts[40:]) + b"0\r\n\r\n"))
        return Case("chunked", (head, chance.choice(_BROKEN_CHUNKS)), "garbage")

    def _slow(self, chance: random.Random) -> Case:
        """A request byte group by byte group."""
        data = self._request(chance, served=True).encoded()
        size = max(1, len(data) // chance.randint(2, 30))
        return Case("slow", tuple(data[at : at + size] for at in range(0, len(data), size)))

    def _half_closed(self, chance: random.Random) -> Case:
        data = self._request(chance, served=True).encoded()
        return Case("half_closed", (data[: chance.choice((len(data), chance.randrange(len(data))))],), "half_closed")

    def _aborted(self, chance: random.Random) -> Case:
        data = self._request(chance).encoded()
        return Case("aborted", (data[: chance.choice((len(data), len(data), chance.randrange(len(data))))],), "aborted")

    def _noise(self, chance: random.Random) -> Case:
        """No HTTP, or nearly."""
        data = self._request(chance, served=True).encoded()
        samples = [data, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01"]
        return Case("noise", (bytes(mutate(samples, chance)),), "garbage")

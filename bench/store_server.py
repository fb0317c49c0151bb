"""An object store for benchmarks: as much of the S3 protocol as a storage speaks, in memory, each answer late.

It stands in for a store at a distance: a request is answered ``--latency-ms`` after it arrived, and any number of them
wait at once. moto, which the tests use, answers a few hundred requests a second and would be what is measured.

``python -m bench.store_server [--latency-ms 50] [--tls-cert FILE --tls-key FILE]`` prints its port and serves until its
standard input ends. A number on a line of that is the latency from then on, which it prints in answer.
"""

from __future__ import annotations

import argparse
import asyncio
import email.utils
import hashlib
import re
import ssl
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

MAX_KEYS = 1000
_NOW = email.utils.formatdate(time.time(), usegmt=True)
_KEY = re.compile(rb"<Key>([^<]*)</Key>")
_REASONS = {200: "OK", 204: "No Content", 206: "Partial Content", 404: "Not Found", 412: "Precondition Failed"}


@dataclass(frozen=True)
class Answer:
    """``length`` is what Content-Length says where no body goes with it (HEAD)."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int = -1


class Bucket:
    """Objects by name, with their tags."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self._tags: dict[str, str] = {}

    def answer(self, verb: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        """Carry out one request."""
        parts = urlsplit(target)
        query = parse_qs(parts.query, keep_blank_values=True)
        name = unquote(parts.path).lstrip("/").partition("/")[2]
        if verb == "PUT":
            return self._put(name, headers, body)
        if verb == "POST" and "delete" in query:
            gone = _KEY.findall(body)
            for key in gone:
                self.objects.pop(key.decode(), None)
            told = b"".join(b"<Deleted><Key>" + key + b"</Key></Deleted>" for key in gone)
            return Answer(200, b'<?xml version="1.0"?><DeleteResult>' + told + b"</DeleteResult>")
        if verb == "DELETE":
            self.objects.pop(name, None)
            return Answer(204)
        if not name:
            return self._list(query)
        return self._get(verb, name, headers)

    def _put(self, name: str, headers: dict[str, str], body: bytes) -> Answer:
        if name in self.objects and headers.get("if-none-match") == "*":
            return Answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        self.objects[name] = body
        # As good as a digest for who only compares it, and free.
        self._tags[name] = f'"{hashlib.blake2b(body[:256], digest_size=16).hexdigest()}"'
        return Answer(200, headers={"ETag": self._tags[name]})

    def _get(self, verb: str, name: str, headers: dict[str, str]) -> Answer:
        body = self.objects.get(name)
        if body is None:
            return Answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        about = {"ETag": self._tags[name], "Last-Modified": _NOW, "Content-Type": "application/octet-stream"}
        if verb == "HEAD":
            return Answer(200, headers=about, length=len(body))
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
        if asked is None:
            return Answer(200, body, about)
        first, last = int(asked[1]), min(int(asked[2] or len(body)), len(body) - 1)
        about["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
        return Answer(206, body[first : last + 1], about)

    def _list(self, query: dict[str, list[str]]) -> Answer:
        prefix = query.get("prefix", [""])[0]
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        names = [name for name in sorted(self.objects) if name.startswith(prefix) and name > after]
        page = names[:MAX_KEYS]
        is_more = len(names) > len(page)
        found = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.objects[name])}</Size>"
            f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{escape(self._tags[name])}</ETag></Contents>"
            for name in page
        )
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if is_more else ""
        text = f"<IsTruncated>{str(is_more).lower()}</IsTruncated><KeyCount>{len(page)}</KeyCount>{more}{found}"
        return Answer(200, f'<?xml version="1.0"?><ListBucketResult>{text}</ListBucketResult>'.encode())


@dataclass
class Latency:
    """How late answers are."""

    seconds: float = 0.0


async def serve(
    bucket: Bucket, latency: Latency, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> asyncio.Server:
    """Serve on a free port of an address of this machine, over TLS if there is a context."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                verb, target, _ = line.decode().split(" ", 2)
                headers = {}
                while (header := (await reader.readline()).decode().strip()) != "":
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await asyncio.sleep(latency.seconds)
                answer = bucket.answer(verb, target, headers, body)
                length = len(answer.body) if answer.length < 0 else answer.length
                fields = {"Content-Length": str(length), **answer.headers}
                head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
                writer.write(f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\n{head}\r\n".encode())
                writer.write(answer.body)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # The client is gone, or broke its request off; or the server ends.
        finally:
            writer.close()

    return await asyncio.start_server(handle, host, 0, limit=2**20, backlog=1024, ssl=tls)


def tls_context(certificate: Path | str, key: Path | str) -> ssl.SSLContext:
    """What :func:`serve` needs to speak TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context


def _obey(latency: Latency) -> None:
    for line in sys.stdin:
        latency.seconds = float(line) / 1000
        print(line.strip(), flush=True)


async def _main(latency_ms: float, host: str, tls: ssl.SSLContext | None) -> None:
    latency = Latency(latency_ms / 1000)
    server = await serve(Bucket(), latency, host, tls)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, _obey, latency)
    server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--tls-cert", default="")
    parser.add_argument("--tls-key", default="")
    options = parser.parse_args()
    tls = tls_context(options.tls_cert, options.tls_key) if options.tls_cert else None
    asyncio.run(_main(options.latency_ms, options.host, tls))

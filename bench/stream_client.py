"""Streams over raw sockets: cheap enough that many of them measure the server, not the client.

One thread waits for all sockets (epoll). Of what arrives it looks for the beginning of an event and for the end of the
answer, and for nothing else; that an answer has as many tokens as were asked for is read off its usage. Linux only.
"""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

_EVENT = b"data: {"
_END = b"\r\n0\r\n\r\n"
_OK = b"HTTP/1.1 200"
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
_TAIL_BYTES = 1024  # Of an answer: they hold its usage, which is said in its last event.
_READ_BYTES = 256 * 1024


class LoadFailed(Exception):
    """A server refused a request, broke an answer off, or did not answer in time."""


@dataclass(slots=True)
class Played:
    """What a load was answered with. Times in seconds: ``gaps_s`` lie between two arrivals of tokens in one stream,
    ``first_s`` are times to a request's first token, of ``opening_s`` those of the requests that began together.
    """

    tokens: int = 0
    wall_s: float = 0.0
    client_s: float = 0.0  # Processor time of the client itself.
    opening_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


class _Stream:
    """One connection, and what it still has to ask."""

    __slots__ = ("asked_at", "is_opening", "last_at", "sock", "tail", "waiting")

    def __init__(self, address: tuple[str, int], requests: Sequence[bytes]) -> None:
        self.sock = socket.create_connection(address, timeout=30.0)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.waiting = list(reversed(requests))
        self.tail = b""
        self.is_opening = True
        self.asked_at = self.last_at = 0.0

    def ask(self) -> None:
        self.tail, self.last_at = b"", 0.0
        self.asked_at = time.perf_counter()
        self.sock.sendall(self.waiting.pop())


def play(
    address: tuple[str, int], streams: Sequence[Sequence[bytes]], *, tokens: int, timeout_s: float = 600.0
) -> Played:
    """Ask the requests of each stream one after the other over a connection of its own; all streams begin at once.

    Requests are as :func:`completion` makes them, and every answer must have so many ``tokens``. Raises LoadFailed.
    """
    played = Played()
    with select.epoll() as poll:
        running: dict[int, _Stream] = {}
        try:
            for requests in streams:
                stream = _Stream(address, requests)
                running[stream.sock.fileno()] = stream
                poll.register(stream.sock, select.EPOLLIN)
            begun, begun_cpu = time.perf_counter(), time.process_time()
            for stream in running.values():
                stream.ask()
            while running:
                ready = poll.poll(timeout_s)
                if not ready or time.perf_counter() - begun > timeout_s:
                    raise LoadFailed(f"{len(running)} streams are not answered within {timeout_s:g} s")
                for number, _ in ready:
                    if _take(running[number], played, tokens):
                        poll.unregister(number)
                        running.pop(number).sock.close()
            played.wall_s = time.perf_counter() - begun
            played.client_s = time.process_time() - begun_cpu
        finally:
            for stream in running.values():
                stream.sock.close()
    return played


def _take(stream: _Stream, played: Played, tokens: int) -> bool:
    """Read what has arrived and ask on where an answer is complete; whether that was the stream's last."""
    data = stream.sock.recv(_READ_BYTES)
    now = time.perf_counter()
    if not stream.tail and not data.startswith(_OK):
        raise LoadFailed(f"the answer begins with {data[:500]!r}")
    if not data:
        raise LoadFailed("a connection was closed within an answer")
    if _EVENT in data:
        if stream.last_at:
            played.gaps_s.append(now - stream.last_at)
        else:
            played.first_s.append(now - stream.asked_at)
            if stream.is_opening:
                played.opening_s.append(now - stream.asked_at)
        stream.last_at = now
    stream.tail = (stream.tail + data)[-_TAIL_BYTES:]
    if not stream.tail.endswith(_END):
        return False
    said = _COMPLETION_TOKENS.findall(stream.tail)
    if not said or int(said[-1]) != tokens:
        raise LoadFailed(f"an answer of {tokens} tokens was asked for, and one ends with {stream.tail[-500:]!r}")
    played.tokens += tokens
    stream.is_opening = False
    if not stream.waiting:
        return True
    stream.ask()
    return False


def completion(body: bytes) -> bytes:
    """The whole request of a completion: ``body`` is JSON that asks for a stream with its usage."""
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body

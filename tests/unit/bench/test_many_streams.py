"""Many streams at once: the client that asks for them, and what is made of its figures."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.many_streams import Case, case_of, figures, judged, median_of, requests_of
from bench.stream_client import LoadFailed, Played, play
from tools.pages import targets

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
REQUEST = b"POST / HTTP/1.1\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def answer(tokens: int) -> list[bytes]:
    """What a server sends in turn: so many tokens, how many they were, and the end."""
    usage = b'data: {"usage":{"completion_tokens":%d}}\n\n' % tokens
    return [HEAD, *[chunk(b'data: {"text":"x"}\n\n')] * tokens, chunk(usage + b"data: [DONE]\n\n"), b"0\r\n\r\n"]


@contextmanager
def server(parts: list[bytes]) -> Iterator[tuple[str, int]]:
    """Answers every request alike, each part once the one before it was taken."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while connection.recv(65_536):
                for part in parts:
                    connection.sendall(part)

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return  # Closed: the test is over.
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listening.getsockname()
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


def test_every_request_of_every_stream_is_asked_and_counted() -> None:
    """Three clients with two requests each, of which the first ones open."""
    with server(answer(4)) as address:
        played = play(address, [[REQUEST, REQUEST]] * 3, tokens=4)

    assert played.tokens == 24
    assert (len(played.first_s), len(played.opening_s)) == (6, 3)
    assert played.wall_s > 0


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"], "503"),
        (answer(3), "an answer of 4 tokens"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_ends_the_load(parts: list[bytes], why: str) -> None:
    """A refusal, and an answer that is too short: neither counts as a fast one."""
    with server(parts) as address, pytest.raises(LoadFailed, match=why):
        play(address, [[REQUEST]], tokens=4)


def test_a_case_has_about_as_many_requests_whatever_the_number_of_clients() -> None:
    """But each client asks twice at least, and not for ever."""
    assert [case_of(streams).requests for streams in (8, 64, 256, 1000)] == [64, 16, 4, 2]


def test_prompts_differ_and_are_the_same_for_every_server() -> None:
    """So that nobody finds another's prompt cached, and all servers do the same work."""
    asked = requests_of("m", Case(4, 2), random.Random(5), 8)

    assert asked == requests_of("m", Case(4, 2), random.Random(5), 8)
    assert len({request for requests in asked for request in requests}) == 8


def test_figures_become_targets_that_pages_can_read() -> None:
    """Throughput of 256 streams, their time to the first token, and that more clients do not make it less."""

    def measured(tokens: int, first_s: float) -> dict[str, object]:
        played = Played(tokens=tokens, wall_s=1.0, client_s=0.1, first_s=[first_s], opening_s=[first_s], gaps_s=[0.02])
        return dict(median_of([figures(played, {"worker": 0.5})]))

    ours = {"64": measured(10_000, 0.1), "256": measured(15_000, 0.25), "1000": measured(12_000, 1.0)}
    found = {target.says: target for target in targets.of("many_streams", judged(ours))}

    assert [(target.measured, target.is_met) for target in found.values()] == [
        ("1.07×", True),
        ("250.0 ms", False),
        ("1.50×", True),
        ("0.80×", False),
    ]

"""The fuzzer finds what it is there to find: decoders that are wrong on purpose, and answers that are."""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from shared.errors import CodecError
from tests.fuzz import byte_run
from tests.fuzz.api_cases import Case
from tests.fuzz.api_checks import fault_of
from tests.fuzz.api_exchange import Response, exchange
from tests.fuzz.api_keeping import keep_cases, read_case
from tests.fuzz.api_run import ApiFigures, FoundCase, try_case
from tests.fuzz.byte_run import ByteFigures, outcome_apart, run_block
from tests.fuzz.keeping import keep
from tests.fuzz.shrinking import shrink
from tests.fuzz.targets import FoundInput, Target


def target(decode: Callable[[bytes], object]) -> Target:
    return Target("wrong", decode, (CodecError,), (b"a sample",))


def _believes_lengths(data: bytes) -> object:
    return bytearray(2**31)


def _spins(data: bytes) -> None:
    until_s = time.process_time() + 0.3
    while time.process_time() < until_s:
        pass


def _refuses(data: bytes) -> None:
    raise CodecError("as documented")


@pytest.mark.parametrize(
    ("decode", "failure"),
    [
        (lambda data: {}[data], "raises builtins.KeyError"),
        (_believes_lengths, "allocates without bound (MemoryError)"),
        (_spins, "takes longer than 0.2 s"),
        (lambda data: os._exit(11), "ends the process (exit code 11)"),
        (_refuses, ""),
        (len, ""),
    ],
)
def test_a_wrong_decoder_is_found(
    decode: Callable[[bytes], object], failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with it; one that raises what it promises is right."""
    monkeypatch.setattr(byte_run, "SLOWEST_S", 0.2)
    assert outcome_apart(target(decode), [b"x"]) == [failure]


def test_a_hanging_decoder_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its process is ended, and the others' inputs run all the same."""
    hanging, wait = tmp_path / "hanging", byte_run._wait

    def hang(data: bytes) -> None:
        if data == b"b":
            hanging.touch()
            time.sleep(1000)

    def wait_for_either(receiver: Connection, at: mmap.mmap) -> bool:
        """Time counts once it hangs for certain, however long a process takes to begin."""
        while not receiver.poll(0.01) and not hanging.exists():
            pass
        hanging.unlink(missing_ok=True)
        return wait(receiver, at)

    monkeypatch.setattr(byte_run, "STUCK_S", 0.1)
    monkeypatch.setattr(byte_run, "_wait", wait_for_either)

    assert outcome_apart(target(hang), [b"a", b"b", b"c"]) == ["", "hangs", ""]


def test_what_a_dead_process_had_found_is_not_lost() -> None:
    """Numbers before the fatal one run again."""
    dies = Target("dies", lambda data: os._exit(3) if len(data) > 200 else {bytes(201): None}[data], (), (b"short",))
    figures = ByteFigures()

    run_block(1, range(60), [dies], figures)

    assert figures.inputs == 60
    assert {found.failure for found in figures.found} == {"raises builtins.KeyError", "ends the process (exit code 3)"}
    assert len(figures.found) == 60


def test_an_input_is_made_smaller() -> None:
    """As long as the same thing goes wrong."""
    noisy = bytes(range(65, 91)) * 20 + b"!" + b"tail" * 50

    assert shrink(noisy, lambda data: b"!" in data) == b"!"


def test_what_is_found_is_kept_small_and_once(tmp_path: Path) -> None:
    """One file for each target and failure, from which the input can be had again."""
    wrong = target(lambda data: {0: None}[1] if b"!" in data else None)
    failure = "raises builtins.KeyError"
    found = [FoundInput(target="wrong", failure=failure, data=b"abc!" + number, case="1/5") for number in (b"1", b"2")]

    kept = list(keep(found, [wrong], tmp_path))

    assert [path for _, path in kept] == list(tmp_path.iterdir())
    assert msgspec.json.decode(kept[0][1].read_bytes(), type=FoundInput).data == b"!"


_JSON = {"content-type": "application/json"}
_SHAPE = b'{"error":{"message":"m","type":"t","param":null,"code":"%s"}}'


@pytest.mark.parametrize(
    ("response", "is_right"),
    [
        (Response(400, _JSON, bytearray(_SHAPE % b"invalid_request")), True),
        (Response(503, _JSON, bytearray(_SHAPE % b"service_unavailable")), True),
        (Response(500, _JSON, bytearray(_SHAPE % b"internal_error")), False),
        (Response(400, _JSON, bytearray(b'{"detail":"Not Found"}')), False),
        (Response(404, {"content-type": "text/plain"}, bytearray(_SHAPE % b"not_found")), False),
        (Response(200, _JSON, bytearray(b'{"cut off')), False),
        (Response(200, {"content-type": "text/event-stream"}, bytearray(b"data: [DONE]\n\n")), True),
        (
            Response(
                200,
                {"content-type": "text/event-stream"},
                bytearray(b'data: {"error":{"message":"m","type":"server_error","code":"internal_error"}}\n\n'),
            ),
            False,
        ),
    ],
)
def test_wrong_answers_are_found(response: Response, is_right: bool) -> None:
    """Errors of the server, errors in another shape, and bodies that are not what they say."""
    assert (fault_of(response) == "") is is_right


async def test_a_request_without_an_answer_is_found() -> None:
    """The server closes the connection and says nothing."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        outcome = await exchange("127.0.0.1", port, Case("valid", (b"GET / HTTP/1.1\r\n\r\n",)))

    assert outcome.fault == "loses its connection before it is answered"


def test_growth_is_the_slope_of_the_second_half() -> None:
    """In bytes a case; what fills up at the beginning is no growth."""
    filling = [100.0, 150.0, 180.0, 190.0, 190.0, 190.0, 190.0, 190.0]

    assert ApiFigures(resident_mib=filling).growth_bytes_per_case() == 0
    assert ApiFigures(resident_mib=[float(at) for at in range(8)]).growth_bytes_per_case() == 2**20 / 1000


async def test_a_case_is_kept_with_the_least_body(tmp_path: Path) -> None:
    """The head goes with it, and its length is right."""

    async def break_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = await reader.read(10_000)
        status = b"500 Oh" if b"!" in sent else b"200 OK"
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: 0\r\n\r\n" % status)
        writer.close()  # From Python 3.12 on a server ends when its connections have.

    server = await asyncio.start_server(break_on, "127.0.0.1", 0)
    async with server:
        place = SimpleNamespace(host="127.0.0.1", port=server.sockets[0].getsockname()[1])
        case = Case("raw", (b"POST / HTTP/1.1\r\nContent-Length: 12\r\n\r\nabcdef!ghijk",))
        failure = await try_case(place, case, {})
        figures = ApiFigures(found=[FoundCase(case="1/1", kind="raw", failure=failure, sent=case)] * 2)
        kept = await keep_cases(place, figures, tmp_path)

    assert [read_case(path).sent for path in kept] == [Case("raw", (b"POST / HTTP/1.1\r\nContent-Length: 1\r\n\r\n!",))]

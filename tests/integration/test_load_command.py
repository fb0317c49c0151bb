"""``thermocline load`` against real servers: a whole cell, the null server, and one that dies while it is measured."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cell import Cell, running_cell
from tests.checkpoints import make_checkpoint
from tests.nats_server import NatsServer
from tests.unit.thermocline.load.scripted_server import CARDS, WHOLE
from thermocline.load.__main__ import main
from thermocline.load.report import Report, load

pytestmark = pytest.mark.integration

TRACE_LENGTH_SCALE = 16
ASKED_BEFORE_DEATH = 100


async def bench(folder: Path, *argv: str) -> tuple[int, Report]:
    """Exit code and result of a run."""
    path = folder / "run.json"
    code = await asyncio.to_thread(main, [*argv, "--out", str(path)])
    return code, load(path)


@asynccontextmanager
async def cell_of(folder: Path, url: str) -> AsyncIterator[Cell]:
    """A cell whose pool holds all that is asked here."""
    model = make_checkpoint("llama", folder / "llama")
    async with running_cell(url, model, worker_settings={"page_size": 16, "device_pages": 256}) as cell:
        yield cell


async def test_a_cell_is_measured(tmp_path: Path, nats_server: NatsServer) -> None:
    """Each workload is answered whole, and what the cell says of its cache is what the prompts share."""
    async with cell_of(tmp_path, nats_server.url) as cell:
        line = ("--url", cell.base_url + "/v1", "--concurrency", "2", "--warmup", "2")

        code, documents = await bench(
            tmp_path, *line, "--workload", "documents", "--requests", "12", "--set", "contexts=2",
            "--set", "queries=12", "--set", "prompt_tokens=200", "--set", "answer_tokens=4", "--set", "spread=0",
            "--set", "distance=min", "--slo-ttft-ms", "60000",
        )  # fmt: skip
        assert code == 0
        figures = documents.figures
        assert documents.server.api == "tokens"
        assert (figures.answered, figures.output_tokens, figures.errors) == (12, 48, {})
        assert figures.input_tokens == 12 * 200
        # Of 168 tokens of a document, ten whole pages can be shared; its first two requests come together.
        assert figures.cached_tokens is not None
        assert 8 * 160 <= figures.cached_tokens <= 10 * 160
        assert figures.goodput is not None
        assert figures.goodput.part == 1.0

        code, chat = await bench(
            tmp_path, *line, "--workload", "chat", "--requests", "6", "--set", "turns=1000", "--set", "think_s=0",
            "--set", "answer_tokens=16", "--set", "question_tokens=16", "--set", "spread=0",
        )  # fmt: skip
        assert code == 0
        # Two conversations of three turns: the later ones repeat answers that the cell has just given.
        sizes = sorted(row.prompt_tokens for row in chat.requests)
        assert sizes == [106, 106, 138, 138, 170, 170]
        later = [row.cached_tokens or 0 for row in chat.requests if row.prompt_tokens > 106]
        assert all(cached >= 96 for cached in later)

        for api in ("text", "chat"):
            code, unshared = await bench(
                tmp_path, *line, "--workload", "unshared", "--requests", "4", "--api", api,
                "--set", "prompt_tokens=48", "--set", "answer_tokens=4", "--set", "spread=0",
            )  # fmt: skip
            assert code == 0
            assert [row.output_tokens for row in unshared.requests] == [4] * 4
            # Words are not tokens, but they were counted first.
            assert all(24 <= row.prompt_tokens <= 144 for row in unshared.requests)


async def test_a_trace_is_token_exact(tmp_path: Path, nats_server: NatsServer) -> None:
    """Lengths, shared blocks and times are the trace's, divided by the scales.

    What is shared is seen one request at a time: at its time one may come before the last was computed.
    """
    trace = tmp_path / "trace.jsonl"
    recorded = [
        {"timestamp": 0, "input_length": 1500, "output_length": 32, "hash_ids": [1, 2, 3]},
        {"timestamp": 4000, "input_length": 1024, "output_length": 64, "hash_ids": [1, 2]},
        {"timestamp": 8000, "input_length": 700, "output_length": 16, "hash_ids": [9, 2]},
    ]
    trace.write_text("".join(json.dumps(one) + "\n" for one in recorded))
    async with cell_of(tmp_path, nats_server.url) as cell:
        line = ("--url", cell.base_url, "--trace", str(trace), "--length-scale", str(TRACE_LENGTH_SCALE))
        single_code, single = await bench(tmp_path, *line, "--concurrency", "1")
        timed_code, timed = await bench(tmp_path, *line, "--time-scale", "80")

    assert (single_code, timed_code) == (0, 0)
    for report in (single, timed):
        assert [row.prompt_tokens for row in report.requests] == [32 + 32 + 30, 64, 32 + 12]
        assert [row.output_tokens for row in report.requests] == [2, 4, 1]
    # The last token of a prompt is always computed, so its page is not taken from the cache.
    assert [row.cached_tokens for row in single.requests] == [0, 48, 0]
    assert [row.due_ms for row in timed.requests] == pytest.approx([0.0, 50.0, 100.0])


async def test_the_null_server_shows_the_clients_own_share(tmp_path: Path) -> None:
    """Its answers take what it was told, so that what is above that is the client."""
    code, report = await bench(
        tmp_path, "--null-server", "5", "--workload", "unshared", "--requests", "10", "--rate", "50",
        "--set", "answer_tokens=20", "--set", "spread=0",
    )  # fmt: skip

    assert code == 0
    assert report.figures.output_tokens == 200
    # 19 gaps of 5 ms.
    assert all(row.end_to_end_ms is not None and row.end_to_end_ms >= 95 for row in report.requests)


@pytest.mark.parametrize("way", ["crash", "hang"])
async def test_a_server_that_dies_is_reported_and_not_waited_for(tmp_path: Path, way: str) -> None:
    """After it has answered some: the run ends early, says when, and what was lost and why."""
    asked = 0
    connections: list[asyncio.StreamWriter] = []
    is_over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        connections.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                found = re.search(rb"content-length: (\d+)", head.lower())
                await reader.readexactly(int(found[1]) if found else 0)
                asked += 1
                if asked > ASKED_BEFORE_DEATH and way == "crash":
                    server.close()
                    for each in connections:
                        each.transport.abort()
                elif asked > ASKED_BEFORE_DEATH:
                    await is_over.wait()
                    return
                body = json.dumps(CARDS).encode() if head.startswith(b"GET") else WHOLE
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        except (OSError, EOFError):
            pass  # The client has closed its end, or this side was torn down.
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        code, report = await bench(
            tmp_path, "--url", f"http://127.0.0.1:{port}", "--workload", "unshared", "--requests", "4000",
            "--concurrency", "16", "--warmup", "0", "--timeout-s", "1", "--set", "prompt_tokens=8",
        )  # fmt: skip
        is_over.set()

    figures = report.figures
    assert code == 1
    assert figures.server_gone_after_s is not None
    assert 80 <= figures.answered <= 100
    assert figures.requests < 300
    assert sum(figures.errors.values()) >= 20
    assert set(figures.errors) <= {"connection_refused", "connection_broken", "timeout", "abandoned"}
    assert ("connection_refused" if way == "crash" else "timeout") in figures.errors


async def test_nobody_there_is_a_clear_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and no file of figures."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = tmp_path / "run.json"

    code = await asyncio.to_thread(
        main, ["--url", f"http://127.0.0.1:{port}", "--workload", "burst", "--out", str(path)]
    )

    assert code == 2
    assert "does not answer" in capsys.readouterr().err
    assert not path.exists()

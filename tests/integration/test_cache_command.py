"""``thermocline cache``: what an operator sees of a running cell's cache, and how it is emptied."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.cell import running_cell
from tests.checkpoints import make_checkpoint
from tests.nats_server import NatsServer, free_port
from thermocline.cache.__main__ import main

PROMPT = [20 + number for number in range(100)]


@pytest.mark.integration
async def test_flush_empties_the_cache_and_stat_shows_it(
    tmp_path: Path, nats_server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was cached is hit before the flush and computed again after it."""
    model = make_checkpoint("llama", tmp_path / "llama")
    async with running_cell(nats_server.url, model, worker_settings={"page_size": 16, "device_pages": 64}) as cell:
        await cell.complete(PROMPT, 2)
        hit = await cell.complete(PROMPT, 2)
        await cell.settle()
        assert await asyncio.to_thread(main, ["flush", "--nats", nats_server.url, "--json"]) == 0
        # The cell of this test logs to the same standard output.
        (printed,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
        flushed = json.loads(printed)
        missed = await cell.complete(PROMPT, 2)
        await cell.settle()
        assert await asyncio.to_thread(main, ["stat", "--nats", nats_server.url]) == 0

    assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert sum(pool["cached"] for pool in flushed["pools"]) == 0
    assert missed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    shown = capsys.readouterr().out
    assert "worker-0" in shown
    assert "flushed_pages_device" in shown


@pytest.mark.integration
def test_no_cell_is_a_plain_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no broker answers, one line says so and the exit code is 1."""
    monkeypatch.setattr("thermocline.cache.__main__.PATIENCE_S", 0.3)

    assert main(["stat", "--nats", f"nats://127.0.0.1:{free_port()}"]) == 1
    assert capsys.readouterr().err.startswith("thermocline cache: ")


def test_a_command_line_without_sense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither an unknown verb nor an unknown tier does anything."""
    for arguments in ([], ["burn"], ["flush", "--tier", "moon"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)

        assert ended.value.code == 2

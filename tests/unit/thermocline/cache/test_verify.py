"""``thermocline cache verify`` against a scripted storage."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from services.gateway.cache_calls import CacheCalls
from shared.bus.protocol import StreamLimits
from shared.errors import NotFound
from tests.memory_bus import MemoryBroker
from tests.unit.gateway.scripted_cache import ScriptedCache
from thermocline.cache import verify

CHUNKS = [f"{number:032x}" for number in range(600)]


@pytest.fixture
def said() -> list[str]:
    """Lines of progress."""
    return []


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Any:
    """Runs the verb beside a scripted cell on a memory bus."""

    async def run(script: dict[str, Any], **flags: Any) -> bool:
        broker = MemoryBroker()
        client = broker.connect("cache")
        await client.ensure_streams(StreamLimits())

        @contextlib.asynccontextmanager
        async def watched(broker: object) -> AsyncIterator[tuple[CacheCalls, object]]:
            yield CacheCalls(client), SimpleNamespace(say=said.append)

        monkeypatch.setattr(verify, "watched", watched)
        parser = argparse.ArgumentParser()
        verify.add_arguments(parser)
        arguments = argparse.Namespace(**{**vars(parser.parse_args([])), "json": False, "storage": None, **flags})
        async with ScriptedCache(broker.connect("cell"), **script):
            return await verify.run(arguments)

    return run


async def test_a_whole_disk_is_gone_through(run: Any, said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Call after call, each chunk once, with progress."""
    assert await run({"disk": CHUNKS})
    captured = capsys.readouterr()
    assert captured.out == "storage-0: 600 chunks checked, 600.0 KiB, 0 bad\n"
    assert [line.split()[1] for line in said] == ["256", "512", "600"]


async def test_a_bad_chunk_is_named_and_fails_the_verb(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """On whichever storage; the others are checked all the same."""
    script = {"disk": CHUNKS[:3], "bad": {CHUNKS[1]: "checksum"}, "storages": ("storage-1", "storage-0")}
    assert not await run(script)
    shown = capsys.readouterr().out.splitlines()
    assert not await run(script, json=True)
    report = json.loads(capsys.readouterr().out)

    bad = f"{CHUNKS[1]}: checksum"
    assert shown == [
        "storage-0: 3 chunks checked, 3.0 KiB, 1 bad", f"  bad: {bad}",
        "storage-1: 3 chunks checked, 3.0 KiB, 1 bad", f"  bad: {bad}",
    ]  # fmt: skip
    assert report == {
        "storages": [
            {"storage": name, "checked": 3, "bytes": 3072, "bad": [bad]} for name in ("storage-0", "storage-1")
        ],
        "ok": False,
    }


async def test_one_storage_alone(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Which must be there."""
    assert await run({"disk": [], "storages": ("a", "b")}, storage="b")
    assert capsys.readouterr().out == "b: 0 chunks checked, 0 B, 0 bad\n"
    with pytest.raises(NotFound, match="there are: a, b"):
        await run({"storages": ("a", "b")}, storage="c")


async def test_a_cell_without_storage_has_nothing_bad(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """And says that there was none."""
    assert await run({"storages": ()})
    assert capsys.readouterr().out == "the cell has no storage\n"

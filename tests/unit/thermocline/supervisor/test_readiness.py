"""A cell is announced when a worker of its own has been heard (thermocline/supervisor/readiness.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from thermocline.supervisor import readiness

URL = "http://cell"
DEVICE = {"worker_id": "worker-0", "kind": "cpu", "name": "a processor"}
SERVING = {
    "devices": [DEVICE], "dtype": "float32", "context_tokens": 64, "model_context_tokens": 64, "page_size": 16,
    "page_bytes": 1, "pools": [],
}  # fmt: skip
SILENT = {"component": "worker-0", "what": "worker", "reason": "", "setting": ""}
DISK = {"component": "storage", "what": "disk", "reason": "", "setting": "--disk-dir"}
NOT_READY = {"status": "not_ready", "reasons": ["no worker has joined"]}
OF_AN_EARLIER_CELL = {"status": "degraded", "degraded": [SILENT], "serving": SERVING}
READY = {"status": "degraded", "degraded": [DISK], "serving": SERVING}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the gateway was asked for and said, one answer after the other; the last one stays."""
    said: list[dict[str, Any]] = []
    answers: Iterator[dict[str, Any]] = iter([OF_AN_EARLIER_CELL, NOT_READY, OF_AN_EARLIER_CELL, READY, READY])

    def answer(request: httpx.Request) -> httpx.Response:
        said.append(next(answers))
        return httpx.Response(503 if said[-1] is NOT_READY else 200, json=said[-1])

    def client(admin_key: str = "") -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(answer))

    monkeypatch.setattr(readiness, "client", client)
    monkeypatch.setattr(readiness, "_POLL_S", 0.0)
    return said


def test_workers_of_an_earlier_cell_make_none_ready(asked: list[dict[str, Any]]) -> None:
    """The first answer is 200, by what the stream remembers of a cell that was killed."""
    asyncio.run(readiness.wait_until_ready(URL))

    assert asked == [OF_AN_EARLIER_CELL, NOT_READY, OF_AN_EARLIER_CELL, READY]


def test_what_is_missing_is_told_of_a_cell_that_serves(asked: list[dict[str, Any]]) -> None:
    """Not while it has no worker, or one that has said nothing yet."""
    assert asyncio.run(readiness.degraded_lines(URL)) == ["Degraded: storage, disk (--disk-dir)"]
    assert asked == [OF_AN_EARLIER_CELL, NOT_READY, OF_AN_EARLIER_CELL, READY]

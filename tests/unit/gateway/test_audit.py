"""What the log says of refused keys and of the administration."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from services.gateway.audit import LimitedLines, LineLimit
from services.gateway.keys import key_hash, key_id
from tests.unit.gateway.running_gateway import running_gateway, says

ADMIN = "the-admin-key-of-this-test"


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


async def test_a_refused_key_is_one_line_without_the_key(lines: list[Any]) -> None:
    """Who, what and by which key, as lists name it."""
    async with running_gateway(says("hi"), api_keys=("good-key",), admin_key=ADMIN) as harness:
        for path, headers in (
            ("/v1/completions", {"authorization": "Bearer wrong-key"}),
            ("/v1/completions", {"x-api-key": "wrong-key"}),
            ("/v1/completions", {}),
            ("/v1/cache/stat", {"x-admin-key": "wrong-key"}),
        ):
            await harness.client.post(path, json={"prompt": "secret text"}, headers=headers)

    refused = [line for line in lines if line["event"] == "key_refused"]
    known = key_id(key_hash(b"wrong-key"))
    assert [(line["act"], line["key"]) for line in refused] == [
        ("POST /v1/completions", known),
        ("POST /v1/completions", known),
        ("POST /v1/completions", ""),
        ("POST /v1/cache/stat", known),
    ]
    assert "wrong-key" not in str(lines)
    assert "secret text" not in str(lines)


async def test_an_act_of_the_administration_is_one_line(lines: list[Any]) -> None:
    """With its result; looking is for debugging."""
    async with running_gateway(admin_key=ADMIN) as harness:
        await harness.client.post("/v1/cache/flush", json={"salt": "secret"}, headers={"x-admin-key": ADMIN})
        await harness.client.get("/v1/cell", headers={"x-admin-key": ADMIN})

    acts = [(line["log_level"], line["act"]) for line in lines if line["event"] == "administered"]
    assert acts == [("info", "POST /v1/cache/flush"), ("debug", "GET /v1/cell")]
    assert "secret" not in str(lines)


async def test_of_two_keys_the_one_that_the_path_is_opened_with_is_named(lines: list[Any]) -> None:
    """Else a tenant's key would stand beside an act of the administration."""
    both = {"authorization": "Bearer good-key", "x-admin-key": ADMIN}
    async with running_gateway(says("hi"), api_keys=("good-key",), admin_key=ADMIN) as harness:
        await harness.client.post("/v1/cache/flush", json={"tiers": ["none"]}, headers=both)
        await harness.client.get("/v1/models", headers=both | {"authorization": "Bearer wrong-key"})

    told = {line["event"]: line["key"] for line in lines if line["event"] in ("administered", "key_refused")}
    assert told == {"administered": key_id(key_hash(ADMIN.encode())), "key_refused": key_id(key_hash(b"wrong-key"))}


def test_lines_are_bounded_and_say_how_many_were_left_out() -> None:
    """Strangers decide how often they are refused."""
    now_s = 0.0
    limit = LineLimit(per_minute=2, clock=lambda: now_s)
    first = [limit.take() for _ in range(5)]
    now_s = 60.0

    assert first == [0, 0, None, None, None]
    assert [limit.take() for _ in range(3)] == [3, 0, None]


def test_lines_of_libraries_are_bounded_too() -> None:
    """uvicorn writes one for each request that is no HTTP."""
    now_s = 0.0
    lines = LimitedLines(LineLimit(per_minute=1, clock=lambda: now_s))

    def passes() -> str | None:
        record = logging.LogRecord(
            "uvicorn.error", logging.WARNING, "", 0, "Invalid HTTP request received.", None, None
        )
        return record.getMessage() if lines.filter(record) else None

    before = [passes() for _ in range(3)]
    now_s = 60.0

    assert before == ["Invalid HTTP request received.", None, None]
    assert passes() == "Invalid HTTP request received. (2 more such lines were left out)"

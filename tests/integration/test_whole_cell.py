"""A real cell, every process its own, in front of real clients, bad input and a crowd.

The cell serves a tiny Llama, so what it answers can be held against ``model.generate``.
"""

from __future__ import annotations

import asyncio
import collections
import json
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.idle import settled, status_at
from tests.reference import Reference
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

pytestmark = pytest.mark.integration

CROWD = 10_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def cell(model: Path) -> Iterator[RunningCell]:
    """A float32 cell of five processes."""
    config = SupervisorConfig(
        model=str(model), port=0, dtype="float32", threads=1, device_kv_bytes=2**22, host_kv_bytes=2**24
    )
    with running(config) as running_cell:
        yield running_cell


@pytest.fixture(autouse=True)
def whole(cell: RunningCell) -> Iterator[None]:
    """After every test the cell is idle, has every page, and still answers."""
    yield
    asyncio.run(settled(lambda: status_at(cell.nats_url)))
    with httpx.Client(base_url=cell.base_url, timeout=60, trust_env=False) as client:
        answer = client.post("/v1/completions", json={"model": "llama", "prompt": [9, 8], "max_tokens": 1})
    assert answer.status_code == 200


def test_the_official_client_gets_generates_tokens(cell: RunningCell, model: Path) -> None:
    """Streaming and not, text of the official client is what ``model.generate`` gives."""
    client = openai.OpenAI(base_url=f"{cell.base_url}/v1", api_key="none")
    rng = random.Random(1)
    reference = Reference(model)
    prompt = reference.decided(lambda: [rng.randrange(8, VOCAB_SIZE) for _ in range(40)], 20)
    expected = reference.greedy(prompt, 20)

    whole = client.completions.create(
        model="llama", prompt=prompt, max_tokens=20, temperature=0, extra_body={"return_token_ids": True}
    )
    stream = client.completions.create(
        model="llama", prompt=prompt, max_tokens=20, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    chat = client.chat.completions.create(
        model="llama", messages=[{"role": "user", "content": "hello there"}], max_tokens=8, temperature=0
    )

    assert whole.choices[0].token_ids == expected  # type: ignore[attr-defined]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 32
    assert chat.choices[0].message.content is not None


GOOD = {"model": "llama", "prompt": [9, 8, 7], "max_tokens": 2}

JSON = {"content-type": "application/json"}

BAD_BODIES: list[tuple[bytes, int, str]] = [
    (b'{"model": "llama", ', 400, "invalid_json"),
    (json.dumps(GOOD | {"prompt": [5, 10**9]}).encode(), 400, ""),
    (json.dumps(GOOD | {"prompt": [9] * 5000}).encode(), 400, "context_length_exceeded"),
    (json.dumps(GOOD | {"model": "unknown"}).encode(), 404, "model_not_found"),
    (json.dumps(GOOD | {"top_p": float("inf")}).encode(), 400, ""),
]


def test_bad_input_gets_a_typed_error(cell: RunningCell) -> None:
    """With its status and OpenAI's error shape; nothing else happens. All kinds are in ``test_gateway_errors.py``."""
    for body, status, code in BAD_BODIES:
        answer = httpx.post(f"{cell.base_url}/v1/completions", content=body, headers=JSON, timeout=60, trust_env=False)

        error = answer.json()["error"]
        assert (answer.status_code, set(error)) == (status, {"message", "type", "param", "code"}), answer.text
        assert error["message"]
        assert code in (error["code"], "")


async def _one_of_a_crowd(port: int, opening: asyncio.Semaphore, start: asyncio.Event, opened: list[int]) -> str:
    async with opening:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    opened.append(1)
    await start.wait()
    body = json.dumps(GOOD | {"max_tokens": 1}).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", "Connection: close"]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    status = answer.split(b" ", 2)[1].decode()
    payload: dict[str, Any] = json.loads(answer.split(b"\r\n\r\n", 1)[1])
    if status == "200":
        assert len(payload["choices"]) == 1
        return status
    assert b"retry-after:" in answer.lower()
    return f"{status} {payload['error']['code']}"


async def _crowd(port: int) -> collections.Counter[str]:
    """Answers to ``CROWD`` requests on as many connections, all open before the first is sent."""
    opening, start, opened = asyncio.Semaphore(256), asyncio.Event(), list[int]()
    async with asyncio.timeout(240), asyncio.TaskGroup() as group:
        tasks = [group.create_task(_one_of_a_crowd(port, opening, start, opened)) for _ in range(CROWD)]
        while len(opened) < CROWD:
            await asyncio.sleep(0.05)
        start.set()
    return collections.Counter(task.result() for task in tasks)


def test_ten_thousand_connections_get_typed_answers(cell: RunningCell) -> None:
    """With 10,000 connections open at once, every request is answered or refused with Retry-After.

    As many as the cell takes are accepted; a machine that is busy with other work may store some of them too late.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < CROWD + 500:
        pytest.fail(f"this machine allows {hard} open files; the test needs {CROWD + 500}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        answers = asyncio.run(_crowd(int(cell.base_url.rpartition(":")[2])))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert sum(answers.values()) == CROWD
    assert set(answers) <= {"200", "429 too_many_requests", "429 queue_full", "503 service_unavailable"}, answers
    assert answers["200"] + answers["503 service_unavailable"] >= 1024
    assert answers["200"]

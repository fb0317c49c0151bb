"""What a request costs its tenant before it is submitted, and what is left of it at its end."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from services.gateway.keys import key_hash, new_key
from services.gateway.pending import Choice
from services.gateway.tenants import Tenant, render_tenants
from tests.unit.gateway.running_gateway import running_gateway, says
from tests.waiting import until

LIMIT = 10_000
TOKENS = 100


def alive(kind: type) -> int:
    """Number of objects of a type that are not freed. Asking an object for its class may run code of a library."""
    return sum(type(each) is kind for each in gc.get_objects())


@pytest.mark.parametrize(
    ("fields", "times"),
    [
        ({}, 1),
        ({"n": 4}, 1),
        ({"n": 4, "cache": {"read": False}}, 4),
        ({"n": 4, "cache": {"write": False}}, 4),
        ({"n": 4, "prompt_logprobs": 1}, 4),
        ({"n": 4, "echo": True, "logprobs": 1}, 4),
        ({"cache": {"read": False}}, 1),
    ],
)
async def test_a_prompt_counts_as_often_as_it_is_computed(fields: dict[str, Any], times: int, tmp_path: Path) -> None:
    """Once for choices that share it in the cache, and otherwise for each of them."""
    key, tenants = new_key(), tmp_path / "tenants.toml"
    limited = Tenant(salt="a" * 16, keys=(key_hash(key.encode()),), tokens_per_minute=LIMIT)
    tenants.write_text(render_tenants({"a": limited}))
    tenants.chmod(0o600)
    body = {"prompt": [5] * TOKENS, "max_tokens": 1, **fields}
    async with running_gateway(says("x"), tenants=str(tenants), limits_clock=lambda: 0.0) as harness:
        await harness.client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        account = harness.gateway.callers.account("a")
        assert account is not None
        assert account.tokens is not None
        answers = fields.get("n", 1)

        assert LIMIT - account.tokens.remaining(0.0) == TOKENS * times + answers


@pytest.mark.parametrize("fields", [{}, {"stream": True}], ids=["whole", "streamed"])
async def test_an_answer_is_freed_at_its_end(fields: dict[str, Any]) -> None:
    """Without the collector, which seldom looks at old objects: prompts would stay for many thousand requests."""
    async with running_gateway(says("x"), over_http=True) as harness:
        gc.collect()
        gc.disable()
        before = alive(Choice), alive(RequestResponseCycle)  # Those that a failed test's traceback holds.
        try:
            for _ in range(3):
                answer = await harness.client.post("/v1/completions", json={"prompt": [5] * TOKENS, "n": 2, **fields})
                assert answer.is_success
            # The connection refers to the last one.
            await until(lambda: alive(Choice) <= before[0] and alive(RequestResponseCycle) <= before[1] + 1)
        finally:
            gc.enable()

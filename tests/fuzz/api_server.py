"""What the API's cases are sent to: a gateway over a scripted cell, in this process, that can be looked into."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.gateway import metrics
from services.gateway.openai_schema.chat import REFUSED_CHAT_FIELDS
from services.gateway.openai_schema.sampling import REFUSED_FIELDS
from shared import subjects
from tests.fuzz.api_cases import ADMIN_KEY
from tests.fuzz.heard import Heard, listening
from tests.unit.gateway.running_gateway import Harness, running_gateway, says
from tests.unit.gateway.scripted_cache import ScriptedCache, node
from tests.waiting import until

ANNOUNCED_EVERY_S = 0.5
ANSWER = "Once upon a time there was a small gateway."

_HINTS: dict[str, list[Any]] = {
    "prompt": ["Once upon a time", "a", ["a", "b"], [1, 2, 3], [[1, 2], [3]]],
    "messages": [[{"role": "user", "content": "Hello."}]],
    "input": ["Hello.", [{"role": "user", "content": "Hello."}]],
    "system": ["Be short.", [{"type": "text", "text": "Be short."}], None],
    "max_tokens": [1, 2, 5],
    "max_output_tokens": [1, 3, None],
    "truncation": [None, "disabled"],
    "text": [None, {"format": {"type": "text"}}],
    "max_completion_tokens": [1, 3],
    "n": [1, 1, 2],
    "best_of": [1, 2],
    "min_tokens": [0, 1],
    "stream_options": [None, {"include_usage": True}],
    "deadline_ms": [60_000, 1],
    "tenant": [None, "nobody"],
    "tokens": [[1, 2, 3], []],
    "name": ["pin-1", None],
    "ttl_s": [1, 0.5],
    "seed": [0, None],
    "cache": [None, {"read": False}, {"write": False}],
    "response_format": [None, {"type": "text"}, {"type": "json_object"}],
    "guided_json": [None],
    "guided_regex": [None, None, "[ab]+"],
    "guided_choice": [None],
    "guided_grammar": [None],
    "structured_outputs": [None],
    "stop_token_ids": [[], [5]],
    "logit_bias": [None, {"5": 1.0}],
    # What is refused whatever else is asked would leave little to be served.
    **{
        name: [None]
        for name in (
            *REFUSED_FIELDS,
            *REFUSED_CHAT_FIELDS,
            *("suffix", "modalities", "tools", "chat_template_kwargs", "thread", "compaction", "fallbacks"),
            *("container", "context_management", "mcp_servers", "background", "conversation", "output_format"),
            *("tool_choice", "output_config", "previous_response_id", "reasoning_effort"),
        )
    },
}


def hints_for(model: str) -> dict[str, list[Any]]:
    """Good values of fields, for a gateway that serves ``model``."""
    return {"model": [model, model, None], **_HINTS}


@dataclass
class ScriptedServer:
    """The gateway under test. Satisfies ``api_run.Server``."""

    harness: Harness
    heard: Heard
    host: str
    port: int
    hints: dict[str, list[Any]]

    async def document(self) -> dict[str, Any]:
        """The OpenAPI document."""
        answer = await self.harness.client.get("/openapi.json")
        described: dict[str, Any] = answer.json()
        return described

    async def at_rest(self) -> str:
        """Wait until nothing is in progress, and forget what only the script remembers. What is left, or ""."""
        gateway = self.harness.gateway
        try:
            await until(lambda: not len(gateway.dispatcher.pending) and not gateway.slots.used and not _open(), 20)
        except TimeoutError:
            choices, slots = len(gateway.dispatcher.pending), gateway.slots.used
            return f"leaves {choices} choices, {slots} slots, {_open():g} connections"
        cell = self.harness.cell
        for remembered in (cell.submitted, cell.cancelled, cell.resumed, cell.reclaimed):
            remembered.clear()
        cell.steps.clear()
        cell.finishes.clear()
        broker = self.harness.bus._broker
        stream = broker.stream(subjects.INPUTS_STREAM)
        broker.drop_oldest(subjects.INPUTS_STREAM, max(0, len(stream.messages) - 100))
        stream.seen.clear()
        broker.forget_answers(">")
        gc.collect()
        return ""


def _open() -> float:
    return metrics.CONNECTIONS_OPEN._value.get()  # type: ignore[no-any-return]


def resident_bytes() -> int:
    """Memory of this process that is not swapped out."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@contextlib.asynccontextmanager
async def scripted_server() -> AsyncIterator[ScriptedServer]:
    """A gateway on a free port, beside a cell and a cache that answer by script."""
    with listening() as heard:
        async with running_gateway(says(ANSWER), over_http=True, admin_key=ADMIN_KEY, body_timeout_ms=2_000) as harness:
            cache = ScriptedCache(harness.cell.bus, nodes=[node(1), node(2, 1)], disk=["a/1", "a/2"])
            announcing = asyncio.create_task(_announce(harness, cache))
            try:
                async with cache:
                    host, _, port = harness.base_url.removeprefix("http://").partition(":")
                    yield ScriptedServer(harness, heard, host, int(port), hints_for("test-model"))
            finally:
                announcing.cancel()
                await asyncio.gather(announcing, return_exceptions=True)


async def _announce(harness: Harness, cache: ScriptedCache) -> None:
    """As an active scheduler does; and a cache that is told a lot does not grow."""
    while True:
        await harness.cell.announce()
        for remembered in (cache.orders, cache.calls):
            remembered.clear()
        if len(cache.pins) > 50:
            cache.pins.clear()
        await asyncio.sleep(ANNOUNCED_EVERY_S)

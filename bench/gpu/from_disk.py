"""TTFT of a question about a document that is on the disk alone, by the way in which it comes back.

Recomputed; as KV, all of it; as KV, the important part of it (which is lossy); from hidden states. A document is asked
about once and kept, then every tier above the disk is emptied before each question.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from bench.emptying import empty, rest
from bench.gpu.served_cases import PLAIN
from bench.restoration import hidden_pool
from services.gateway.cache_calls import CacheCalls
from shared import subjects
from shared.bus.protocol import Bus
from shared.codec import encode
from shared.ids import new_id
from shared.messages.cell_events import CellConfig, CellConfigured
from shared.messages.pools import HIDDEN
from thermocline.client import served_model
from thermocline.client.stream import SOURCES, Answer, stream_answer

QUESTION_TOKENS = 32
KEEPING = msgspec.structs.replace(PLAIN, disk_writes="through", prefetch_wait="full", fetch_deadline_ms=600_000)


@dataclass(frozen=True, slots=True)
class Way:
    """How a document is kept (``hidden_form``), how it comes back (``restoring``), and what share of it."""

    name: str
    hidden_form: str
    restoring: str
    share: float = 0.0  # 0: all.

    @property
    def config(self) -> CellConfig:
        return msgspec.structs.replace(KEEPING, hidden_form=self.hidden_form, restoring=self.restoring)

    @property
    def cache(self) -> dict[str, Any]:
        return {"fidelity": "importance", "ratio": self.share} if self.share else {}


def ways(layers: int) -> list[Way]:
    """All of them; those that are kept alike stand together."""
    return [
        Way("recomputed", "off", "recompute"),
        Way("as KV", "off", "kv"),
        Way("the important quarter", "off", "planned", 0.25),
        Way("the important tenth", "off", "planned", 0.1),
        Way("from hidden states", f"0/{layers}/0", HIDDEN),
    ]


async def configure(bus: Bus, config: CellConfig) -> None:
    """Have the cell decide by ``config`` from now on, and wait until it rests."""
    seq = await bus.append(subjects.cell_input(), encode(CellConfigured(config=config)), message_id=new_id("bench"))
    await rest(bus, seq=seq)


async def measure(
    bus: Bus, base_url: str, *, layers: int, tokens: int, rounds: int, each: Callable[[list[Way]], Iterator[Way]]
) -> list[dict[str, Any]]:
    """TTFT by way, milliseconds. ``each`` says which of them there is time for."""
    rng = random.Random(1)
    document = [rng.randrange(8, 500) for _ in range(tokens)]
    found, kept_as = [], ""
    async with httpx.AsyncClient(base_url=base_url, timeout=600, trust_env=False) as client:
        model = (await served_model(client))["id"]
        for way in each(ways(layers)):
            await configure(bus, way.config)
            if kept_as != way.hidden_form:
                if way.hidden_form != "off":
                    await hidden_pool(bus)
                await empty(bus, ("device", "host", "disk"))
                await _ask(client, model, document, rng, {})
                await rest(bus)
                kept_as = way.hidden_form
            times, sources, lossy = [], [], 0
            for _ in range(rounds):
                await empty(bus, ("device", "host"))
                answer = await _ask(client, model, document, rng, way.cache)
                times.append(answer.ttft_s * 1e3)
                sources.append({name: n for name in SOURCES if (n := getattr(answer, f"{name}_tokens"))})
                lossy += answer.importance is not None
                await rest(bus)
            status = await CacheCalls(bus).status()
            forms = sorted({pool.form for pool in status.pools if pool.form})
            found.append({"way": way.name, "ttft_ms": times, "found_tokens": sources, "lossy": lossy, "forms": forms})
    return found


async def _ask(
    client: httpx.AsyncClient, model: str, document: list[int], rng: random.Random, cache: dict[str, Any]
) -> Answer:
    """One token of an answer to a new question."""
    question = [rng.randrange(8, 500) for _ in range(QUESTION_TOKENS)]
    body: dict[str, Any] = {"model": model, "prompt": document + question, "max_tokens": 1, "temperature": 0}
    more = {"ignore_eos": True, "return_token_ids": True} | ({"cache": cache} if cache else {})
    return await stream_answer(client, "/v1/completions", body | more)

"""A real cell says of a request where its time went and where each part of its prompt came from, and it is so."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.cell import Cell, running_cell
from tests.checkpoints import VOCAB_SIZE
from tests.held_steps import held_steps
from tests.integration.test_restoration_paths import hidden_cell, write_costs
from tests.integration.test_restoration_paths import settings as hidden_settings
from tests.integration.test_tier_paths import storage_settings
from tests.nats_server import NatsServer
from tests.reference import Reference

pytestmark = pytest.mark.integration

PAGE = 16
DOCUMENT = 192
PROMPT = 201
KEY = "an-admin-key-of-some-length"
ADMIN = {"x-admin-key": KEY}
WAITS = {"host_writes": "through", "prefetch_wait": "full"}
WORKER = {"page_size": PAGE, "device_pages": 64}

Spans = list[tuple[int, int, str, str | None]]


class Asker:
    """Asks questions about one document, and checks what holds of every explanation."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self._rng = random.Random(seed)
        self.cell = cell
        self.document = self.fresh(DOCUMENT)

    def fresh(self, tokens: int) -> list[int]:
        return [self._rng.randrange(8, VOCAB_SIZE) for _ in range(tokens)]

    async def ask(self, **extra: Any) -> dict[str, Any]:
        """The explanation of a new question about the document; the cell is at rest afterwards."""
        answer = await self.cell.complete(self.document + self.fresh(PROMPT - DOCUMENT), 4, explain=True, **extra)
        await self.cell.settle()
        explanation: dict[str, Any] = answer["explanation"]
        check(explanation, answer["usage"])
        return explanation


def check(explanation: dict[str, Any], usage: dict[str, Any]) -> None:
    """Its parts make up the time to first token; its spans cover the prompt and agree with usage."""
    parts, at_ms = explanation["parts"], 0.0
    for part in parts:
        assert part["ms"] > 0
        assert part["start_ms"] == pytest.approx(at_ms, abs=1e-3)
        at_ms = part["start_ms"] + part["ms"]
    assert at_ms == pytest.approx(explanation["ttft_ms"], rel=0.05)
    assert explanation["ttft_ms"] <= explanation["total_ms"]
    found: dict[str, int] = {}
    end = 0
    for span in explanation["prompt"]:
        assert span["start"] == end < span["end"]
        assert (span["reason"] is None) == (span["source"] != "computed")
        end = span["end"]
        found[span["source"]] = found.get(span["source"], 0) + end - span["start"]
    assert end == usage["prompt_tokens"] == explanation["prompt_tokens"]
    found.pop("computed", None)
    details = {name.removesuffix("_tokens"): count for name, count in usage["prompt_tokens_details"].items()}
    assert found == {name: count for name, count in details.items() if count and name not in ("cached", "cache_write")}


def spans(explanation: dict[str, Any]) -> Spans:
    return [(span["start"], span["end"], span["source"], span["reason"]) for span in explanation["prompt"]]


def names(explanation: dict[str, Any]) -> list[str]:
    return [part["name"] for part in explanation["parts"]]


async def test_every_way_of_a_prompt_is_told(
    checkpoints: dict[str, tuple[Path, Reference]], nats_server: NatsServer, tmp_path: Path
) -> None:
    """Computed, on the device, in host memory, on the disk, in the object store, and left aside by choice."""
    model, _ = checkpoints["llama"]
    async with running_cell(
        nats_server.url, model, worker_settings=WORKER, scheduler_settings=WAITS,
        storage_settings=storage_settings(tmp_path), gateway_settings={"admin_key": KEY},
    ) as cell:  # fmt: skip
        asker = Asker(cell, 1)
        tail: Spans = [(192, 201, "computed", "partial_chunk")]

        fresh = await asker.ask()
        assert spans(fresh) == [(0, 192, "computed", "never_stored"), *tail]
        assert names(fresh)[0] == "accept"
        assert names(fresh)[-2:] == ["compute", "deliver"]
        assert (fresh["state"], fresh["finish_reason"], fresh["endpoint"], fresh["workers"]) == (
            "finished", "length", "/v1/completions", ["worker-0"],
        )  # fmt: skip
        assert spans(await asker.ask()) == [(0, 192, "device", None), *tail]
        await cell.flush("device")
        loaded = await asker.ask()
        assert spans(loaded) == [(0, 192, "host", None), *tail]
        assert "load" in names(loaded)
        await cell.flush("device", "host")
        fetched = await asker.ask()
        assert spans(fetched) == [(0, 192, "disk", None), *tail]
        assert "prefetch_wait" in names(fetched)
        await cell.flush("device", "host", "disk")
        assert spans(await asker.ask()) == [(0, 192, "remote", None), *tail]
        assert spans(await asker.ask(cache={"read": False})) == [(0, 201, "computed", "opted_out")]

        salted = await asker.ask(cache_salt="another tenant")
        assert spans(salted)[0] == (0, 192, "computed", "never_stored")
        path = f"/v1/requests/{salted['request_id']}/explain"
        seen = (await cell.http.get(path, headers=ADMIN)).json()
        own = (await cell.http.get(path)).json()
        assert (spans(seen)[0][3], spans(own)[0][3]) == ("other_salt", "never_stored")
        listed = (await cell.http.get("/v1/requests", params={"limit": 3}, headers=ADMIN)).json()
        assert listed["data"][0]["request_id"] == salted["request_id"]
        assert (len(listed["data"]), listed["has_more"]) == (3, True)
        assert (await cell.http.get("/v1/cell", headers=ADMIN)).json()["workers"][0]["worker_id"] == "worker-0"

        # A stream has it in a last chunk without choices, under the id of the HTTP response.
        body = {"model": cell.model, "prompt": [9] * PROMPT, "max_tokens": 3, "stream": True, "explain": True}
        response = await cell.http.post("/v1/completions", json=body)
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        assert '"choices":[]' in events[-1]
        assert f'"id":"{response.headers["x-request-id"]}"' in events[-1]
        assert '"object":"request.explanation"' in events[-1]


async def test_who_waits_for_another_is_told_so(
    checkpoints: dict[str, tuple[Path, Reference]], nats_server: NatsServer
) -> None:
    """Of several questions about a new document one computes it, and the others were deferred until it had."""
    model, _ = checkpoints["llama"]
    scheduler = {"defer_tokens": 16, "max_batch_tokens": 64}
    async with running_cell(nats_server.url, model, worker_settings=WORKER, scheduler_settings=scheduler) as cell:
        asker = Asker(cell, 2)
        prompts = [asker.document + asker.fresh(9) for _ in range(4)]
        # A question that arrives after the document was computed would find it, and wait for nothing.
        with held_steps():
            asked = asyncio.gather(*(cell.complete(prompt, 4, explain=True) for prompt in prompts))
            await cell.knows_of(len(prompts))
        answers = await asked

    for answer in answers:
        check(answer["explanation"], answer["usage"])
    waited = ["deferral" in names(answer["explanation"]) for answer in answers]
    computed = [spans(answer["explanation"])[0][2] == "computed" for answer in answers]
    assert any(waited)
    assert any(computed)
    assert all(is_waiting != is_computing for is_waiting, is_computing in zip(waited, computed, strict=True))


async def test_how_a_prefix_left_is_told(
    checkpoints: dict[str, tuple[Path, Reference]], nats_server: NatsServer
) -> None:
    """Evicted, with the tier that it left last, the policy and when; or flushed."""
    model, _ = checkpoints["llama"]
    scheduler = {"policy": "lru", "admission": "none"}
    worker = WORKER | {"device_pages": 32}
    async with running_cell(nats_server.url, model, worker_settings=worker, scheduler_settings=scheduler) as cell:
        asker = Asker(cell, 3)
        await asker.ask()
        for _ in range(3):
            await cell.complete(asker.fresh(PROMPT), 4)
        again = await asker.ask()
        await cell.flush("device", "host")
        flushed = await asker.ask()

    assert spans(again)[0][2:] == ("computed", "evicted")
    assert spans(flushed)[0] == (0, 192, "computed", "evicted")
    assert "flushed from device memory" in flushed["prompt"][0]["detail"]
    assert "from device memory by policy lru" in again["prompt"][0]["detail"]


async def test_restored_spans_are_told(
    checkpoints: dict[str, tuple[Path, Reference]], nats_server: NatsServer, tmp_path: Path
) -> None:
    """What came back from hidden states, and how long that took."""
    model, _ = checkpoints["llama_mha"]
    profile = write_costs(model, tmp_path / "profile.json", PAGE)
    async with hidden_cell(nats_server.url, model, hidden_settings(profile, tmp_path, PAGE, "0/3/0")) as cell:
        asker = Asker(cell, 4)
        await asker.ask()
        await cell.flush("device", "host")
        again = await asker.ask()

    assert spans(again)[0] == (0, 192, "hidden", None)
    assert "restore" in names(again)
    assert (again["divergence"]["kind"], again["divergence"]["token"]) == ("continued", 192)

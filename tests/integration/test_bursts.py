"""Bursts on one document compute it once, and loads from host memory leave no hole in the answers of others.

Whole cells behind their HTTP API; what was computed, loaded and decoded is counted at the worker.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from transformers import LlamaConfig

from services.worker import bubble
from services.worker.kv.layer_gate import LayerGate
from shared import metrics
from tests.cell import Cell, running_cell
from tests.checkpoints import MAX_POSITIONS, VOCAB_SIZE, save_checkpoint
from tests.integration.conftest import Checkpoints
from tests.nats_server import NatsServer
from tests.reference import Reference

pytestmark = pytest.mark.integration

PAGE_SIZE = 16
BURST = 12
ANSWER = 8
DOCUMENT_TOKENS = 1984
QUESTION_TOKENS = 24
DECODED_TOKENS = 300


def draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(8, VOCAB_SIZE) for _ in range(count)]


async def ask(
    cell: Cell, reference: Reference, prompt: list[int], max_tokens: int, *, ignore_eos: bool = False
) -> dict[str, Any]:
    """Ask and compare with the reference; returns the usage details."""
    answer = await cell.complete(prompt, max_tokens, ignore_eos=ignore_eos)
    assert answer["choices"][0]["token_ids"] == reference.greedy(prompt, max_tokens, ignore_eos=ignore_eos)
    details: dict[str, Any] = answer["usage"]["prompt_tokens_details"]
    return details


async def counted(cell: Cell, name: str) -> int:
    return (await cell.inventory()).counters.get(name, 0)


async def test_a_burst_on_a_new_document_computes_it_once(checkpoints: Checkpoints, nats_server: NatsServer) -> None:
    """Requests at once over 2k tokens that nobody has asked about: one computes them, the others wait for it."""
    model, reference = checkpoints["llama"]
    rng = random.Random(32)
    document = draw(rng, DOCUMENT_TOKENS)
    prompts = [reference.decided(lambda: document + draw(rng, QUESTION_TOKENS), ANSWER) for _ in range(BURST)]
    worker = {"page_size": PAGE_SIZE, "device_pages": 1024}
    async with running_cell(nats_server.url, model, worker_settings=worker) as cell:
        usages = await asyncio.gather(*(ask(cell, reference, prompt, ANSWER) for prompt in prompts))
        computed = await counted(cell, "prefill_tokens_computed")
        status = await cell.settle()

    assert len(document) <= computed <= len(document) + BURST * (QUESTION_TOKENS + PAGE_SIZE)
    assert sorted(usage["cached_tokens"] for usage in usages)[1:] == [DOCUMENT_TOKENS] * (BURST - 1)
    assert status.counters["requests_deferred"] > 0


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """A model with 24 KiB of KV a token: a document's load takes many times as long as a decode step."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = save_checkpoint(config, tmp_path_factory.mktemp("wide"), seed=4)
    return model, Reference(model)


@pytest.mark.parametrize("bubble_filling", [True, False])
async def test_a_loading_batch_is_filled_with_decode_steps(
    wide: tuple[Path, Reference], nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, bubble_filling: bool
) -> None:
    """A document comes back from host memory while another answer is decoded: both are exact, and with bubble filling
    tokens are decoded while it loads.
    """
    if bubble_filling:
        load_no_faster_than_decoding(monkeypatch)
    model, reference = wide
    rng = random.Random(7)
    document = draw(rng, 1600)
    questions = [reference.decided(lambda: document + draw(rng, QUESTION_TOKENS), ANSWER) for _ in range(2)]
    fillers = [reference.decided(lambda: draw(rng, 1200), 2) for _ in range(3)]
    other = reference.decided(lambda: draw(rng, 40), DECODED_TOKENS, ignore_eos=True)
    worker = {"page_size": PAGE_SIZE, "device_pages": 200}
    # Under LRU the fillers drive all of the document out of the device, whatever the timing.
    scheduler = {"bubble_filling": bubble_filling, "load_compute_ratio": 1.0, "policy": "lru"}
    before = bubble_metrics()
    async with running_cell(
        nats_server.url, model, worker_settings=worker, scheduler_settings=scheduler, host_kv_bytes=2**28
    ) as cell:
        await ask(cell, reference, questions[0], ANSWER)
        for filler in fillers:
            await ask(cell, reference, filler, 2)  # Pushes the document out of the device.
            await cell.settle()
        decoded = await counted(cell, "decode_tokens")
        beside = asyncio.create_task(ask(cell, reference, other, DECODED_TOKENS, ignore_eos=True))
        async with asyncio.timeout(60):
            while await counted(cell, "decode_tokens") < decoded + 5:
                await asyncio.sleep(0.005)
        usage = await ask(cell, reference, questions[1], ANSWER)
        was_decoding = not beside.done()
        await beside
        counters = (await cell.inventory()).counters

    assert was_decoding
    assert usage["host_tokens"] == len(document)
    assert counters["pages_loaded"] == len(document) // PAGE_SIZE
    after = bubble_metrics()
    grown = {name: after[name] - before[name] for name in after}
    if bubble_filling:
        assert counters["bubble_tokens"] > 0
        assert counters["bubble_us"] > 0
        assert grown["thermocline_worker_bubble_tokens_total"] == counters["bubble_tokens"]
        assert grown["thermocline_worker_bubble_seconds_total"] > 0
    else:
        assert counters["bubble_tokens"] == counters["bubble_us"] == 0
        assert grown["thermocline_worker_bubble_tokens_total"] == 0


def load_no_faster_than_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer of a load that leaves a bubble lands only when something was decoded in that bubble."""
    decoded = threading.Event()
    fill, release = bubble.fill, LayerGate.release

    def watched(
        transfer: Any, rows: int, pace: bubble.Pace, decode: Callable[[], int], clock: Any, prefill: Any
    ) -> bubble.Bubble:
        def step() -> int:
            tokens = decode()
            decoded.set()
            return tokens

        return fill(transfer, rows, pace, step, clock, prefill)

    def held(gate: LayerGate, layer: int) -> None:
        decoded.wait(60)
        release(gate, layer)

    monkeypatch.setattr(bubble, "fill", watched)
    monkeypatch.setattr(LayerGate, "release", held)


def bubble_metrics() -> dict[str, float]:
    """What this process, which is the worker too, shows of bubbles to Prometheus."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.name.startswith("thermocline_worker_bubble") and sample.name.endswith("_total")
    }

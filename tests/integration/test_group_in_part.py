"""A cell over HTTP whose worker is a group of two ranks reads the prefixes of lossy requests in part."""

from __future__ import annotations

import asyncio
import random
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from services.storage.sparse.format import MAGIC
from tests.cell import Cell, running_cell
from tests.checkpoints import VOCAB_SIZE
from tests.integration.test_tier_paths import damage
from tests.nats_server import NatsServer
from tests.reference import Reference

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

DOCUMENT_TOKENS = 256
ANSWER_TOKENS = 8
LOSSY = {"fidelity": "importance", "ratio": 0.02}
LOADED = 6
"""Tokens of the document that this is. Copies are read in blocks of 16 tokens, of which these lie in 6 at the most."""
TOKEN_BYTES = 3 * 2 * 4 * 16 * 4
"""K and V of a token of the checkpoint: three layers, four heads, float32."""


def group_cell(broker: NatsServer, model: Path, folder: Path) -> AbstractAsyncContextManager[Cell]:
    """A cell of one group that keeps what can be read in part in ``folder``, and always reads it so."""
    folder.mkdir(exist_ok=True)
    return running_cell(
        broker.url,
        model,
        worker_settings={"page_size": 16, "device_pages": 64, "tensor_parallel": 2, "importance_probe_heads": 1},
        scheduler_settings={"prefetch_wait": "full", "restoring": "important", "importance_caching": False},
        storage_settings={"disk_dir": (str(folder),), "disk_kv_bytes": 64 * 2**20, "sparse": True},
        gateway_settings={"importance": "on", "importance_probe_heads": 1},
    )


async def has_copies(cell: Cell, count: int) -> None:
    """Wait until the scheduler knows of so many chunks that can be read in part."""
    async with asyncio.timeout(120):
        while (await cell.status()).sparse_chunks < count:
            await asyncio.sleep(0.01)


async def test_a_group_reads_prefixes_of_lossy_requests_in_part(
    checkpoints: dict[str, tuple[Path, Reference]], nats_server: NatsServer, second_broker: NatsServer, tmp_path: Path
) -> None:
    """Of a document that an earlier cell saved it reads fewer bytes than all, which usage says. Exact requests read
    nothing in part, before and after. Copies that are damaged cost the request nothing but time: it is computed.
    """
    model, reference = checkpoints["llama_mha"]
    rng = random.Random(5)
    document = [rng.randrange(8, VOCAB_SIZE) for _ in range(DOCUMENT_TOKENS)]

    def question() -> list[int]:
        """The document and a question to whose exact answer rounding decides no token."""
        return reference.decided(
            lambda: document + [rng.randrange(8, VOCAB_SIZE) for _ in range(9)], ANSWER_TOKENS, ignore_eos=True
        )

    async def asked(cell: Cell, prompt: list[int], **more: Any) -> dict[str, Any]:
        """An answer, once nothing moves any more."""
        answer = await cell.complete(prompt, ANSWER_TOKENS, ignore_eos=True, **more)
        await cell.settle()
        return answer

    def is_exact(answer: dict[str, Any], prompt: list[int]) -> bool:
        expected = reference.greedy(prompt, ANSWER_TOKENS, ignore_eos=True)
        return answer["usage"].get("importance") is None and answer["choices"][0]["token_ids"] == expected

    async with group_cell(nats_server, model, tmp_path / "disk") as cell:
        prompt = question()
        assert is_exact(await asked(cell, prompt), prompt)
        await has_copies(cell, DOCUMENT_TOKENS // 64)
    async with group_cell(second_broker, model, tmp_path / "disk") as cell:
        await has_copies(cell, DOCUMENT_TOKENS // 64)
        prompt = question()
        answer = await asked(cell, prompt, cache=LOSSY)
        usage = answer["usage"]["importance"]
        counters = (await cell.inventory()).counters
        assert (usage["prefix_tokens"], usage["loaded_tokens"], usage["layers"]) == (DOCUMENT_TOKENS, LOADED, 3)
        assert 0 < usage["disk_bytes"] < DOCUMENT_TOKENS * TOKEN_BYTES
        assert (counters["sparse_prefixes_loaded"], counters["sparse_prefixes_refused"]) == (1, 0)
        assert counters["sparse_disk_bytes"] == usage["disk_bytes"]
        assert len(answer["choices"][0]["token_ids"]) == ANSWER_TOKENS

        damage([file for file in (tmp_path / "disk").rglob("*.chunk") if file.read_bytes().startswith(MAGIC)], "cut")
        prompt = question()
        assert is_exact(await asked(cell, prompt, cache=LOSSY), prompt)
        prompt = question()
        assert is_exact(await asked(cell, prompt), prompt)
        counters = (await cell.inventory()).counters
        assert (counters["sparse_prefixes_loaded"], counters["sparse_prefixes_refused"]) == (1, 1)
        assert (await cell.status()).counters.get("workers_lost", 0) == 0

"""Served greedy answers are ``model.generate``'s, token for token, whatever happens around a request.

Every case is a whole cell behind its HTTP API. Prefill tokens really computed are counted at the worker, so a
reuse that is only claimed would be seen.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.cell import running_cell
from tests.checkpoints import FAMILIES
from tests.integration.exact_scenario import DEVICE_TOKENS, DOCUMENT_TOKENS, SCHEDULER, Scenario, survive_all
from tests.nats_server import NatsServer
from tests.reference import Reference
from tests.small_blocks import small_blocks

BLOCK_TOKENS = 32
"""Prompts are referred to by blocks of so many tokens."""
CASES = [
    ("llama", 1),
    ("llama", 16),
    ("llama", 64),
    ("llama3", 16),
    ("qwen2", 32),
    ("qwen3", 64),
    ("mistral", 1),
    ("gemma2", 32),
    ("opt", 16),
    *itertools.product(["mla", "gemma4"], [1, 64]),
]
"""The last two hold K and V of their layers unalike; ``test_group_kinds.py`` has their pages of 16 tokens.

Other kinds of attention are in ``test_kind_exactness.py``.
"""


def test_every_proven_family_is_covered() -> None:
    """The cases name every family that the README claims, and every page size that must work."""
    assert {family for family, _ in CASES} >= set(FAMILIES)
    assert {size for _, size in CASES} == {1, 16, 32, 64}


@pytest.mark.integration
@pytest.mark.parametrize(("family", "page_size"), CASES)
async def test_served_tokens_equal_generate(
    family: str, page_size: int, checkpoints: dict[str, tuple[Path, Reference]], nats_server: NatsServer
) -> None:
    """Alone, on device and host hits, in mixed batches with cancelled neighbours, and through preemption.

    Gateway, scheduler and worker refer to what the next one holds of a prompt.
    """
    await serve_exactly(*checkpoints[family], page_size, nats_server)


async def serve_exactly(
    model: Path, reference: Reference, page_size: int, nats_server: NatsServer, *, ranks: int = 1
) -> None:
    """All of it for one checkpoint."""
    worker = {"page_size": page_size, "device_pages": DEVICE_TOKENS // page_size, "tensor_parallel": ranks}
    with small_blocks(BLOCK_TOKENS):
        async with running_cell(nats_server.url, model, worker_settings=worker, scheduler_settings=SCHEDULER) as cell:
            await survive_all(Scenario(cell, reference, page_size))
            counters = (await cell.status()).counters

    assert counters["referred_tokens"] > 2 * DOCUMENT_TOKENS
    assert "texts_missing" not in counters

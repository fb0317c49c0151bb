"""Both sources of a prefix give the same KV."""

from __future__ import annotations

import torch

from services.worker.importance.prefix_source import PagedPrefix
from tests.unit.worker.importance.asked import Asked
from tests.unit.worker.runners import LoadRunner


def test_pages_and_stored_kv_give_the_same(load_runner: LoadRunner) -> None:
    """Keys of heads, K and V of tokens, V of a head: equal from scattered pages and from memory, apart or not."""
    asked = Asked(load_runner("llama_mha"), prefix=37, question=3)
    paged, stored = PagedPrefix(asked.runner.pool, asked.pages, 37), asked.stored(probe_heads=(0, 2))
    tokens = torch.tensor([0, 5, 16, 36])

    assert (stored.tokens, stored.kv_heads, stored.token_bytes) == (37, 4, 2 * 4 * 16 * 4)
    assert (paged.tokens, paged.kv_heads, paged.token_bytes) == (37, 4, 2 * 4 * 16 * 4)
    for layer in range(3):
        assert torch.equal(paged.keys(layer, (0, 1), 4, 37), stored.keys(layer, (0, 1), 4, 37))
        assert torch.equal(paged.gather(layer, tokens), stored.gather(layer, tokens))
        assert torch.equal(paged.values(layer, 2, tokens), stored.values(layer, 2, tokens))
        assert torch.equal(stored.gather(layer, tokens)[0], stored.keys(layer, range(4), 0, 37)[:, tokens])
    assert stored.gather(0, tokens[:0]).shape == (2, 4, 0, 16)

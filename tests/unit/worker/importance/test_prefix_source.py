"""Both sources of a prefix give the same KV."""

from __future__ import annotations

import torch

from bench.stored_prefix import StoredPrefix
from tests.unit.worker.importance.asked import Asked
from tests.unit.worker.importance.paged_prefix import PagedPrefix
from tests.unit.worker.runners import LoadRunner


def test_pages_and_stored_kv_give_the_same(load_runner: LoadRunner) -> None:
    """Keys of heads, K and V of tokens, V of each head's own: equal from scattered pages and memory, apart or not."""
    asked = Asked(load_runner("llama_mha"), prefix=37, question=3)
    paged, stored = PagedPrefix(asked.runner.pool, asked.pages, 37), asked.stored(probe_heads=(0, 2))
    tokens = torch.tensor([0, 5, 16, 36])
    by_head = torch.tensor([[0, 5], [1, 36], [2, 17], [0, 1]])

    assert (stored.tokens, stored.kv_heads, stored.token_bytes) == (37, 4, 2 * 4 * 16 * 4)
    assert (paged.tokens, paged.kv_heads, paged.token_bytes) == (37, 4, 2 * 4 * 16 * 4)
    for layer in range(3):
        assert torch.equal(paged.keys(layer, (0, 1), 4, 37), stored.keys(layer, (0, 1), 4, 37))
        assert torch.equal(paged.gather(layer, tokens), stored.gather(layer, tokens))
        assert torch.equal(paged.values_by_head(layer, by_head), stored.values_by_head(layer, by_head))
        for head in range(4):
            expected = stored.gather(layer, by_head[head])[1, head]
            assert torch.equal(stored.values_by_head(layer, by_head)[head], expected)
        assert torch.equal(stored.gather(layer, tokens)[0], stored.keys(layer, range(4), 0, 37)[:, tokens])
    assert stored.gather(0, tokens[:0]).shape == (2, 4, 0, 16)
    assert stored.values_by_head(0, by_head[:, :0]).shape == paged.values_by_head(0, by_head[:, :0]).shape == (4, 0, 16)


def test_positions_are_those_of_the_request(load_runner: LoadRunner) -> None:
    """What begins behind the root is asked for by the same positions, and gives the same KV."""
    asked = Asked(load_runner("llama_mha"), prefix=37, question=3)
    whole = asked.stored(probe_heads=(0, 2))
    kv = torch.stack([whole.gather(layer, torch.arange(16, 37)).transpose(1, 2) for layer in range(3)])
    tokens = torch.tensor([16, 20, 36])

    for part in (StoredPrefix(kv, (0,), start=16), PagedPrefix(asked.runner.pool, asked.pages, 37, start=16)):
        assert (part.start, part.end, part.tokens) == (16, 37, 21)
        assert torch.equal(part.keys(1, (0, 3), 18, 30), whole.keys(1, (0, 3), 18, 30))
        assert torch.equal(part.gather(2, tokens), whole.gather(2, tokens))
        by_head = tokens.expand(4, -1)
        assert torch.equal(part.values_by_head(2, by_head), whole.values_by_head(2, by_head))

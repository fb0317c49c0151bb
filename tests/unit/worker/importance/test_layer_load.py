"""Values that each head chose for itself, with some of them read ahead: one read, and the same values."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch

from bench.stored_prefix import StoredPrefix
from services.worker.importance.bytes_read import BytesRead, ReadKind
from services.worker.importance.layer_load import LayerLoad
from services.worker.importance.speculation import Flight, Landed

HEADS, TOKENS, HEAD_DIM, START = 3, 12, 4, 100
VECTOR = HEAD_DIM * 4


class CountingPrefix(StoredPrefix):
    """Notes the tokens of every read of values."""

    def __init__(self) -> None:
        kv = torch.randn(2, 2, TOKENS, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
        super().__init__(kv, (), START)
        self.asked: list[list[list[int]]] = []

    def values_by_head(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        self.asked.append(tokens.tolist())
        return super().values_by_head(layer, tokens)


@pytest.mark.parametrize(
    ("ahead", "asked"),
    [
        ([], [[100, 103, 107], [101, 103, 105], [109, 110, 111]]),
        ([100, 101, 103, 105, 107, 109, 110, 111], [[], [], []]),
        ([100, 101, 103, 107, 110], [[100, 103], [101, 105], [109, 111]]),
        ([102], [[100, 103, 107], [101, 103, 105], [109, 110, 111]]),
    ],
)
def test_values_that_heads_lack_are_one_read(ahead: list[int], asked: list[list[int]]) -> None:
    """Each head reads as many as the one that lacks most; what it reads again counts as read, not as a hit."""
    source, counts = CountingPrefix(), BytesRead()
    load = LayerLoad(source, 1, counts, lambda: 0.0)
    if ahead:
        tokens, landed = torch.tensor(ahead), Future[Landed]()
        landed.set_result(Landed(tokens, source.gather(1, tokens), 0.0))
        load.land(Flight(1, tokens, len(ahead) * source.token_bytes, landed), 0.0)
    wanted = torch.tensor([[100, 103, 107], [101, 103, 105], [109, 110, 111]])

    values = load.values(wanted)

    assert torch.equal(values, StoredPrefix.values_by_head(source, 1, wanted))
    assert source.asked == [asked]
    read = len(asked[0]) * HEADS * VECTOR
    assert counts[ReadKind.FALLBACK_VALUES] == read
    assert (load.outcome().needed_bytes, load.outcome().hit_bytes) == (9 * VECTOR, 9 * VECTOR - read)

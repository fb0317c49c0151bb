"""Sparse attention is attention with the rest masked."""

from __future__ import annotations

import pytest
import torch

from services.worker.importance.identification import Rows
from services.worker.importance.sparse_attention import BLOCK_ROWS, attend_selected
from tests.unit.worker.importance.oracle import attend_masked

PREFIX, HEADS, KV_HEADS, HEAD_DIM = 23, 4, 2, 8


def compare(rows: Rows, own: int, tokens: torch.Tensor, before: int = 0) -> None:
    """tokens int64 [1 or KV_HEADS, k]; the prefix lies between ``before`` tokens and ``own`` of the request."""
    generator = torch.Generator().manual_seed(3)
    key, value = torch.randn(2, KV_HEADS, PREFIX + own, HEAD_DIM, generator=generator)
    each = tokens.expand(KV_HEADS, -1)
    columns = each[:, :, None].expand(-1, -1, HEAD_DIM)
    parts = [torch.cat([of[:, :before], of.gather(1, columns), of[:, PREFIX:]], dim=1) for of in (key, value)]
    ends = torch.arange(before), torch.arange(PREFIX, PREFIX + own)
    positions = torch.cat([ends[0].expand(len(tokens), -1), tokens, ends[1].expand(len(tokens), -1)], dim=1)
    chosen = torch.zeros(KV_HEADS, PREFIX + own, dtype=torch.bool)
    chosen[:, :before] = chosen[:, PREFIX:] = True
    chosen.scatter_(1, each, True)

    found = attend_selected(rows, torch.stack(parts), positions)

    torch.testing.assert_close(found.double(), attend_masked(rows, key, value, chosen), atol=1e-5, rtol=1e-4)


SHARED = torch.tensor([[0, 3, 4, 17, 22]])
BY_HEAD = torch.tensor([[0, 3, 4, 17, 22], [1, 2, 9, 10, 20]])


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("tokens", [SHARED, BY_HEAD], ids=["shared", "by_head"])
@pytest.mark.parametrize(("context", "count"), [(PREFIX, 6), (PREFIX + 5, 3), (PREFIX + 2, 1)])
def test_equals_the_oracle(
    context: int, count: int, tokens: torch.Tensor, window: int | None, softcap: float | None
) -> None:
    """Chunks, later chunks and decode, one set or one a head, with windows and soft caps."""
    query = torch.randn(HEADS, count, HEAD_DIM, generator=torch.Generator().manual_seed(4))

    compare(Rows(query, context, 0.3, window, softcap), context + count - PREFIX, tokens)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 12, 30])
@pytest.mark.parametrize("tokens", [SHARED[:, 2:], BY_HEAD[:, 2:]], ids=["shared", "by_head"])
@pytest.mark.parametrize(("context", "count"), [(PREFIX, 6), (PREFIX + 2, 1)])
def test_what_lies_before_the_prefix_is_seen_in_full(
    context: int, count: int, tokens: torch.Tensor, window: int | None, softcap: float | None
) -> None:
    """Four tokens before it, of which a window may hide some or all."""
    query = torch.randn(HEADS, count, HEAD_DIM, generator=torch.Generator().manual_seed(7))

    compare(Rows(query, context, 0.3, window, softcap), context + count - PREFIX, tokens, before=4)


def test_blocks_of_rows_are_joined() -> None:
    """More rows than a block has."""
    query = torch.randn(HEADS, BLOCK_ROWS + 2, HEAD_DIM, generator=torch.Generator().manual_seed(5))

    compare(Rows(query, PREFIX, 0.3, None, None), BLOCK_ROWS + 2, SHARED)


def test_nothing_of_the_prefix_may_be_chosen() -> None:
    """The request then sees its own tokens alone."""
    query = torch.randn(HEADS, 4, HEAD_DIM, generator=torch.Generator().manual_seed(6))

    compare(Rows(query, PREFIX, 0.3, None, None), 4, SHARED[:, :0])

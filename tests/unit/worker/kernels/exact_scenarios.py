"""The same rows computed in other company and other pieces; run in the interpreter's process by ``test_exact.py``.

Each function returns the names of the scenarios whose rows differ from the first one's in any bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from services.worker.engine.forward_meta import PagedTensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SPLIT_KEYS = 128
"""Of a split here: fewer than in service, so that short prompts have several."""

TOKENS = 300
OTHER_TOKENS = 700


def attention(
    dtype: str,
    window: int | None,
    softcap: float | None,
    group: int,
    mutant: str = "",
    chunk: int | None = None,
    *,
    has_sinks: bool = False,
) -> list[str]:
    """A prompt whole, in chunks of two kinds, and single rows of it alone and beside longer ones and a chunk."""
    from services.worker.kernels.exact import paged_attention

    random = torch.Generator().manual_seed(0)
    page_size, heads, head_dim = 16, 2 * group, 16
    own, other = -(-TOKENS // page_size), -(-OTHER_TOKENS // page_size)
    table = torch.randperm(own + other, generator=random).int()
    pools = [torch.randn(own + other, page_size, 2, head_dim, generator=random).to(DTYPES[dtype]) for _ in range(2)]
    q = torch.randn(TOKENS, heads, head_dim, generator=random).to(DTYPES[dtype])
    mine, theirs = table[:own], table[own:]
    sinks = torch.linspace(-2, 4, heads).to(DTYPES[dtype]) if has_sinks else None
    settings: dict[str, Any] = {
        "scaling": 0.25, "window": window, "softcap": softcap, "chunk": chunk, "sinks": sinks,
    }  # fmt: skip

    def compute(*segments: tuple[torch.Tensor, int, torch.Tensor]) -> list[torch.Tensor]:
        """The results of segments of (queries, context, pages)."""
        counts = [len(queries) for queries, _, _ in segments]
        pages = torch.zeros(len(segments), max(len(each) for _, _, each in segments), dtype=torch.int32)
        for row, (_, _, each) in enumerate(segments):
            pages[row, : len(each)] = each
        paged = PagedTensors(
            cu_rows=torch.tensor([0, *counts]).cumsum(0).int(),
            context=torch.tensor([context for _, context, _ in segments], dtype=torch.int32),
            page_table=pages,
            max_rows=max(counts),
            max_length=max(len(queries) + context for queries, context, _ in segments),
        )
        queries = torch.cat([queries for queries, _, _ in segments])
        with _splits(mutant, sum(counts)):
            found = paged_attention(queries, pools[0], pools[1], paged, **settings)
        return list(torch.split(found, counts))

    whole = compute((q, 0, mine))[0]
    found: dict[str, list[tuple[slice, torch.Tensor]]] = {}
    for name, edges in {"chunks": (0, 37, 260, TOKENS), "other chunks": (0, 64, 128, 129, TOKENS)}.items():
        found[name] = [
            (slice(first, end), compute((q[first:end], first, mine))[0]) for first, end in itertools.pairwise(edges)
        ]
    rows = (0, 1, 63, 64, 127, 128, 200, 299)
    found["rows alone"] = [(slice(row, row + 1), compute((q[row : row + 1], row, mine))[0]) for row in rows]
    beside = compute(
        (q[:1], OTHER_TOKENS - 1, theirs), (q[100:201], 100, mine), *((q[row : row + 1], row, mine) for row in rows)
    )
    found["rows in a batch"] = [(slice(row, row + 1), beside[2 + at]) for at, row in enumerate(rows)]
    found["a chunk in a batch"] = [(slice(100, 201), beside[1])]
    return _differing(whole, found)


def products(dtype: str, rows: int, depth: int, columns: int, mutant: str = "") -> list[str]:
    """Rows of a product alone, and in batches of several sizes at several places."""
    from services.worker.kernels.exact.matmul import matmul, product

    random = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=random).to(DTYPES[dtype])
        for shape in ((rows, depth), (columns, depth), (columns,))
    )

    def halved(x: torch.Tensor) -> torch.Tensor:
        """As a product that divides K among programs where there are few rows."""
        if mutant != "split k" or len(x) > 8:
            return matmul(x, weight, bias)
        half = depth // 2
        return matmul(x[:, :half], weight[:, :half]) + matmul(x[:, half:], weight[:, half:], bias)

    whole = halved(x)
    found: dict[str, list[tuple[slice, torch.Tensor]]] = {}
    for name, edges in {"alone": [*range(rows + 1)], "pieces": [0, 1, 4, 20, 65, rows]}.items():
        found[name] = [(slice(first, end), halved(x[first:end])) for first, end in itertools.pairwise(edges)]
    columnwise = [
        (slice(first, first + 1), product(weight[None], x[first : first + 1].T[None])[0].T) for first in (0, 1)
    ]
    return _differing(whole, found) + _differing(matmul(x, weight), {"as columns": columnwise})


def reductions(dtype: str, width: int, mutant: str = "") -> list[str]:
    """Rows of means, layer norms and log-softmaxes, alone and together."""
    from services.worker.kernels.exact import rows

    x = torch.randn(33, width, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])
    weight = torch.linspace(0.5, 2, width).to(x.dtype)

    def mean(x: torch.Tensor) -> torch.Tensor:
        if mutant != "threads by rows" or len(x) > 8:
            return rows.mean(x)
        return (rows.mean(x[:, : width // 2]).float() / 2 + rows.mean(x[:, width // 2 :]).float() / 2).to(x.dtype)

    kinds: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "mean": mean,
        "layer norm": lambda x: rows.layer_norm(x, weight, weight, 1e-5)[0],
        "log-softmax": lambda x: rows.log_softmax(x, torch.float32),
    }
    differing = []
    for name, kind in kinds.items():
        whole = kind(x)
        pieces = [(slice(first, end), kind(x[first:end])) for first, end in ((0, 1), (1, 3), (3, 33), (32, 33))]
        differing += _differing(whole, {name: pieces})
    return differing


@contextmanager
def _splits(mutant: str, rows: int) -> Any:
    """Splits of SPLIT_KEYS; or by the number of rows, as in a kernel that wants many programs."""
    from services.worker.kernels.exact import attention as module

    usual = module.SPLIT_KEYS
    module.SPLIT_KEYS = 64 if mutant == "splits by rows" and rows < 8 else SPLIT_KEYS
    try:
        yield
    finally:
        module.SPLIT_KEYS = usual


def _differing(whole: torch.Tensor, found: dict[str, list[tuple[slice, torch.Tensor]]]) -> list[str]:
    return [name for name, pieces in found.items() if not all(torch.equal(whole[at], piece) for at, piece in pieces)]

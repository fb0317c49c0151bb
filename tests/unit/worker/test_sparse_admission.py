"""Orders for a sparse prefix that contradict themselves, the model or the pool are refused."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from services.worker.admission import ModelLimits
from services.worker.admission import admit as admitted
from shared.errors import InvalidRequest
from shared.messages.base import pack_int32
from shared.messages.requests import Importance
from shared.messages.worker_plans import AdmitRequest, SparsePrefix
from tests.unit.worker.driven_executor import Driven, admit, vocabulary
from tests.unit.worker.restore.saved_hidden import hidden_lease

SIZE, POOL = 32, 40
LIMITS = ModelLimits(page_size=SIZE, pages=POOL, vocab_size=40, max_context=1000, eos_token_ids=(2,))
TOKENS = [20] * 210
TABLE = [3, 4, 5, -1, -1, -1, 6, 7]
"""Tokens [96, 192) are sparse: their chunks begin at 64, in the middle of which they begin."""


def sparse(**changes: Any) -> SparsePrefix:
    valid = SparsePrefix(
        storage_id="s",
        namespace="n",
        start=96,
        end=192,
        depth=64,
        chunks=bytes(2 * 16),
        pages=pack_int32([10, 12]),
        importance=Importance(ratio=0.5),
    )
    return replace(valid, **changes)


def order(prefix: SparsePrefix, *, table: list[int] = TABLE, cached: int = 192) -> AdmitRequest:
    return admit(TOKENS, table, cached=cached, sparse=prefix)


def fault_of(bad: AdmitRequest) -> str:
    with pytest.raises(InvalidRequest) as refused:
        admitted(bad, LIMITS, vocabulary(), admitted_ns=0)
    return refused.value.message


@pytest.mark.parametrize("pages", [[10, 12], [12, 10, 39]])
def test_a_right_order_is_admitted(pages: list[int]) -> None:
    """48 of 96 tokens fit into two pages; more pages are no fault."""
    prefix = sparse(pages=pack_int32(pages))

    request, growths = admitted(order(prefix), LIMITS, vocabulary(), admitted_ns=0)

    assert (request.sparse, request.computed, growths) == (prefix, 192, [])
    assert sorted(request.pages_held.tolist()) == sorted([3, 4, 5, 6, 7, *pages])


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"start": 97}, "no sparse prefix"),
        ({"start": -32}, "no sparse prefix"),
        ({"start": 192}, "no sparse prefix"),
        ({"end": 224}, "no sparse prefix"),  # Beyond the tokens.
        ({"end": 160}, "cached"),
        ({"depth": 32}, "does not hold token 96"),  # Not on the grid.
        ({"depth": 0}, "does not hold token 96"),
        ({"depth": 128}, "does not hold token 96"),
        ({"chunks": bytes(16)}, "chunk names"),
        ({"chunks": bytes(3 * 16)}, "chunk names"),
        ({"chunks": bytes(33)}, "chunk names"),
        ({"importance": Importance(ratio=0.0)}, "0.0 of a prefix"),
        ({"importance": Importance(ratio=1.01)}, "1.01 of a prefix"),
        ({"importance": Importance(ratio=float("nan"))}, "nan of a prefix"),
        ({"importance": Importance(ratio=0.5, metric="luck")}, "no importance metric 'luck'"),
        ({"importance": Importance(ratio=0.5, first_tokens=-1)}, "cannot be negative"),
        ({"importance": Importance(ratio=0.5, recent_tokens=-1)}, "cannot be negative"),
        ({"pages": pack_int32([10])}, "do not hold the 48 tokens"),
        ({"pages": pack_int32([10, POOL])}, "outside the pool"),
        ({"pages": pack_int32([10, -1])}, "outside the pool"),
        ({"pages": pack_int32([10, 10])}, "named twice"),
        ({"pages": pack_int32([10, 6])}, "named twice"),
        ({"pages": bytes(9)}, "whole numbers"),
    ],
)
def test_a_contradiction_is_refused(changes: dict[str, Any], fault: str) -> None:
    """With the reason."""
    assert fault in fault_of(order(sparse(**changes)))


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ([3, 4, -1, -1, -1, 5, 6, 7], "not those of the sparse prefix"),
        ([3, 4, 5, -1, -1, 8, 6, 7], "not those of the sparse prefix"),
        ([3, 4, 5, -1, -1, -1, 6, -1], "not those of the sparse prefix"),
        ([3, 4, 5, -1, -1, -2, 6, 7], "outside the pool"),
        ([3, 4, 5, -1, -1, -1], "do not hold 210 tokens"),
    ],
)
def test_entries_without_a_page_are_exactly_the_prefix(table: list[int], fault: str) -> None:
    """Fewer would be computed over, more would be read from nowhere."""
    assert fault in fault_of(order(sparse(), table=table))


def test_an_exact_request_has_a_page_for_every_token() -> None:
    """An entry of -1 means something only where a sparse prefix says so."""
    assert "outside the pool" in fault_of(admit(TOKENS, TABLE, cached=192))


def test_lossy_hidden_states_are_never_saved() -> None:
    """Hidden states behind a sparse prefix would be found by exact requests."""
    lease = hidden_lease(TOKENS, [0, 1], SIZE)

    bad = replace(order(sparse()), hidden_lease=lease)

    assert "cannot be saved" in fault_of(bad)


def test_a_refused_order_ends_its_request(driven: Driven) -> None:
    """As any other order that could hurt a step."""
    driven.give(order(sparse(), table=TABLE[:-1]))
    driven.run()

    (finished,) = driven.finished()
    assert (finished.reason, driven.executor.counters.requests_refused) == ("error", 1)


def test_an_adapter_has_neither_sparse_prefixes_nor_hidden_leases() -> None:
    """Both know the base model alone."""
    told = [
        replace(order(sparse()), adapter="1" * 32),
        replace(admit(TOKENS, range(8), hidden_lease=hidden_lease(TOKENS, range(8), SIZE)), adapter="1" * 32),
    ]

    faults = {fault_of(each) for each in told}

    assert faults == {"KV of an adapter is neither read in part nor restored from hidden states"}

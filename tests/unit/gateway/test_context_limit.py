"""A request too long for the pool is told so; one too long for the model gets OpenAI's words."""

from __future__ import annotations

import pytest

from services.gateway import admission
from services.gateway.cell import CellView
from services.gateway.context_limit import ContextLimit
from shared.config import parse_bytes
from shared.errors import ContextTooLong
from shared.messages.status import CellStatus, PoolStatus
from tests.unit.gateway.scripted_cell import cell_status

MIB = 2**20
POOL = ContextLimit(model_tokens=4096, pool_tokens=512, page_size=16, page_bytes=2 * MIB)


def status(max_context: int, pages: int, page_bytes: int = MIB) -> CellStatus:
    """A cell with one device pool of pages of 16 tokens."""
    pool = PoolStatus(owner="w", tier="device", total=pages, free=pages, cached=0, leased=0)
    return cell_status(model="m", max_context=max_context, pools=(pool,), page_bytes=page_bytes)


def heard(told: CellStatus) -> CellView:
    cell = CellView("m")
    cell.hear(told, 0.0)
    return cell


def test_a_pool_smaller_than_the_context_is_the_bound() -> None:
    """With what a page takes, so that the size needed can be told."""
    assert heard(status(512, 32)).context_limit(4096) == ContextLimit(4096, 512, 16, MIB)


def test_a_pool_that_holds_the_context_is_no_bound() -> None:
    """Nor is one of a cell whose workers take less than this gateway read of the model, nor of one that is unknown."""
    assert heard(status(4096, 1000)).context_limit(4096) == ContextLimit(4096)
    assert heard(status(100, 1000)).context_limit(4096) == ContextLimit(100)
    assert heard(status(100, 1000)).context_limit(50) == ContextLimit(50)
    assert CellView("m").context_limit(512) == ContextLimit(512)


@pytest.mark.parametrize(("prompt", "asked", "needed"), [(600, None, 601), (600, 10, 610), (500, 100, 600)])
def test_a_request_too_long_for_the_pool_is_told_what_holds_it(prompt: int, asked: int | None, needed: int) -> None:
    """Pool, tokens, flag and size; a pool of that size holds it. The code stays what SDKs look for."""
    with pytest.raises(ContextTooLong) as refusal:
        admission.output_room(prompt, asked, None, POOL)

    message = refusal.value.message
    assert f"needs {needed} tokens of KV, and the device pool of a worker holds 512" in message
    assert "the model itself takes 4096" in message
    assert "maximum context length" not in message
    assert refusal.value.code == "context_length_exceeded"
    size = parse_bytes(message.partition("--device-kv-bytes ")[2].split()[0])
    assert size // POOL.page_bytes * POOL.page_size >= needed
    assert (size - MIB) // POOL.page_bytes * POOL.page_size < needed


@pytest.mark.parametrize(("prompt", "asked"), [(4096, None), (4000, 97), (10, 10**30)])
def test_a_request_too_long_for_the_model_gets_the_words_of_openai(prompt: int, asked: int | None) -> None:
    """Even where the pool holds less: a larger pool would not help."""
    with pytest.raises(ContextTooLong, match=r"This model's maximum context length is 4096 tokens. However, you"):
        admission.output_room(prompt, asked, None, POOL)


def test_an_answer_without_a_length_takes_what_the_pool_has() -> None:
    """Neither the rest of the context nor a default exceeds it."""
    assert admission.output_room(500, None, None, POOL) == 12
    assert admission.output_room(500, None, 16, POOL) == 12
    assert admission.output_room(500, 12, None, POOL) == 12

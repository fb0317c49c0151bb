"""What must be true of every SaveChunks, whatever led to it."""

from __future__ import annotations

from collections.abc import Iterable

from shared.chunks import chunk_tokens
from shared.ids import chain_pages, chain_root
from shared.messages import requests, storage_plans
from shared.messages.base import unpack_int32


def check_save(order: storage_plans.SaveChunks, page_size: int, asked: Iterable[requests.SubmitRequest]) -> None:
    """An order's fields agree with one another, and its key is the one that its namespace was asked for with."""
    tokens = chunk_tokens(page_size)
    size = len(order.tokens) // 4
    assert size > 0, "a save of nothing"
    assert size % tokens == 0 == order.depth % tokens, "a run is not of whole chunks"
    assert (order.depth == 0) == (order.parent == chain_root(order.namespace)), "a run begins at no root"
    expected = chain_pages(order.parent, order.tokens, page_size * 4)
    assert order.identities == expected, "a run's identities are not those of its tokens"
    sources = list(zip(unpack_int32(order.host_pages), unpack_int32(order.device_pages), strict=True))
    assert len(sources) == size // page_size
    assert all((host < 0) != (device < 0) for host, device in sources), "a page is read from two places, or none"
    assert order.form == "kv" or not order.worker_id, "a save of hidden states reads a device"
    assert bool(order.worker_id) == any(device >= 0 for _, device in sources), "a worker is named for nothing"
    assert order.key_id == next(message.key_id for message in asked if message.namespace == order.namespace)
    assert order.value >= 0

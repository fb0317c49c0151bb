"""Checks of a ``FetchChunks`` order against the host pool at hand, and the chunks that it names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.storage.backends import ChunkKey
from services.storage.core.chunk_runs import check_namespace, check_run, run_keys
from services.storage.core.save_check import NOWHERE
from shared.chunks import chunk_pages, chunk_tokens
from shared.errors import InvalidRequest
from shared.ids import DIGEST_BYTES
from shared.messages.pools import PoolHandle
from shared.messages.storage_plans import FetchChunks


@dataclass(frozen=True, slots=True)
class FetchChunk:
    """One chunk of a fetch. Page i goes to ``host_pages[i]`` (int32), or nowhere where that is -1."""

    key: ChunkKey
    place: int
    identities: bytes
    host_pages: npt.NDArray[np.int32]


def check_fetch(order: FetchChunks, host: PoolHandle) -> list[FetchChunk]:
    """Return the chunks of ``order``, in order. Raises InvalidRequest, saying what is wrong."""
    geometry = host.geometry
    check_namespace(order.namespace)
    count = check_run(order.depth, order.identities, geometry)
    pages = chunk_pages(geometry.page_size)
    if len(order.host_pages) != count * pages * 4:
        raise InvalidRequest(f"{len(order.host_pages)} bytes are no list of {count * pages} host pages")
    host_pages = np.frombuffer(order.host_pages, dtype="<i4")
    if host_pages.min() < NOWHERE or host_pages.max() >= host.pages:
        raise InvalidRequest(
            f"host pages {host_pages.min()} to {host_pages.max()} are not all among the {host.pages} of the pool"
        )
    named = host_pages[host_pages != NOWHERE]
    if len(np.unique(named)) != len(named):
        raise InvalidRequest("a host page is named twice")
    if order.deadline_ms < 0:
        raise InvalidRequest(f"a deadline of {order.deadline_ms} ms is none")
    first, each = order.depth // chunk_tokens(geometry.page_size), pages * DIGEST_BYTES
    return [
        FetchChunk(
            key=key,
            place=first + index,
            identities=order.identities[index * each : (index + 1) * each],
            host_pages=host_pages[index * pages : (index + 1) * pages],
        )
        for index, key in enumerate(run_keys(order.namespace, order.identities, geometry))
    ]

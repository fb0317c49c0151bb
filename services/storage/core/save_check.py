"""Checks of a ``SaveChunks`` order against the pools at hand, and the chunks that it names.

Like backups, saves are not trusted: an order that names pages which do not exist is answered, never executed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.storage.backends import ChunkKey
from services.storage.core.chunk_runs import check_namespace, check_run, run_keys
from shared.chunks import chunk_pages, chunk_tokens
from shared.errors import InvalidRequest
from shared.ids import DIGEST_BYTES, TOKEN_BYTES, chain_root
from shared.messages.pools import PoolHandle
from shared.messages.storage_plans import SaveChunks

NOWHERE = -1


@dataclass(frozen=True, slots=True)
class SaveChunk:
    """One chunk of a save.

    ``place`` counts chunks from the root; ``parent`` is the identity of the page before it and ``above`` the key of the
    chunk before it, None at the root. Page i comes from ``host_pages[i]`` (int32) or, where that is -1,
    ``device_pages[i]``; ``identities`` is 16 bytes a page, ``tokens`` packed int32.
    """

    key: ChunkKey
    place: int
    above: ChunkKey | None
    parent: bytes
    tokens: bytes
    identities: bytes
    host_pages: npt.NDArray[np.int32]
    device_pages: npt.NDArray[np.int32]


def check_save(order: SaveChunks, host: PoolHandle, device: PoolHandle | None) -> list[SaveChunk]:
    """Return the chunks of ``order``. ``device`` is the pool of the worker that it names, None if it names none.

    ``host`` is the hidden pool for an order of hidden states, which has no other source. Raises InvalidRequest, saying
    what is wrong.
    """
    geometry = host.geometry
    check_namespace(order.namespace)
    count = check_run(order.depth, order.identities, geometry)
    pages, tokens = chunk_pages(geometry.page_size), chunk_tokens(geometry.page_size)
    host_pages = _sources("host", order.host_pages, count * pages, host.pages)
    device_pages = _sources("device", order.device_pages, count * pages, device.pages if device else 0)
    if geometry.is_hidden and (device is not None or (host_pages == NOWHERE).any()):
        raise InvalidRequest("hidden states are saved from the hidden pool alone")
    if device is not None and device.geometry != geometry:
        raise InvalidRequest(f"the pools differ in geometry: device {device.geometry}, host {geometry}")
    if ((host_pages == NOWHERE) & (device_pages == NOWHERE)).any():
        raise InvalidRequest("a page has no source")
    if len(order.tokens) != count * tokens * TOKEN_BYTES:
        raise InvalidRequest(f"{len(order.tokens)} bytes of tokens are not those of {count} chunks")
    if len(order.parent) != DIGEST_BYTES or (order.depth == 0) != (order.parent == chain_root(order.namespace)):
        raise InvalidRequest(f"{order.parent.hex() or 'nothing'} cannot be above depth {order.depth}")
    first = order.depth // tokens
    keys = run_keys(order.namespace, order.identities, geometry)
    above = key_above(order.namespace, order.parent, order.depth, keys[0].geometry)
    chunks = []
    for index, key in enumerate(keys):
        span = slice(index * pages, (index + 1) * pages)
        start = index * pages * DIGEST_BYTES
        chunks.append(
            SaveChunk(
                key=key,
                place=first + index,
                above=above,
                parent=order.identities[start - DIGEST_BYTES : start] if index else order.parent,
                tokens=order.tokens[index * tokens * TOKEN_BYTES : (index + 1) * tokens * TOKEN_BYTES],
                identities=order.identities[start : start + pages * DIGEST_BYTES],
                host_pages=host_pages[span],
                device_pages=device_pages[span],
            )
        )
        above = key
    return chunks


def key_above(namespace: str, parent: bytes, depth: int, geometry: bytes) -> ChunkKey | None:
    """Return the chunk that ends with page ``parent``, ``depth`` tokens below the root; None at the root."""
    return ChunkKey(namespace, geometry, parent) if depth else None


def _sources(tier: str, packed: bytes, count: int, total: int) -> npt.NDArray[np.int32]:
    if len(packed) != count * 4:
        raise InvalidRequest(f"{len(packed)} bytes are no list of {count} {tier} pages")
    pages = np.frombuffer(packed, dtype="<i4")
    if pages.min() < NOWHERE or pages.max() >= total:
        raise InvalidRequest(f"{tier} pages {pages.min()} to {pages.max()} are not all among the {total} of the pool")
    return pages


def reads_device(order: SaveChunks) -> bool:
    """Return whether any page of ``order`` is to be read from a worker's device."""
    return len(order.host_pages) % 4 == 0 and bool((np.frombuffer(order.host_pages, dtype="<i4") == NOWHERE).any())


def host_pages_of(chunk: SaveChunk) -> list[int]:
    """Return the host pages that a chunk is read from."""
    pages: list[int] = chunk.host_pages[chunk.host_pages != NOWHERE].tolist()
    return pages

"""Runs of consecutive chunks of one sequence, as saves and fetches name them."""

from __future__ import annotations

import re

from services.storage.backends import ChunkKey
from shared.chunks import chunk_names, chunk_pages, chunk_tokens, geometry_id
from shared.errors import InvalidRequest
from shared.ids import DIGEST_BYTES
from shared.messages.pools import KvGeometry

_NAMESPACE = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


def check_namespace(namespace: str) -> None:
    """Raise InvalidRequest for a text that is no namespace: namespaces become parts of file names."""
    if not _NAMESPACE.fullmatch(namespace):
        raise InvalidRequest(f"{namespace[:64]!r} is no namespace")


def check_run(depth: int, identities: bytes, geometry: KvGeometry) -> int:
    """Return how many chunks a run of pages makes, ``depth`` tokens below the root.

    ``identities`` has 16 bytes for each page. Raises InvalidRequest when they are not whole chunks on the grid.
    """
    each = chunk_pages(geometry.page_size) * DIGEST_BYTES
    if not identities or len(identities) % each:
        raise InvalidRequest(f"{len(identities)} bytes are not the identities of whole chunks of {each} bytes")
    if depth < 0 or depth % chunk_tokens(geometry.page_size):
        raise InvalidRequest(f"depth {depth} is not a multiple of {chunk_tokens(geometry.page_size)} tokens")
    return len(identities) // each


def run_keys(namespace: str, identities: bytes, geometry: KvGeometry) -> list[ChunkKey]:
    """Return the chunks of a checked run, in order."""
    shape = geometry_id(geometry)
    names = chunk_names(identities, chunk_pages(geometry.page_size))
    return [ChunkKey(namespace, shape, name) for name in names]

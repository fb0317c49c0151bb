"""Whether a ``ReadSparse`` can be carried out in a layout, and what it asks for. Pure.

Workers are not trusted with sizes: what would write elsewhere than it says, or take memory without a bound, is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.storage.backends import ChunkKey
from services.storage.core.chunk_runs import check_namespace
from services.storage.sparse.layout import K, SparseLayout, V
from shared.errors import InvalidRequest
from shared.ids import DIGEST_BYTES, split_digests
from shared.messages.sparse_reads import MOST_LAYERS, ReadSparse

MAX_TOKENS = 2**20
"""Of the chunks of one call, and of all that it chooses of them: more than a prompt that any model here takes."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a call asks for, of ``keys`` in order; the first is chunk number ``place`` from the root.

    It is of ``layers`` layers from ``layer`` on. ``tokens`` is int32 [lists, n], ascending and counted from the first
    token of the first chunk: one list for all ``heads``, or one for each. Empty ``heads`` are all of them. ``halves``
    is which of K and V is wanted; there are none where codes of probe keys are.
    """

    keys: tuple[ChunkKey, ...]
    place: int
    layer: int
    halves: tuple[int, ...]
    heads: tuple[int, ...]
    tokens: npt.NDArray[np.int32]
    nbytes: int
    layers: int = 1


def check_read(call: ReadSparse, layout: SparseLayout) -> Asked:
    """Return what ``call`` asks for. Raises InvalidRequest, saying what is wrong."""
    check_namespace(call.namespace)
    if not call.chunks or len(call.chunks) % DIGEST_BYTES:
        raise InvalidRequest(f"{len(call.chunks)} bytes are no list of chunks")
    count = len(call.chunks) // DIGEST_BYTES
    if count * layout.tokens > MAX_TOKENS:
        raise InvalidRequest(f"{count} chunks have more than {MAX_TOKENS} tokens")
    if call.depth < 0 or call.depth % layout.tokens:
        raise InvalidRequest(f"depth {call.depth} is not a multiple of {layout.tokens} tokens")
    if not 0 <= call.layer < layout.geometry.layers:
        raise InvalidRequest(f"there is no layer {call.layer} of {layout.geometry.layers}")
    if not 1 <= call.layers <= min(MOST_LAYERS, layout.geometry.layers - call.layer):
        raise InvalidRequest(
            f"{call.layers} layers from {call.layer} of {layout.geometry.layers} on, or over {MOST_LAYERS}"
        )
    names = split_digests(call.chunks)
    if len(set(names)) < count:
        raise InvalidRequest("a chunk is named twice")
    heads = () if call.part == "kv" else _heads(call.heads, layout)
    tokens = _tokens(call, heads) - call.depth
    if int(tokens.min()) < 0 or int(tokens.max()) >= count * layout.tokens:
        raise InvalidRequest(f"a token is not within the {count} chunks from token {call.depth} on")
    lists, chosen = tokens.shape
    # K and V of every head, or one of them of each that is named.
    vector_bytes = layout.probe_row_bytes if call.part == "codes" else layout.head_bytes
    nbytes = 2 * chosen * layout.row_bytes if call.part == "kv" else call.layers * len(heads) * chosen * vector_bytes
    if call.nbytes != nbytes:
        raise InvalidRequest(f"{lists} x {chosen} tokens of {call.part} have {nbytes} bytes, not {call.nbytes}")
    halves: tuple[int, ...] = {"codes": (), "keys": (K,), "kv": (K, V), "values": (V,)}[call.part]
    if not halves and max(heads) >= layout.probe_heads:
        raise InvalidRequest(f"only keys of the first {layout.probe_heads} heads are kept as codes")
    if halves and call.layers > 1:
        raise InvalidRequest(f"{call.layers} layers at once are read of codes alone, not of {call.part}")
    return Asked(
        keys=tuple(layout.key(call.namespace, name) for name in names),
        place=call.depth // layout.tokens,
        layer=call.layer,
        halves=halves,
        heads=heads,
        tokens=tokens.astype(np.int32),
        nbytes=nbytes,
        layers=call.layers,
    )


def _heads(heads: tuple[int, ...], layout: SparseLayout) -> tuple[int, ...]:
    if not heads or len(set(heads)) < len(heads):
        raise InvalidRequest(f"KV heads {heads[:8]} are none, or one is named twice")
    if min(heads) < 0 or max(heads) >= layout.geometry.kv_heads:
        raise InvalidRequest(f"KV heads {heads[:8]} are not all among the {layout.geometry.kv_heads} of the model")
    return heads


def _tokens(call: ReadSparse, heads: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Positions from the root [lists, n], ascending in each list, at least one of them."""
    if call.part in ("codes", "keys"):
        if not 0 <= call.start < call.end or call.end - call.start > MAX_TOKENS:
            raise InvalidRequest(f"[{call.start}, {call.end}) is no run of tokens")
        return np.arange(call.start, call.end, dtype=np.int64)[None]
    lists = len(heads) or 1
    if not call.tokens or len(call.tokens) % (4 * lists) or len(call.tokens) > 4 * MAX_TOKENS:
        raise InvalidRequest(f"{len(call.tokens)} bytes are not {lists} lists of tokens")
    tokens = np.frombuffer(call.tokens, "<i4").astype(np.int64).reshape(lists, -1)
    if (np.diff(tokens, axis=1) <= 0).any():
        raise InvalidRequest("tokens do not ascend")
    return tokens

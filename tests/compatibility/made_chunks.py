"""Chunks and sparse copies of every form, and what somebody who reads them later must find in them."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import replace

import msgspec
import numpy as np

from services.storage.backends import ChunkKey
from services.storage.chunk_format import payload_view
from services.storage.chunk_reading import verify_chunk
from services.storage.chunk_sealing import seal_blob
from services.storage.cipher import Cipher
from services.storage.key_ring import KeyRing
from services.storage.sparse.format import SparseHeader
from services.storage.sparse.layout import SparseLayout
from services.storage.sparse.making import areas, complete, copy_pages
from services.storage.sparse.verification import verify_copy
from shared.chunks import geometry_id
from shared.ids import key_digest
from shared.messages.pools import KvGeometry
from tests.chunk_makers import HIDDEN_GEOMETRIES, SMALL, SMALL_HIDDEN, MadeChunk, aligned, make_chain

KEY_ID = key_digest("golden")
_SECRET = base64.b64encode(bytes(range(32))).decode()
CIPHER = Cipher(
    KeyRing(f'[salts]\ngolden = "{_SECRET}"', environ={}, now_s=0.0),
    clock=lambda: 0.0,
    nonces=lambda count: bytes(range(count)),  # So that recording again gives equal bytes.
)

PLAIN = {
    "kv": SMALL,
    "state-hidden": HIDDEN_GEOMETRIES["hidden alone"],
    "state-kv": HIDDEN_GEOMETRIES["tokens, KV"],
    "state-both": SMALL_HIDDEN,
}
SEALED = {"kv-sealed": SMALL, "state-sealed": SMALL_HIDDEN}
SPARSE = {"sparse": "", "sparse-sealed": KEY_ID}
_BLOCK_TOKENS = 4


class ChunkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a blob holds. Digests are of SHA-256, in hexadecimal digits."""

    geometry: KvGeometry
    namespace: str
    identity: str
    key_id: str
    block_tokens: int = 0  # Of a sparse copy; 0 for a chunk.
    has_codes: bool = False  # Whether probe keys of a sparse copy are codes.
    tokens: str = ""  # Digest of the tokens of a chunk.
    payload: str  # Digest of the pages of a chunk, of probe keys and rows of a copy.


def make_all() -> dict[str, tuple[bytes, ChunkFacts]]:
    """Every form by name: the blob, and what it holds."""
    made: dict[str, tuple[bytes, ChunkFacts]] = {}
    for seed, (name, geometry) in enumerate((PLAIN | SEALED).items()):
        # The second of its sequence, so that parent and depth say something.
        chunk = make_chain(2, seed=seed, geometry=geometry)[1]
        key_id = KEY_ID if name in SEALED else ""
        facts = _facts(chunk, key_id, payload=_digest(payload_view(chunk.blob, geometry)))
        if key_id:
            seal_blob(chunk.blob, chunk.header, key_id, CIPHER)
        made[name] = bytes(chunk.blob), facts
    chunk = make_chain(2, seed=99)[1]
    for name, key_id in SPARSE.items():
        made[name] = _sparse_copy(chunk, key_id)
    return made


def read(blob: bytes, facts: ChunkFacts) -> ChunkFacts:
    """What today's readers find in a blob under the name that ``facts`` give it. Raises IntegrityError."""
    view = aligned(len(blob))
    view[:] = blob
    identity = bytes.fromhex(facts.identity)
    if facts.block_tokens:
        layout = replace(SparseLayout.of(facts.geometry, block_tokens=facts.block_tokens), has_codes=facts.has_codes)
        key = layout.key(facts.namespace, identity)
        header, _ = verify_copy(view, key, layout, cipher=CIPHER, key_id=facts.key_id)
        found, namespace = header.identity, header.namespace
        if header.hides_names:
            found = CIPHER.show(facts.key_id, found)
        return msgspec.structs.replace(
            facts, namespace=namespace, identity=found.hex(), payload=_copy_digest(view, header)
        )
    key = ChunkKey(facts.namespace, geometry_id(facts.geometry), identity)
    opened = verify_chunk(view, key, facts.geometry, cipher=CIPHER, key_id=facts.key_id)
    return ChunkFacts(
        geometry=opened.geometry,
        namespace=opened.namespace,
        identity=opened.identity.hex(),
        key_id=facts.key_id,
        tokens=_digest(opened.tokens),
        payload=_digest(payload_view(view, opened.geometry)),
    )


def _facts(chunk: MadeChunk, key_id: str, *, payload: str) -> ChunkFacts:
    header = chunk.header
    return ChunkFacts(
        geometry=header.geometry,
        namespace=header.namespace,
        identity=header.identity.hex(),
        key_id=key_id,
        tokens=_digest(header.tokens),
        payload=payload,
    )


def _sparse_copy(chunk: MadeChunk, key_id: str) -> tuple[bytes, ChunkFacts]:
    layout = SparseLayout.of(chunk.header.geometry, block_tokens=_BLOCK_TOKENS)
    header = SparseHeader.of(chunk.header, layout, key_id=key_id, cipher=CIPHER)
    blob = aligned(header.blob_bytes)
    copy_pages(payload_view(chunk.blob, chunk.header.geometry), blob, layout, is_sealed=header.is_sealed)
    payload = _copy_digest(blob, header)
    complete(blob, header, np.arange(layout.tokens, dtype=np.uint32), CIPHER)
    facts = msgspec.structs.replace(
        _facts(chunk, key_id, payload=payload), block_tokens=_BLOCK_TOKENS, has_codes=layout.has_codes, tokens=""
    )
    return bytes(blob), facts


def _copy_digest(blob: memoryview, header: SparseHeader) -> str:
    return _digest(b"".join(each.tobytes() for each in areas(blob, header.layout, is_sealed=header.is_sealed)))


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()

"""The blob of a chunk, format versions 1 and 2: a self-contained header, and whole pages of KV or hidden states.

``docs/reference/chunk-format.md`` is the byte by byte table. In short, for a chunk that is not encrypted::

    0                    fixed header, 256 bytes: sizes, geometry, namespace, tokens, two checksums
    256                  zeros
    header_bytes - t     tables: tokens [tokens] int32, then checksums [pages, units] uint64
    header_bytes         pages [pages, units, unit_bytes], each contiguous
    ... + payload_bytes  zeros up to a whole block

The tables lie against the payload so that both are one piece, which is what gets sealed (``chunk_sealing``); the gap
before them takes the nonce and the tag, so a sealed blob is not larger. A unit is a layer of KV, or what ``KvGeometry``
says for hidden states. Every size follows from the geometry alone, and the header says all of the geometry.
Every byte is covered: by the magic, one of the header's checksums, the checksum of a page and unit, or by having
to be zero. All integers are little-endian. Nothing here does I/O or reads a clock: equal pages make equal blobs.

Codes of IntegrityError: ``not_a_chunk``, ``unknown_version``, ``truncated``, ``header_checksum``, ``wrong_layout``,
``wrong_geometry``, ``wrong_dtype``, ``wrong_namespace``, ``wrong_identity``, ``wrong_tokens``, ``sealed``, and from
``chunk_payload`` ``wrong_checksum``.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from services.storage.backends import ChunkKey, whole_blocks
from shared.chunks import chunk_bytes, chunk_pages, chunk_tokens, geometry_id
from shared.errors import IntegrityError, InvalidRequest
from shared.ids import DIGEST_BYTES, TOKEN_BYTES, chain_pages, chain_root
from shared.messages.pools import KvGeometry

MAGIC = b"TCKVCHNK"
PLAIN_VERSION = 1
"""Version of chunks that are not sealed. Sealed ones of this version, by releases before 0.3, are read and not written.
"""
SEALED_VERSION = 2
"""Version of sealed chunks: version 1 with hidden identities (``chunk_names``)."""
FIXED_BYTES = 256
SEALING_BYTES = 28
"""Bytes that sealing adds: a nonce of 12 and a tag of 16."""

LAYOUT = "page_first"
CHECKSUM = "xxh3_64"
MAX_KEY_ID_BYTES = 32

IS_SEALED = 1  # The only flag.

# magic, version, header bytes, payload bytes, flags, pages, depth, first layer, end of layers, geometry (layers,
# heads, head_dim, page_size), dtype, layout, namespace, identity, parent, key id, checksum's name, hidden values and
# layers of them (zeros in a chunk of KV), zeros. Then come the checksum of the body, and that of all of this.
_FIELDS = struct.Struct("<8sIIQIIQIIIIII16s16s16s16s16s32s16sII40s")
_SPARE_BYTES = 40
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = FIXED_BYTES - _CHECKSUM.size
_VERSION = struct.Struct("<I")

Checksums = npt.NDArray[np.uint64]


class ChunkHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a blob's header. ``tokens``, ``identities`` and ``checksum_table`` are empty while it is sealed."""

    version: int = PLAIN_VERSION
    namespace: str
    identity: bytes
    """Identity of the chunk's last page: the name of the chunk. Hidden where :attr:`hides_names`."""
    parent: bytes
    """Identity of the page before the chunk; the namespace's root at depth 0. Hidden where :attr:`hides_names`."""
    depth: int
    """Tokens from the root to the first of the chunk."""
    geometry: KvGeometry
    layout: str = LAYOUT
    key_id: str = ""
    """Id of the key that seals it; "" is none."""
    tokens: bytes = b""
    """Packed int32."""
    identities: bytes = b""
    """16 bytes a page; they follow from ``parent`` and ``tokens`` and are not stored."""
    checksum_table: bytes = b""
    """The table as stored; ``chunk_payload.verify_payload`` compares it with the payload."""

    @property
    def is_sealed(self) -> bool:
        """Whether the chunk is encrypted."""
        return bool(self.key_id)

    @property
    def header_bytes(self) -> int:
        """Offset of the payload in bytes."""
        return header_nbytes(self.geometry)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the pages."""
        return payload_nbytes(self.geometry)

    @property
    def checksums(self) -> Checksums:
        """Checksums uint64 [pages, units], a view of :attr:`checksum_table`; not for a sealed header."""
        return np.frombuffer(self.checksum_table, "<u8").reshape(pages_shape(self.geometry)[:2])

    @property
    def hides_names(self) -> bool:
        """Whether ``identity`` and ``parent`` are encrypted (``Cipher.hide``)."""
        return self.version == SEALED_VERSION

    @property
    def key(self) -> ChunkKey:
        """The name under which this blob belongs, at rest where it is sealed."""
        return ChunkKey(self.namespace, _geometry_id(self.geometry), self.identity, self.hides_names)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole blob."""
        return blob_nbytes(self.geometry)


# A process has few geometries, and each chunk is laid out by one and checked against it.
_of_geometry = lru_cache(maxsize=64)
_geometry_id = _of_geometry(geometry_id)
payload_nbytes = _of_geometry(chunk_bytes)


@_of_geometry
def table_nbytes(geometry: KvGeometry) -> int:
    """Return the bytes of the tables: the tokens and one checksum for each page and unit."""
    checksums = chunk_pages(geometry.page_size) * geometry.units * _CHECKSUM.size
    return chunk_tokens(geometry.page_size) * TOKEN_BYTES + checksums


@_of_geometry
def pages_shape(geometry: KvGeometry) -> tuple[int, int, int]:
    """Return the shape of a chunk's pages: pages, units, unit_bytes."""
    return chunk_pages(geometry.page_size), geometry.units, geometry.unit_bytes


@_of_geometry
def header_nbytes(geometry: KvGeometry) -> int:
    """Return the offset of the payload in bytes; whole blocks."""
    return whole_blocks(FIXED_BYTES + SEALING_BYTES + table_nbytes(geometry))


@_of_geometry
def blob_nbytes(geometry: KvGeometry) -> int:
    """Return the bytes of any blob of this geometry, sealed or not; whole blocks."""
    return whole_blocks(header_nbytes(geometry) + payload_nbytes(geometry))


def payload_view(blob: memoryview, geometry: KvGeometry) -> memoryview:
    """Return the pages in an unsealed blob, one after the other, ``geometry.page_bytes`` each."""
    start = header_nbytes(geometry)
    return blob[start : start + payload_nbytes(geometry)]


def page_identities(parent: bytes, tokens: bytes, geometry: KvGeometry) -> bytes:
    """Return the identities of a chunk's pages, 16 bytes each."""
    return chain_pages(parent, tokens, geometry.page_size * TOKEN_BYTES)


def write_header(
    blob: memoryview,
    *,
    namespace: str,
    geometry: KvGeometry,
    depth: int,
    parent: bytes,
    tokens: bytes,
    checksums: Checksums,
) -> ChunkHeader:
    """Make the payload that ``blob`` holds (see :func:`payload_view`) a chunk: write all but the payload.

    ``blob`` is writable and has :func:`blob_nbytes` bytes of any content; ``tokens`` are packed int32; ``checksums`` is
    uint64 [pages, units]: xxh3_64 seeded with the page's identity, as host pools keep it. Compare the result with the
    chunk's name by :func:`check` before the blob is kept. Raises InvalidRequest when the arguments do not make a chunk.
    """
    pages, fault = chunk_pages(geometry.page_size), geometry.fault()
    if fault:
        raise InvalidRequest(f"not a chunk: no pages have the geometry {geometry}: {fault}")
    faults = {
        f"a blob of {blob.nbytes} bytes is not {blob_nbytes(geometry)}": blob.nbytes != blob_nbytes(geometry),
        f"{len(tokens)} bytes of tokens": len(tokens) != chunk_tokens(geometry.page_size) * TOKEN_BYTES,
        f"checksums of shape {checksums.shape}": checksums.shape != (pages, geometry.units),
        f"a parent of {len(parent)} bytes": len(parent) != DIGEST_BYTES,
        f"depth {depth} is not on the grid": depth < 0 or depth % chunk_tokens(geometry.page_size) != 0,
        f"{depth=} but parent {parent.hex()}": (depth == 0) != (parent == chain_root(namespace)),
    }
    if any(faults.values()):
        raise InvalidRequest("not a chunk: " + "; ".join(fault for fault, is_so in faults.items() if is_so))
    identities = page_identities(parent, tokens, geometry)
    header = ChunkHeader(
        namespace=namespace,
        identity=identities[-DIGEST_BYTES:],
        parent=parent,
        depth=depth,
        geometry=geometry,
        tokens=tokens,
        identities=identities,
        checksum_table=checksums.astype("<u8").tobytes(),
    )
    tables = tokens + header.checksum_table
    end = header.header_bytes + header.payload_bytes
    blob[FIXED_BYTES : header.header_bytes] = bytes(header.header_bytes - FIXED_BYTES - len(tables)) + tables
    blob[end:] = bytes(blob.nbytes - end)
    write_fixed(blob, header)
    return header


def write_fixed(blob: memoryview, header: ChunkHeader) -> None:
    """Write the fixed header of a blob that is complete apart from it."""
    blob[: _FIELDS.size] = fixed_fields(header)
    blob[_FIELDS.size : _CHECKSUM_AT] = _CHECKSUM.pack(_body_checksum(blob, header))
    blob[_CHECKSUM_AT:FIXED_BYTES] = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(blob[:_CHECKSUM_AT]))


def fixed_fields(header: ChunkHeader) -> bytes:
    """Return the fixed header without its two checksums: a sealed chunk is authenticated with it."""
    geometry = header.geometry
    return _FIELDS.pack(
        MAGIC,
        header.version,
        header.header_bytes,
        header.payload_bytes,
        IS_SEALED if header.is_sealed else 0,
        chunk_pages(geometry.page_size),
        header.depth,
        geometry.absent,
        geometry.layers,
        geometry.layers,
        geometry.kv_heads,
        geometry.head_dim,
        geometry.page_size,
        geometry.dtype.encode(),
        header.layout.encode(),
        bytes.fromhex(header.namespace),
        header.identity,
        header.parent,
        header.key_id.encode(),
        CHECKSUM.encode(),
        geometry.hidden,
        geometry.from_hidden,
        bytes(_SPARE_BYTES),
    )


def _body_checksum(blob: memoryview, header: ChunkHeader) -> int:
    """Return the checksum of the rest of the header, or of all the rest of a sealed blob.

    An unsealed payload has checksums of its own in the header.
    """
    end = blob.nbytes if header.is_sealed else header.header_bytes
    return int(xxhash.xxh3_64_intdigest(blob[FIXED_BYTES:end]))


def read_fixed(head: memoryview, nbytes: int) -> ChunkHeader:
    """Parse the header from the first block of a blob of ``nbytes`` bytes, as an inventory does. Without the tables.

    Raises IntegrityError: ``not_a_chunk``, ``unknown_version``, ``truncated``, ``header_checksum``, ``wrong_layout``.
    """
    return _read_fixed(head, nbytes)[0]


def read_header(blob: memoryview) -> ChunkHeader:
    """Parse the header of a whole blob (``blob`` ends where it ends), with the tables unless it is sealed.

    Raises IntegrityError: ``not_a_chunk``, ``unknown_version``, ``truncated``, ``header_checksum``, ``wrong_layout``;
    ``wrong_checksum`` if it is sealed and damaged, which needs no key to be seen.
    """
    header, body_checksum = _read_fixed(blob, blob.nbytes)
    is_sound = _body_checksum(blob, header) == body_checksum
    if header.is_sealed:
        if not is_sound:
            raise IntegrityError(f"sealed chunk {header.identity.hex()} is damaged", code="wrong_checksum")
        return header
    if not is_sound:
        raise IntegrityError("the tables of the chunk's header are damaged", code="header_checksum")
    geometry = header.geometry
    start = header.header_bytes - table_nbytes(geometry)
    middle = start + chunk_tokens(geometry.page_size) * TOKEN_BYTES
    if not is_zero(blob[FIXED_BYTES:start]):
        raise IntegrityError("there is something before the tables of the chunk's header", code="wrong_layout")
    tokens = bytes(blob[start:middle])
    return msgspec.structs.replace(
        header,
        tokens=tokens,
        identities=page_identities(header.parent, tokens, geometry),
        checksum_table=bytes(blob[middle : header.header_bytes]),
    )


def _read_fixed(head: memoryview, nbytes: int) -> tuple[ChunkHeader, int]:
    """Return the header without tables, and the checksum of the body."""
    if bytes(head[: len(MAGIC)]) != MAGIC[: head.nbytes] or not head.nbytes:
        raise IntegrityError("this is not a chunk: the magic is missing", code="not_a_chunk")
    if min(head.nbytes, nbytes) < FIXED_BYTES:
        raise IntegrityError(f"the chunk ends after {nbytes} bytes, within its header", code="truncated")
    (version,) = _VERSION.unpack_from(head, len(MAGIC))
    if version not in (PLAIN_VERSION, SEALED_VERSION):
        raise IntegrityError(
            f"the chunk has format version {version}, not {PLAIN_VERSION} or {SEALED_VERSION}", code="unknown_version"
        )
    (body_checksum,), (checksum,) = (_CHECKSUM.unpack_from(head, at) for at in (_FIELDS.size, _CHECKSUM_AT))
    if xxhash.xxh3_64_intdigest(head[:_CHECKSUM_AT]) != checksum:
        raise IntegrityError("the chunk's header is damaged", code="header_checksum")
    fields = _FIELDS.unpack_from(head)
    _, _, header_bytes, payload_bytes, flags, pages, depth, first_layer, layer_end = fields[:9]
    layers, kv_heads, head_dim, page_size = fields[9:13]
    dtype, layout, namespace, identity, parent, key_id, checksum_name, hidden, from_hidden, zeros = fields[13:]
    try:
        geometry = KvGeometry(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=text_of(dtype),
            hidden=hidden,
            absent=first_layer,
            from_hidden=from_hidden,
        )
        is_sound = (
            not geometry.fault()
            and (header_bytes, payload_bytes) == (header_nbytes(geometry), payload_nbytes(geometry))
            and (pages, layer_end) == (chunk_pages(page_size), layers)
            and text_of(checksum_name) == CHECKSUM
            and flags == (IS_SEALED if text_of(key_id) else 0)
            and (version == PLAIN_VERSION or flags == IS_SEALED)
            and not any(zeros)
        )
        header = ChunkHeader(
            version=version,
            namespace=namespace.hex(),
            identity=identity,
            parent=parent,
            depth=depth,
            geometry=geometry,
            layout=text_of(layout),
            key_id=text_of(key_id),
        )
    except UnicodeDecodeError as error:
        raise IntegrityError("a name in the chunk's header is not ASCII", code="wrong_layout") from error
    if not is_sound:
        raise IntegrityError("the chunk's header contradicts itself", code="wrong_layout")
    if nbytes < header.nbytes:
        raise IntegrityError(f"the chunk ends after {nbytes} of {header.nbytes} bytes", code="truncated")
    if nbytes > header.nbytes:
        raise IntegrityError(f"the chunk has {nbytes} bytes, not {header.nbytes}", code="wrong_layout")
    return header, body_checksum


def is_zero(view: memoryview) -> bool:
    """Return whether there are only zeros."""
    return bytes(view).count(0) == view.nbytes


def text_of(padded: bytes) -> str:
    """Return a name as a header holds it, without the zeros behind it. Raises UnicodeDecodeError unless it is ASCII."""
    return padded.rstrip(b"\0").decode("ascii")


def check(header: ChunkHeader, key: ChunkKey, geometry: KvGeometry) -> None:
    """Raise IntegrityError unless ``header`` is that of the chunk called ``key`` with pages of ``geometry``.

    ``key`` is the cell's name. Hidden fields of a sealed header can be checked only when it is opened: then check
    again.

    Codes: ``wrong_namespace``, ``wrong_identity``, ``wrong_dtype``, ``wrong_geometry``, ``wrong_layout``, and
    ``wrong_tokens`` when the identity does not follow from parent and tokens (not for a sealed header).
    """
    if header.namespace != key.namespace:
        raise _wrong("namespace", header.namespace, key.namespace)
    if header.geometry.dtype != geometry.dtype:
        raise _wrong("dtype", header.geometry.dtype, geometry.dtype)
    if header.geometry != geometry or _geometry_id(geometry) != key.geometry:
        raise _wrong(
            "geometry", f"{header.geometry} ({header.key.geometry.hex()})", f"{geometry} ({key.geometry.hex()})"
        )
    if header.layout != LAYOUT:
        raise _wrong("layout", header.layout, LAYOUT)
    if header.hides_names:
        return
    if header.identity != key.identity:
        raise _wrong("identity", header.identity.hex(), key.identity.hex())
    if (header.depth == 0) != (header.parent == chain_root(header.namespace)):
        raise _wrong("tokens", f"depth {header.depth} below {header.parent.hex()}", "a place on the chain")
    if not header.is_sealed and header.identities[-DIGEST_BYTES:] != header.identity:
        raise _wrong("tokens", f"tokens of {header.identities[-DIGEST_BYTES:].hex()}", header.identity.hex())


def _wrong(what: str, found: str, expected: str) -> IntegrityError:
    return IntegrityError(f"wrong {what}: the chunk has {found}, not {expected}", code=f"wrong_{what}")

"""The header of a sparse copy, format versions 1 and 2: whose KV it is, in which layout, and what each unit hashes to.

``docs/reference/sparse-format.md`` is the byte by byte table. The fixed header of 256 bytes has two checksums: its own,
and that of everything behind it up to the probe keys. There lie the **tables**: the ``mapping``, which says for each
stored row which token of the chunk it is of, and a checksum (xxh3_64) for every unit. Of a sealed copy they hold nonce
and tag of every unit as well, and are sealed themselves (``unit_sealing``).

So a part is trusted by a chain: the header by its checksum and by the name under which it was asked for, the tables by
the header, each unit by the tables. What is not read is not looked at. All integers are little-endian, and equal KV in
equal order makes equal copies unless they are sealed.

Codes of IntegrityError are those of ``chunk_format``: ``not_a_chunk``, ``unknown_version``, ``truncated``,
``header_checksum``, ``wrong_layout``, ``wrong_geometry``, ``wrong_dtype``, ``wrong_namespace``, ``wrong_identity``,
``wrong_key``, ``wrong_checksum``.
"""

from __future__ import annotations

import struct
from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from services.storage.backends import ChunkKey
from services.storage.chunk_format import PLAIN_VERSION, SEALED_VERSION, ChunkHeader, text_of
from services.storage.chunk_sealing import Cipher
from services.storage.sparse.layout import CHECKSUM_BYTES, FIXED_BYTES, MAPPING_BYTES, SEAL_BYTES, SparseLayout
from shared.errors import IntegrityError
from shared.ids import DIGEST_BYTES
from shared.messages.pools import KvGeometry

MAGIC = b"TCSPARSE"
CHECKSUM = "xxh3_64"
IS_SEALED, HAS_CODES = 1, 2  # Flags.

# magic, version, header bytes, blob bytes, flags, tokens, probe heads, block tokens, geometry (layers, heads, head_dim,
# page_size), dtype, namespace, identity, key id, checksum's name, depth and parent (zeros where they are not said),
# zeros. Then come the checksum of the tables, and that of all of this.
_FIELDS = struct.Struct("<8sIIQIIIIIIII16s16s16s32s16sQ16s64s")
_SPARE_BYTES = 64
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = FIXED_BYTES - _CHECKSUM.size
_VERSION = struct.Struct("<I")


class SparseHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The fixed header. ``key_id`` is "" where the copy is not sealed, ``parent`` zeros where its place is unknown.

    ``identity`` and ``parent`` are hidden where :attr:`hides_names`.
    """

    version: int = PLAIN_VERSION
    namespace: str
    identity: bytes
    layout: SparseLayout
    key_id: str = ""
    depth: int = 0
    """Tokens from the root to the first of the chunk."""
    parent: bytes = bytes(DIGEST_BYTES)
    """As in the header of the chunk: the page before it, the namespace's root at depth 0."""

    @classmethod
    def of(cls, chunk: ChunkHeader, layout: SparseLayout, *, key_id: str = "", cipher: Cipher) -> SparseHeader:
        """Return the header of a copy of the chunk with the header ``chunk``, which is not sealed.

        The copy is sealed unless ``key_id`` is "". Raises KeyMissing.
        """
        plain = cls(
            namespace=chunk.namespace, identity=chunk.identity, layout=layout, depth=chunk.depth, parent=chunk.parent
        )
        if not key_id:
            return plain
        return msgspec.structs.replace(
            plain,
            version=SEALED_VERSION,
            identity=cipher.hide(key_id, chunk.identity),
            parent=cipher.hide(key_id, chunk.parent),
            key_id=key_id,
        )

    @property
    def hides_names(self) -> bool:
        """Whether ``identity`` is encrypted (``Cipher.hide``)."""
        return self.version == SEALED_VERSION

    @property
    def is_sealed(self) -> bool:
        """Whether the copy is encrypted."""
        return bool(self.key_id)

    @property
    def key(self) -> ChunkKey:
        """The name under which this copy belongs, at rest where it is sealed."""
        return replace(self.layout.key(self.namespace, self.identity), is_sealed=self.hides_names)

    @property
    def header_bytes(self) -> int:
        """Bytes of header and tables, whole blocks of the disk."""
        return self.layout.header_bytes(is_sealed=self.is_sealed)

    @property
    def blob_bytes(self) -> int:
        """Bytes of the whole copy, whole blocks of the disk."""
        return self.layout.blob_bytes(is_sealed=self.is_sealed)


class SparseTables(msgspec.Struct, frozen=True, kw_only=True):
    """The tables of a copy. Its arrays are read-only."""

    mapping: npt.NDArray[np.uint32]
    """[tokens]: the token, counted from the chunk's first, of each stored row; every token once."""
    checksums: npt.NDArray[np.uint64]
    """[layers, units]: of units as they are stored."""
    seals: npt.NDArray[np.uint8] | None = None
    """[layers, units, 28]: nonce and tag of each unit; None where the copy is not sealed."""


def fixed_fields(header: SparseHeader) -> bytes:
    """Return the fixed header without its two checksums: sealed parts are authenticated with it."""
    layout, geometry = header.layout, header.layout.geometry
    return _FIELDS.pack(
        MAGIC,
        header.version,
        header.header_bytes,
        header.blob_bytes,
        _flags(header),
        layout.tokens,
        layout.probe_heads,
        layout.block_tokens,
        geometry.layers,
        geometry.kv_heads,
        geometry.head_dim,
        geometry.page_size,
        geometry.dtype.encode(),
        bytes.fromhex(header.namespace),
        header.identity,
        header.key_id.encode(),
        CHECKSUM.encode(),
        header.depth,
        header.parent,
        bytes(_SPARE_BYTES),
    )


def write_head(blob: memoryview, header: SparseHeader, tables: bytes) -> None:
    """Write everything before the probe keys; ``tables`` are of :func:`pack_tables`, sealed where they must be."""
    end = header.header_bytes
    blob[FIXED_BYTES:end] = tables + bytes(end - FIXED_BYTES - len(tables))
    blob[: _FIELDS.size] = fixed_fields(header)
    blob[_FIELDS.size : _CHECKSUM_AT] = _CHECKSUM.pack(_digest(blob[FIXED_BYTES:end]))
    blob[_CHECKSUM_AT:FIXED_BYTES] = _CHECKSUM.pack(_digest(blob[:_CHECKSUM_AT]))


def pack_tables(tables: SparseTables) -> bytes:
    """Return the tables as they are stored, before sealing."""
    seals = b"" if tables.seals is None else tables.seals.tobytes()
    return tables.mapping.astype("<u4").tobytes() + tables.checksums.astype("<u8").tobytes() + seals


def unpack_tables(packed: bytes, layout: SparseLayout, *, is_sealed: bool) -> SparseTables:
    """Undo :func:`pack_tables`. Raises IntegrityError(code="wrong_layout") where rows are not the tokens, each once."""
    middle = layout.tokens * MAPPING_BYTES
    checksums_end = middle + layout.geometry.layers * layout.units * CHECKSUM_BYTES
    mapping = np.frombuffer(packed[:middle], "<u4")
    if not np.array_equal(np.sort(mapping), np.arange(layout.tokens)):
        raise IntegrityError("the rows of a sparse copy are not its tokens, each once", code="wrong_layout")
    shape = (layout.geometry.layers, layout.units)
    seals = np.frombuffer(packed[checksums_end:], np.uint8).reshape(*shape, SEAL_BYTES) if is_sealed else None
    checksums = np.frombuffer(packed[middle:checksums_end], "<u8").reshape(shape)
    return SparseTables(mapping=mapping, checksums=checksums, seals=seals)


def read_fixed(head: memoryview, nbytes: int) -> SparseHeader:
    """Parse the header from the first block of a copy of ``nbytes`` bytes, as an inventory does.

    Raises IntegrityError: ``not_a_chunk``, ``unknown_version``, ``truncated``, ``header_checksum``, ``wrong_layout``.
    """
    if not head.nbytes or bytes(head[: len(MAGIC)]) != MAGIC[: head.nbytes]:
        raise IntegrityError("this is no sparse copy: the magic is missing", code="not_a_chunk")
    if min(head.nbytes, nbytes) < FIXED_BYTES:
        raise IntegrityError(f"the sparse copy ends after {nbytes} bytes, within its header", code="truncated")
    (version,) = _VERSION.unpack_from(head, len(MAGIC))
    if version not in (PLAIN_VERSION, SEALED_VERSION):
        raise IntegrityError(
            f"the sparse copy has format version {version}, not {PLAIN_VERSION} or {SEALED_VERSION}",
            code="unknown_version",
        )
    if _CHECKSUM.unpack_from(head, _CHECKSUM_AT) != (_digest(head[:_CHECKSUM_AT]),):
        raise IntegrityError("the header of the sparse copy is damaged", code="header_checksum")
    header = _parsed(head)
    if nbytes != header.blob_bytes:
        code = "truncated" if nbytes < header.blob_bytes else "wrong_layout"
        raise IntegrityError(f"the sparse copy has {nbytes} of {header.blob_bytes} bytes", code=code)
    return header


def read_head(head: memoryview, nbytes: int) -> tuple[SparseHeader, memoryview]:
    """Return the header and the tables' bytes with their padding, both checked.

    ``head`` has all that lies before the probe keys of a copy of ``nbytes`` bytes. Raises IntegrityError as
    :func:`read_fixed` does.
    """
    header = read_fixed(head, nbytes)
    if head.nbytes < header.header_bytes:
        raise IntegrityError(f"there are {head.nbytes} of {header.header_bytes} bytes of tables", code="truncated")
    body = head[FIXED_BYTES : header.header_bytes]
    if _CHECKSUM.unpack_from(head, _FIELDS.size) != (_digest(body),):
        raise IntegrityError("the tables of the sparse copy are damaged", code="header_checksum")
    return header, body


def check(header: SparseHeader, key: ChunkKey, layout: SparseLayout) -> None:
    """Raise IntegrityError unless ``header`` is that of the copy called ``key`` in ``layout``.

    An identity that is hidden is for :func:`check_hidden`. Codes: ``wrong_namespace``, ``wrong_dtype``,
    ``wrong_geometry``, ``wrong_identity``.
    """
    if header.namespace != key.namespace:
        raise _wrong("namespace", header.namespace, key.namespace)
    if header.layout.geometry.dtype != layout.geometry.dtype:
        raise _wrong("dtype", header.layout.geometry.dtype, layout.geometry.dtype)
    if header.layout != layout or layout.shape != key.geometry:
        raise _wrong("geometry", str(header.layout), f"{layout} ({key.geometry.hex()})")
    if not header.hides_names and header.identity != key.identity:
        raise _wrong("identity", header.identity.hex(), key.identity.hex())


def check_hidden(header: SparseHeader, key: ChunkKey, cipher: Cipher) -> None:
    """Raise IntegrityError(code="wrong_identity") if ``header`` hides another identity than that of ``key``.

    Raises KeyMissing where ``cipher`` lacks the header's key.
    """
    if header.hides_names and (found := cipher.show(header.key_id, header.identity)) != key.identity:
        raise _wrong("identity", found.hex(), key.identity.hex())


def _parsed(head: memoryview) -> SparseHeader:
    fields = _FIELDS.unpack_from(head)
    version, header_bytes, blob_bytes, flags, tokens, probe_heads, block_tokens = fields[1:8]
    layers, kv_heads, head_dim, page_size = fields[8:12]
    dtype, namespace, identity, key_id, checksum, depth, parent, zeros = fields[12:]
    try:
        geometry = KvGeometry(
            layers=layers, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=text_of(dtype)
        )
        layout = SparseLayout(geometry, probe_heads, block_tokens, has_codes=bool(flags & HAS_CODES))
        header = SparseHeader(
            version=version,
            namespace=namespace.hex(),
            identity=identity,
            layout=layout,
            key_id=text_of(key_id),
            depth=depth,
            parent=parent,
        )
        is_sound = (
            not geometry.fault()
            and not layout.fault()
            and tokens == layout.tokens
            and (header_bytes, blob_bytes) == (header.header_bytes, header.blob_bytes)
            and flags == _flags(header)
            and (header.is_sealed or not header.hides_names)
            and text_of(checksum) == CHECKSUM
            and depth % layout.tokens == 0
            and not any(zeros)
        )
    except UnicodeDecodeError as error:
        raise IntegrityError("a name in the header of the sparse copy is not ASCII", code="wrong_layout") from error
    if not is_sound:
        raise IntegrityError("the header of the sparse copy contradicts itself", code="wrong_layout")
    return header


def _flags(header: SparseHeader) -> int:
    return IS_SEALED * header.is_sealed | HAS_CODES * header.layout.has_codes


def _digest(view: memoryview) -> int:
    return int(xxhash.xxh3_64_intdigest(view))


def _wrong(what: str, found: str, expected: str) -> IntegrityError:
    return IntegrityError(f"wrong {what}: the sparse copy has {found}, not {expected}", code=f"wrong_{what}")

"""Sparse copies made of the pages of a chunk of KV.

Blocking: for I/O threads. No byte is read from a tier here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from services.storage.chunk_sealing import Cipher
from services.storage.sparse.format import SparseHeader, SparseTables, pack_tables, write_head
from services.storage.sparse.key_codes import encode_keys
from services.storage.sparse.layout import SEAL_BYTES, SparseLayout
from services.storage.sparse.unit_sealing import UnitSealing, seal_tables

Bytes = npt.NDArray[np.uint8]


def areas(blob: memoryview, layout: SparseLayout, *, is_sealed: bool) -> tuple[Bytes, Bytes]:
    """(probe keys [layers, probe_heads, tokens, probe_row_bytes], rows [layers, 2, tokens, row_bytes]); no copies."""
    layers, whole = layout.geometry.layers, np.frombuffer(blob, np.uint8)
    probe_at, kv_at = layout.header_bytes(is_sealed=is_sealed), layout.kv_at(is_sealed=is_sealed)
    probes = whole[probe_at : probe_at + layers * layout.probe_bytes]
    rows = whole[kv_at : kv_at + layers * layout.layer_bytes]
    units = layout.tokens, layout.probe_row_bytes
    if layout.has_codes:
        by_layer = probes.reshape(layout.probe_heads, layers, *units).transpose(1, 0, 2, 3)
    else:
        by_layer = probes.reshape(layers, layout.probe_heads, *units)
    return (
        by_layer,
        rows.reshape(layers, 2, layout.tokens, layout.row_bytes),
    )


def copy_pages(payload: memoryview, blob: memoryview, layout: SparseLayout, *, is_sealed: bool) -> None:
    """Copy the pages of a chunk of KV to where their copy has them, rows in order of their tokens.

    ``payload`` holds them as ``[pages, layers, 2, page_size, kv_heads, head_dim]``. :func:`complete` makes ``blob`` a
    copy that may be written.
    """
    geometry = layout.geometry
    probes, rows = areas(blob, layout, is_sealed=is_sealed)
    pages = np.frombuffer(payload, np.uint8).reshape(-1, geometry.layers, 2, geometry.page_size, layout.row_bytes)
    count = len(pages)
    paged = rows.reshape(geometry.layers, 2, count, geometry.page_size, layout.row_bytes)
    paged[...] = pages.transpose(1, 2, 0, 3, 4)
    keys = rows[:, 0].reshape(geometry.layers, layout.tokens, geometry.kv_heads, layout.head_bytes)
    of_probes = keys[:, :, : layout.probe_heads].transpose(0, 2, 1, 3)
    probes[...] = encode_keys(of_probes, geometry.dtype) if layout.has_codes else of_probes


def complete(blob: memoryview, header: SparseHeader, mapping: npt.NDArray[np.uint32], cipher: Cipher) -> SparseTables:
    """Write all but probe keys and rows, which ``blob`` has already, and seal it where ``header`` names a key.

    ``blob`` has ``header.blob_bytes`` bytes; returns its tables. Raises KeyMissing; the blob is of no use then.
    """
    layout, is_sealed = header.layout, header.is_sealed
    shape = (layout.geometry.layers, layout.units)
    sealing = UnitSealing(header, cipher) if is_sealed else None
    checksums, seals = [], []
    for layer in range(layout.geometry.layers):
        for number in range(layout.units):
            start, nbytes = layout.unit_at(layer, number, is_sealed=is_sealed)
            unit = blob[start : start + nbytes]
            if sealing is not None:
                seals.append(sealing.seal(unit, layer, number))
            checksums.append(xxhash.xxh3_64_intdigest(unit))
    for start, end in gaps(header):
        blob[start:end] = bytes(end - start)
    tables = SparseTables(
        mapping=mapping,
        checksums=np.array(checksums, np.uint64).reshape(shape),
        seals=np.frombuffer(b"".join(seals), np.uint8).reshape(*shape, SEAL_BYTES) if is_sealed else None,
    )
    packed = pack_tables(tables)
    write_head(blob, header, packed if sealing is None else seal_tables(packed, header, cipher))
    return tables


def gaps(header: SparseHeader) -> list[tuple[int, int]]:
    """Return the padding of probe keys and rows to whole blocks: (start, end) of either, all zeros."""
    layout = header.layout
    probes_end = header.header_bytes + layout.geometry.layers * layout.probe_bytes
    kv_at = layout.kv_at(is_sealed=header.is_sealed)
    return [(probes_end, kv_at), (kv_at + layout.geometry.layers * layout.layer_bytes, header.blob_bytes)]

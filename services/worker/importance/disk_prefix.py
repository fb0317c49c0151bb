"""The part of one request's prefix that is only on the disk of its node, as a source of keys, K and V.

What a layer wants is cut into calls; each answer fits in a slot and each question in a message. Tokens are
positions from the request's root, which is also what storage counts by.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.worker.importance.disk_reads import DiskReads
from services.worker.importance.identification import are_apart
from services.worker.importance.key_codes import decode_keys
from services.worker.kv.device_pool import TORCH_DTYPES
from shared.chunks import chunk_tokens
from shared.errors import InvalidRequest, SparsePrefixLost
from shared.ids import DIGEST_BYTES
from shared.messages.base import pack_int32
from shared.messages.sparse_reads import ReadSparse, SparsePart, code_bytes
from shared.messages.worker_plans import SparsePrefix

_TOKEN_BYTES = 4  # Of a position in a call.
_FRAME_BYTES = 1024  # More than names, numbers and heads in a call take.


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Keys of some layers that are being read or were, as they lie on the disk: ``[layers, len(heads), n, ...]``."""

    layers: range
    heads: tuple[int, ...]
    start: int
    codes: Future[torch.Tensor]


_AHEAD_MOST = 2
"""Reads of keys that a request has under way or has not used up."""


class DiskPrefix:
    """A :class:`~services.worker.importance.prefix_source.PrefixSource`. All reads raise SparsePrefixLost.

    ``disk_bytes`` is what storage has read from the disk for it so far, keys read ahead included.
    """

    def __init__(self, sparse: SparsePrefix, reads: DiskReads) -> None:
        """Prepare. Raises InvalidRequest for chunks that do not hold the prefix."""
        geometry = reads.geometry
        self.start, self.end, self.tokens = sparse.start, sparse.end, sparse.end - sparse.start
        self.kv_heads = geometry.kv_heads
        self.token_bytes = geometry.token_bytes // geometry.layers
        self._sparse, self._reads = sparse, reads
        self._vector_bytes = self.token_bytes // (2 * geometry.kv_heads)
        self._chunk_tokens = chunk_tokens(geometry.page_size)
        chunks, rest = divmod(len(sparse.chunks), DIGEST_BYTES)
        is_whole = not rest and sparse.depth + chunks * self._chunk_tokens == sparse.end
        if not is_whole or not sparse.depth <= sparse.start < sparse.end:
            raise InvalidRequest(
                f"{chunks} chunks from token {sparse.depth} on do not hold tokens [{sparse.start}, {sparse.end})"
            )
        self._ahead: list[_Ahead] = []
        self._counting = threading.Lock()
        self.disk_bytes = 0

    def probe_keys(self, layer: int, heads: Sequence[int], start: int, layers: int = 1) -> tuple[torch.Tensor, int]:
        """Return keys from an earlier read that covers them, or read them now."""
        asked = tuple(heads)
        read = self._read_before(layer, asked, start)
        if read is None:
            of_layers = self._read_probe_keys(layer, layers, asked, start)
            read = of_layers[0]
            if layers > 1:
                codes = Future[torch.Tensor]()
                codes.set_result(of_layers)
                self._ahead.append(_Ahead(range(layer, layer + layers), asked, start, codes))
        return decode_keys(read, self._reads.geometry.head_dim) if are_apart(heads) else read, read.nbytes

    def keys(self, layer: int, start: int) -> torch.Tensor:
        """Read the keys of all heads."""
        return self._read_keys("keys", layer, 1, tuple(range(self.kv_heads)), start)[0]

    def _read_before(self, layer: int, heads: tuple[int, ...], start: int) -> torch.Tensor | None:
        """Return ``[len(heads), n, ...]`` from a read that has begun and covers it, if there is one."""
        # Layers come in order: what is of earlier ones has been used, or will not be.
        self._ahead = [ahead for ahead in self._ahead if layer < ahead.layers.stop]
        for ahead in self._ahead:
            if layer in ahead.layers and (ahead.heads, ahead.start) == (heads, start):
                if ahead.codes.cancel():  # What has not begun by now is no sooner there than what is read here.
                    self._ahead.remove(ahead)
                    return None
                try:
                    codes = self._reads.wait(ahead.codes)
                except SparsePrefixLost:
                    self._ahead.remove(ahead)
                    raise
                if layer + 1 == ahead.layers.stop:  # The last one that asks for it: an answer may take long.
                    self._ahead.remove(ahead)
                return codes[layer - ahead.layers.start]
        return None

    def prefetch_keys(self, layer: int, layers: int, heads: Sequence[int], start: int) -> bool:
        """See the protocol. Nothing is begun while two reads are under way or not used up."""
        if len(self._ahead) >= _AHEAD_MOST:
            return False
        asked = tuple(heads)
        codes = self._reads.ahead(lambda: self._read_probe_keys(layer, layers, asked, start))
        if codes is not None:
            self._ahead.append(_Ahead(range(layer, layer + layers), asked, start, codes))
        return codes is not None

    def gather(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        """Read K and V of ``tokens``, in as many calls as slots and messages require."""
        wanted = tokens.cpu().numpy()[None]
        kv = self._read("kv", layer, (2, len(tokens), self.kv_heads), self._cut(wanted, self.token_bytes), wanted)
        return kv.transpose(1, 2)

    def values_by_head(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        """Read each head's V of its own tokens, all heads by the same calls."""
        wanted = tokens.cpu().numpy()
        heads = tuple(range(self.kv_heads))
        parts = self._cut(wanted, self.kv_heads * self._vector_bytes)
        return self._read("values", layer, (len(heads), wanted.shape[1]), parts, wanted, heads)

    def _read_probe_keys(self, layer: int, layers: int, heads: tuple[int, ...], start: int) -> torch.Tensor:
        """Return codes where storages keep these heads apart, else keys."""
        return self._read_keys("codes" if are_apart(heads) else "keys", layer, layers, heads, start)

    def _read_keys(self, part: SparsePart, layer: int, layers: int, heads: tuple[int, ...], start: int) -> torch.Tensor:
        wanted = np.arange(start, self.end, dtype=np.int64)[None]
        parts = self._cut(wanted, layers * len(heads) * self._bytes_of(part))
        keys = self._read(part, layer, (layers * len(heads), self.end - start), parts, wanted, heads, layers)
        return keys.view(layers, len(heads), *keys.shape[1:])

    def _bytes_of(self, part: SparsePart) -> int:
        """Return the bytes of one vector of an answer."""
        return code_bytes(self._reads.geometry.head_dim) if part == "codes" else self._vector_bytes

    def _read(
        self,
        part: SparsePart,
        layer: int,
        shape: tuple[int, ...],
        cuts: Iterator[slice],
        tokens: npt.NDArray[np.int64],
        heads: tuple[int, ...] = (),
        layers: int = 1,
    ) -> torch.Tensor:
        """Return what is asked for, ``[*shape, head_dim]``, or uint8 ``[*shape, code_bytes]``.

        Its second dimension is the n of tokens ``[rows, n]``, which are read in ``cuts`` of columns.
        """
        cut = [tokens[:, columns] for columns in cuts]
        dtype = torch.uint8 if part == "codes" else TORCH_DTYPES[self._reads.geometry.dtype]
        vector_bytes = self._bytes_of(part)
        width = vector_bytes // dtype.itemsize
        if not cut:
            return torch.empty(*shape, width, dtype=dtype, device=self._reads.device)
        vectors = int(np.prod(shape)) // shape[1]
        calls = [self._call(part, layer, layers, heads, each, vectors * each.shape[1] * vector_bytes) for each in cut]
        read = self._reads.read(self._sparse.storage_id, calls)
        with self._counting:
            self.disk_bytes += read.disk_bytes
        made = [
            raw.view(dtype).view(shape[0], each.shape[1], *shape[2:], width)
            for raw, each in zip(read.parts, cut, strict=True)
        ]
        return made[0] if len(made) == 1 else torch.cat(made, dim=1)

    def _call(
        self,
        part: SparsePart,
        layer: int,
        layers: int,
        heads: tuple[int, ...],
        tokens: npt.NDArray[np.int64],
        nbytes: int,
    ) -> ReadSparse:
        """Return the call for tokens ``[rows, n]``; it names only the chunks that hold them."""
        sparse = self._sparse
        first, end = self._chunks_of(tokens)
        is_run = part in ("codes", "keys")
        return ReadSparse(
            namespace=sparse.namespace,
            depth=sparse.depth + first * self._chunk_tokens,
            chunks=sparse.chunks[first * DIGEST_BYTES : end * DIGEST_BYTES],
            layer=layer,
            part=part,
            buffer="",
            offset=0,
            nbytes=nbytes,
            heads=heads,
            start=int(tokens[0, 0]) if is_run else 0,
            end=int(tokens[0, -1]) + 1 if is_run else 0,
            tokens=b"" if is_run else pack_int32(tokens),
            key_id=sparse.key_id,
            layers=layers,
        )

    def _cut(self, tokens: npt.NDArray[np.int64], token_bytes: int) -> Iterator[slice]:
        """Columns of tokens ``[rows, n]`` for one call after the other; a column's answer has ``token_bytes`` bytes."""
        count = tokens.shape[1]
        most = self._reads.slot_bytes // token_bytes
        room = self._reads.call_bytes - _FRAME_BYTES
        at = 0
        while at < count:
            columns = min(count - at, most)
            while columns > 1 and self._question_bytes(tokens[:, at : at + columns]) > room:
                columns //= 2
            yield slice(at, at + columns)
            at += columns

    def _question_bytes(self, tokens: npt.NDArray[np.int64]) -> int:
        first, end = self._chunks_of(tokens)
        return (end - first) * DIGEST_BYTES + tokens.size * _TOKEN_BYTES

    def _chunks_of(self, tokens: npt.NDArray[np.int64]) -> tuple[int, int]:
        """Return the run of chunks ``[first, end)`` that holds these tokens."""
        depth = self._sparse.depth
        first, last = int(tokens[:, 0].min()) - depth, int(tokens[:, -1].max()) - depth
        return first // self._chunk_tokens, last // self._chunk_tokens + 1

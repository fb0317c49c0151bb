"""A prefix in host memory of which a request reads parts, as a worker reads what its storage has put before it.

In service a storage reads the parts from its disk into a slot of shared memory, with a checksum; the worker verifies
them and copies them to the device. Here the parts are gathered from memory by this process, so the disk and the calls
between processes are missing, and everything from the slot on is what serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from services.storage.sparse.key_codes import encode_keys
from services.worker.importance.key_codes import decode_keys
from services.worker.importance.landing import Landing
from shared.messages.sparse_reads import code_bytes

SLOT_BYTES = 4 * 2**20
"""Of a worker's read buffers by default; what is larger comes in several pieces."""


class HostPrefix:
    """A :class:`~services.worker.importance.prefix_source.PrefixSource` of tokens from 0 on."""

    def __init__(self, kv: torch.Tensor, device: torch.device) -> None:
        """kv ``[layers, 2, tokens, kv_heads, head_dim]`` on the host, of the model's data type."""
        self.start, self.end, self.tokens = 0, kv.shape[2], kv.shape[2]
        self.kv_heads, self._head_dim, self._dtype = kv.shape[3], kv.shape[4], kv.dtype
        self.token_bytes = 2 * self.kv_heads * self._head_dim * kv.element_size()
        self._kv = kv.contiguous().view(torch.uint8).numpy()
        # Keys of a head lie together, as in a storage's sparse form, so that few heads are read without the others.
        keys = np.ascontiguousarray(self._kv[:, 0].swapaxes(1, 2))
        self._codes = encode_keys(keys, str(kv.dtype).removeprefix("torch."))
        self._slot = np.empty(SLOT_BYTES, dtype=np.uint8)
        self._landing = Landing(device, SLOT_BYTES)
        self._device = device

    def probe_keys(self, layer: int, heads: Sequence[int], start: int, layers: int = 1) -> tuple[torch.Tensor, int]:
        codes = self._codes[layer, list(heads), start:]
        read = self._read(len(heads), codes.shape[1], lambda part: codes[:, part], torch.uint8)
        return decode_keys(read, self._head_dim), read.nbytes

    def keys(self, layer: int, start: int) -> torch.Tensor:
        keys = self._kv[layer, 0, start:].swapaxes(0, 1)
        return self._read(self.kv_heads, keys.shape[1], lambda part: keys[:, part])

    def prefetch_keys(self, layer: int, layers: int, heads: Sequence[int], start: int) -> bool:
        """Nothing is read ahead: what is measured is reading."""
        return False

    def gather(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        wanted = tokens.cpu().numpy()
        read = self._read(2 * self.kv_heads, wanted.size, lambda part: self._kv[layer][:, wanted[part]].swapaxes(1, 2))
        return read.view(2, self.kv_heads, wanted.size, self._head_dim)

    def values_by_head(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        wanted = tokens.cpu().numpy()
        heads = np.arange(self.kv_heads)[:, None]
        return self._read(self.kv_heads, wanted.shape[1], lambda part: self._kv[layer, 1][wanted[:, part], heads])

    def _read(
        self, rows: int, count: int, of: Callable[[slice], npt.NDArray[np.uint8]], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """``[rows, count, head_dim or code bytes]`` on the device, in pieces; ``of`` gives bytes of some columns."""
        dtype = dtype or self._dtype
        width = code_bytes(self._head_dim) if dtype == torch.uint8 else self._head_dim
        pieces = [self._land(of(part)).view(dtype) for part in self._pieces(rows, count, width * dtype.itemsize)]
        if not pieces:
            return torch.empty(rows, 0, width, dtype=dtype, device=self._device)
        shaped = [piece.view(rows, -1, width) for piece in pieces]
        return shaped[0] if len(shaped) == 1 else torch.cat(shaped, dim=1)

    def _pieces(self, rows: int, count: int, vector_bytes: int) -> Iterator[slice]:
        columns = SLOT_BYTES // (rows * vector_bytes)
        return (slice(at, min(count, at + columns)) for at in range(0, count, columns))

    def _land(self, gathered: npt.NDArray[np.uint8]) -> torch.Tensor:
        filled = self._slot[: gathered.size]
        filled[:] = gathered.reshape(-1)
        return self._landing.land(filled, xxhash.xxh3_64_intdigest(filled.data))

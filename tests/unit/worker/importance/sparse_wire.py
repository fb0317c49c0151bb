"""Both ends of reads of parts of a prefix, in one process: an event loop of its own, a bus, shared memory, and a
storage that reads from an array.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
import torch

from bench.stored_prefix import StoredPrefix
from services.storage.sparse.key_codes import encode_keys
from services.storage.sparse_calls import SparseCalls
from services.worker.importance.disk_prefix import DiskPrefix
from services.worker.importance.disk_reads import DiskReads
from services.worker.importance.read_buffers import ReadBuffers
from services.worker.importance.storage_calls import StorageCalls
from services.worker.kv.device_pool import TORCH_DTYPES
from shared import subjects
from shared.chunks import chunk_tokens
from shared.importance import PROBE_HEADS
from shared.memory import unlink_all
from shared.messages.base import unpack_int32
from shared.messages.pools import KvGeometry
from shared.messages.requests import Importance
from shared.messages.sparse_reads import ReadSparse
from shared.messages.worker_plans import SparsePrefix
from tests.memory_bus import MemoryBroker
from tests.run_name import RUN

T = TypeVar("T")

GEOMETRY = KvGeometry(layers=3, kv_heads=2, head_dim=8, page_size=16, dtype="float32")
TOKEN_BYTES = 2 * 2 * 8 * 4


def made_kv(geometry: KvGeometry, tokens: int, seed: int = 0) -> torch.Tensor:
    """Random KV of tokens from the root on, ``[layers, 2, tokens, kv_heads, head_dim]``."""
    generator = torch.Generator().manual_seed(seed)
    shape = (geometry.layers, 2, tokens, geometry.kv_heads, geometry.head_dim)
    return torch.randn(shape, generator=generator).to(TORCH_DTYPES[geometry.dtype])


def names_of(chunks: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in range(chunks))


def sparse_prefix(geometry: KvGeometry, depth: int, start: int, end: int) -> SparsePrefix:
    """Tokens ``[start, end)``, in chunks from ``depth`` on that are named by their number from the root."""
    size = chunk_tokens(geometry.page_size)
    return SparsePrefix(
        storage_id="s",
        namespace="0" * 32,
        start=start,
        end=end,
        depth=depth,
        chunks=names_of(end // size)[depth // size * 16 :],
        pages=b"",
        importance=Importance(ratio=0.5),
        key_id="key",
    )


class ArrayReader:
    """Reads from the KV of a request as ``shared.messages.sparse_reads`` says.

    Calls for a layer in ``gates`` wait for its gate; ``asked`` has all calls, in the order in which they began, and
    ``began`` is set by the first.
    """

    def __init__(self, kv: torch.Tensor, page_size: int) -> None:
        self._bytes = kv.view(torch.uint8).numpy()  # The last dimension is head_dim in bytes.
        self._codes = encode_keys(self._bytes[:, 0], str(kv.dtype).removeprefix("torch."))
        self._chunk_tokens = chunk_tokens(page_size)
        self.asked: list[ReadSparse] = []
        self.began = threading.Event()
        self.gates: dict[int, asyncio.Event] = {}
        self.error: Exception | None = None

    async def read(self, call: ReadSparse, into: memoryview) -> int:
        self.asked.append(call)
        self.began.set()
        if call.layer in self.gates:
            await self.gates[call.layer].wait()
        if self.error is not None:
            raise self.error
        found = np.ascontiguousarray(self._part(call))
        assert found.nbytes == call.nbytes == len(into)
        into[:] = found.reshape(-1).data
        return found.nbytes

    def _part(self, call: ReadSparse) -> np.ndarray:
        """Uint8; only what lies in the chunks that the call names."""
        first = call.depth // self._chunk_tokens
        chunks = len(call.chunks) // 16
        assert call.chunks == names_of(first + chunks)[16 * first :]
        held = range(call.depth, call.depth + chunks * self._chunk_tokens)
        if call.part in ("codes", "keys"):
            assert call.start in held
            assert call.end - 1 in held
            keys = self._codes if call.part == "codes" else self._bytes[:, 0]
            layers = keys[call.layer : call.layer + call.layers]
            rows: np.ndarray = layers[:, call.start : call.end, list(call.heads)].swapaxes(1, 2)
            return rows
        assert call.layers == 1
        k, v = self._bytes[call.layer]
        tokens = np.array(unpack_int32(call.tokens))
        assert all(token in held for token in tokens.tolist())
        if call.part == "kv":
            return np.stack([k[tokens], v[tokens]])
        rows = tokens.reshape(len(call.heads), -1)
        return np.stack([v[row, head] for head, row in zip(call.heads, rows, strict=True)])


class SparseWire:
    """The test's thread is the worker's compute thread. Whoever made it closes it."""

    def __init__(
        self,
        kv: torch.Tensor,
        geometry: KvGeometry = GEOMETRY,
        *,
        slot_bytes: int,
        slots: int,
        max_payload: int = 2**20,
    ) -> None:
        self.prefix_of_names = f"{RUN}-{secrets.token_hex(4)}"
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="wire")
        self._thread.start()
        self.geometry = geometry
        self.reader = ArrayReader(kv, geometry.page_size)
        self.buffers = ReadBuffers(self.prefix_of_names, slot_bytes * slots, slots=slots)
        self._made: list[DiskReads] = []
        self._kv = kv
        self.run(self._connect(max_payload))

    def run(self, body: Coroutine[Any, Any, T]) -> T:
        """Run on the event loop."""
        return asyncio.run_coroutine_threadsafe(body, self.loop).result(30)

    def reads(self, timeout_s: float = 20.0) -> DiskReads:
        """A reader over the one buffer and bus; it waits at most so long."""
        made = DiskReads(self.buffers, self.calls, self.geometry, torch.device("cpu"), timeout_s=timeout_s)
        self._made.append(made)
        return made

    def prefix(self, depth: int, start: int, end: int, timeout_s: float = 20.0) -> DiskPrefix:
        return DiskPrefix(sparse_prefix(self.geometry, depth, start, end), self.reads(timeout_s))

    def stored(self, start: int, end: int) -> StoredPrefix:
        return StoredPrefix(self._kv[:, :, start:end], range(min(PROBE_HEADS, self.geometry.kv_heads)), start)

    def close_gate(self, layer: int) -> None:
        self.reader.gates[layer] = asyncio.Event()

    def open_gate(self, layer: int) -> None:
        self.loop.call_soon_threadsafe(self.reader.gates[layer].set)

    def close(self) -> None:
        for made in self._made:
            self.run(made.close())
        self.run(self._disconnect())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)
        self.loop.close()
        unlink_all(self.prefix_of_names)

    async def _connect(self, max_payload: int) -> None:
        broker = MemoryBroker(max_payload=max_payload)
        self.storage, self.worker = broker.connect("storage"), broker.connect("worker")
        self.storage_calls = SparseCalls(lambda: self.reader, self.prefix_of_names)
        await self.storage.serve(subjects.rpc("storage", "sparse", "s"), self.storage_calls.answer)
        self.calls = StorageCalls(self.worker)

    async def _disconnect(self) -> None:
        for gate in self.reader.gates.values():
            gate.set()
        await self.calls.close()
        await self.worker.close()
        await self.storage.close()
        self.storage_calls.close()

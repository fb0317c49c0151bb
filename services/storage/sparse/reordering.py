"""Copies whose rows lie badly are written anew, the often chosen rows first (IMPRESS 4.4.1, KV reordering).

What is chosen lies scattered, so most of what a block holds is read in vain; where often chosen rows share blocks,
fewer are read. Rows change places within their chunk only. A chunk is what prompts share and what is evicted: rows of
two chunks in one block would be read by prompts that have but one of them, and kept or lost together (the paper keeps
within the nodes of its radix tree for the same reasons).

A copy is due once it has wasted as many bytes as rewriting it moves: so no more is ever spent on it than was lost
without it, and a copy that is seldom read is never rewritten. It is rewritten only if the reads that it had would
have touched markedly fewer blocks. All layers have one order, by the average over them. One copy is rewritten at a
time, at a bounded rate (``sparse_reorder_bytes_per_s``), while it is not read, into a new file that takes the old
one's name: ended anywhere, one of the two is there, and both are right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np

from services.storage import measures
from services.storage.backends import BLOCK_BYTES, ChunkBackend, ChunkKey
from services.storage.chunk_sealing import Cipher
from services.storage.disk_tier import DiskTier
from services.storage.paced_reads import PacedReads
from services.storage.sparse.chunk_turns import ChunkTurns
from services.storage.sparse.format import SparseHeader, SparseTables, read_fixed
from services.storage.sparse.layout import SparseLayout, V
from services.storage.sparse.making import complete, copy_rows
from services.storage.sparse.opened_heads import OpenedHeads
from services.storage.sparse.part_reading import READ_TIMEOUT_S, Opened
from services.storage.sparse.read_check import Asked
from services.storage.sparse.read_plan import ChunkRead
from services.storage.sparse.token_uses import Shares, TokenUses, by_share, expected_blocks
from services.storage.sparse.verification import verify_copy
from services.storage.staging import Staging
from services.storage.tier_events import TierEvents
from shared import logs
from shared.errors import CapacityError, IntegrityError, NotFound, ThermoclineError

LEAST_GAIN = 0.1
"""Share of the blocks that a new order must spare: with less, chance in what was seen would rewrite files for ever."""

TURN_S = 0.1
"""The longest wait for those who read a copy once its new order is made, which holds up those who come after them; then
it stays as it is for now.
"""

_log = logs.get_logger("storage")


class Reordering:
    """Owned by the event loop; ``run`` works until it is cancelled."""

    def __init__(
        self,
        layout: SparseLayout,
        disk: DiskTier,
        *,
        staging: Staging,
        turns: ChunkTurns,
        heads: OpenedHeads,
        cipher: Cipher,
        events: TierEvents,
        pace: PacedReads,
        uses: TokenUses | None = None,
    ) -> None:
        """Buffers of ``staging`` hold a whole copy, and are taken only while no read wants them; ``pace`` is of
        this work alone.
        """
        self.rewritten = 0
        """Copies."""
        self._layout = layout
        self._disk = disk
        self._staging = staging
        self._turns = turns
        self._heads = heads
        self._cipher = cipher
        self._events = events
        self._pace = pace
        self._uses = TokenUses() if uses is None else uses
        self._is_due = asyncio.Event()
        self._due_bytes = 2 * layout.blob_bytes(is_sealed=True)  # It is read once and written once.

    def learn(self, asked: Asked, reads: Sequence[ChunkRead], opened: Sequence[Opened]) -> None:
        """Record what a call chose and read. Reads of keys alone choose nothing."""
        if V not in asked.halves:
            return
        for read in reads:
            counts = np.zeros(self._layout.tokens, np.float32)
            mapping = opened[read.place].tables.mapping
            for piece in read.pieces:
                counts[mapping[piece.rows]] += 1
            rows = int(np.count_nonzero(counts))
            needed = len(asked.halves) * -(-rows // self._layout.block_tokens)
            wasted = (len(read.units) - needed) * self._layout.block_bytes
            if self._uses.note(read.key, counts / np.float32(len(read.pieces)), wasted) >= self._due_bytes:
                self._is_due.set()

    async def run(self) -> None:
        """Rewrite what is due, for ever."""
        while True:
            await self._is_due.wait()
            await self.rewrite_due()

    async def rewrite_due(self) -> None:
        """Rewrite what is due now, the most wasteful first, until one must be tried again."""
        self._is_due.clear()
        while (key := self._uses.most_wasteful(self._due_bytes)) is not None:
            if not await self._rewrite(key):
                return  # The next read of it tells that it is due again.

    async def _rewrite(self, key: ChunkKey) -> bool:
        """Rewrite a copy if that is of use. False if it must be tried again."""
        if key not in self._disk:
            self._uses.forget(key)
            return True
        nbytes = self._disk.index.nbytes_of(key)
        await self._pace.wait(2 * nbytes)
        await self._disk.pace.wait(nbytes)
        shares = self._uses.shares(key)
        if shares is None or not self._disk.index.hold(key):
            self._uses.forget(key)
            return True
        outcome = "failed"
        try:
            outcome = await self._rewrite_held(key, shares)
        except IntegrityError as error:
            self._disk.quarantine(key, error)
            await self._events.dropped([key])
        except (ThermoclineError, OSError) as error:
            _log.info("sparse_copy_not_reordered", chunk=key.path, reason=str(error))
        finally:
            self._disk.index.release(key)
        measures.SPARSE_REORDERED.labels(outcome).inc()
        self.rewritten += outcome == "rewritten"
        if outcome in ("busy", "failed"):
            return False
        self._uses.settled(key)
        return True

    async def _rewrite_held(self, key: ChunkKey, shares: Shares) -> str:
        try:
            old, new = self._staging.take(timeout_s=0.0), None
        except CapacityError:
            return "busy"
        try:
            new = self._staging.take(timeout_s=0.0)
            blob = await self._made_in_thread(key, shares, old, new)
            if blob is None:
                return "left"
            async with asyncio.timeout(TURN_S) as limit, self._turns.writing(key):
                limit.reschedule(None)
                # First: if this is cut off, the file may have been replaced all the same.
                self._heads.forget(key)
                is_replaced = await self._disk.replace(key, blob)
            return "rewritten" if is_replaced else "left"
        except (CapacityError, TimeoutError):
            # Of buffers, of the disk, or of a pause between two reads.
            return "busy"
        finally:
            for buffer in (old, new):
                if buffer is not None:
                    self._disk.directories.abandoned.when_free(buffer, partial(self._staging.give_back, buffer))

    async def _made_in_thread(
        self, key: ChunkKey, shares: Shares, old: memoryview, new: memoryview
    ) -> memoryview | None:
        return await self._disk.directories.run(
            self._disk.directories.of(key),
            lambda: self._made(key, shares, old, new),
            is_urgent=False,
            timeout_s=READ_TIMEOUT_S,
            uses=(old, new),
        )

    def _made(self, key: ChunkKey, shares: Shares, old: memoryview, new: memoryview) -> memoryview | None:
        """Build the copy in its new order, in ``new``; None if that spares too little. Blocking: for I/O threads."""
        header, tables, blob = _read(self._disk.backend, key, self._layout, self._cipher, old)
        mapping = by_share(shares)
        now = expected_blocks(shares, tables.mapping, self._layout.block_tokens)
        if expected_blocks(shares, mapping, self._layout.block_tokens) > (1 - LEAST_GAIN) * now:
            return None
        made = new[: blob.nbytes]
        copy_rows(blob, tables.mapping, made, mapping, self._layout, is_sealed=header.is_sealed)
        complete(made, header, mapping, self._cipher)
        return made


def _read(
    backend: ChunkBackend, key: ChunkKey, layout: SparseLayout, cipher: Cipher, buffer: memoryview
) -> tuple[SparseHeader, SparseTables, memoryview]:
    """Read a whole copy, verified, and opened in ``buffer``."""
    nbytes = backend.get(key, buffer, timeout_s=READ_TIMEOUT_S)
    if not nbytes:
        raise NotFound(f"the file of sparse copy {key.path} is gone")
    blob = buffer[:nbytes]
    key_id = read_fixed(blob[:BLOCK_BYTES], nbytes).key_id
    header, tables = verify_copy(blob, key, layout, cipher=cipher, key_id=key_id)
    return header, tables, blob

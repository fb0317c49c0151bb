"""A gateway tells routers about its cell: which heads of prompts it holds, and how busy it is (ADR 0035).

Off unless the gateway is told the cell's name. It costs the gateway a second look at each body, and the scheduler
nothing: load is what the scheduler says anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from services.gateway.cell import CellView
from services.gateway.held_heads import HeldHeads
from services.gateway.pending import Generation
from services.gateway.prompt_heads import Head, asked_of
from shared import subjects
from shared.bus.protocol import Bus, Delivery
from shared.codec import encode
from shared.errors import Unavailable
from shared.messages.cells import HEAD_BYTES, CellHeads, CellLoad
from shared.messages.status import CellStatus
from shared.messages.tokens import Usage

TELL_S = 1.0
FOUND = tuple(f"hit_tokens_{source}" for source in ("device", "host", "disk", "remote", "neighbour", "lent"))
"""The scheduler's counters of prompt tokens that it found when it admitted a request."""

FIRST_TOKEN_BYTES = 4.0
TOKEN_BYTES_OF = 1 / 64
"""Weight of the newest prompt in the average length of a token."""

MOST_TOLD_BYTES = 32_768 * HEAD_BYTES
"""Of digests in one message; a whole summary has as many parts as it needs."""

EMPTY_FOR = 3
"""Times in a row that the scheduler must have nothing in its tree before its cell is taken to hold nothing."""

SOURCES = ("device", "host", "disk", "remote", "neighbour", "hidden", "sparse", "lent")


class CellReports:
    """Notes what was answered, and tells it once a second."""

    def __init__(
        self,
        bus: Bus,
        cell: str,
        gateway_id: str,
        incarnation: str,
        models: Sequence[str],
        fingerprint: str,
        view: CellView,
        clock: Callable[[], float],
    ) -> None:
        self.held = HeldHeads()
        self._bus = bus
        self._cell = cell
        self._gateway_id = gateway_id
        self._incarnation = incarnation
        self._models = tuple(models)
        self._fingerprint = fingerprint
        self._view = view
        self._clock = clock
        self._number = -1
        self._is_whole_wanted = True
        self._empty_for = 0
        self._token_bytes = FIRST_TOKEN_BYTES
        self._asked_tokens = 0

    def head_of(self, body: bytes | bytearray) -> Head:
        """Return the head of a request's prompt."""
        return asked_of(body).head

    def sent(self, generation: Generation) -> None:
        """Note a generation whose requests were sent to the scheduler."""
        self._asked_tokens += sum(choice.request.prompt_tokens for choice in generation.choices)

    def ended(self, generation: Generation) -> None:
        """Note the end of a generation that was sent. Without a token it was refused or cancelled, and nothing was
        computed.
        """
        refused = [choice for choice in generation.choices if not choice.assembly.tokens]
        self._asked_tokens -= sum(choice.request.prompt_tokens for choice in refused)

    def note(self, head: Head, generation: Generation) -> None:
        """Note the end of a generation. One that was not computed, or not to be kept, says nothing about the cache."""
        choice = generation.choices[0]
        hints = choice.request.cache
        if choice.failure is not None or not choice.assembly.tokens or not hints.write or not hints.read:
            return
        usage = choice.assembly.usage or Usage()
        if choice.request.prompt_tokens and head.nbytes:
            self._token_bytes += (head.nbytes / choice.request.prompt_tokens - self._token_bytes) * TOKEN_BYTES_OF
        cached = sum(getattr(usage, f"{source}_tokens") for source in SOURCES)
        self.held.note(head, choice.request.prompt_tokens, cached)

    async def run(self) -> None:
        """Tell for ever; while the broker is away nothing is told, and everything afterwards."""
        wanted = await self._bus.subscribe(subjects.heads_wanted(self._cell), self._on_wanted, pending_limit=64)
        try:
            while True:
                try:
                    await self.tell()
                except Unavailable:
                    self._is_whole_wanted = True
                await asyncio.sleep(TELL_S)
        finally:
            await wanted.close()

    async def tell(self) -> None:
        """Say what has changed, or all of it where somebody wants that. Raises Unavailable."""
        status = self._view.fresh_status(self._clock())
        if status is not None:
            self._bound(status)
        if self._is_whole_wanted:
            self._is_whole_wanted = False
            await self._tell_whole()
        else:
            added, removed = self.held.take_changes()
            for start in range(0, max(len(added), len(removed)), MOST_TOLD_BYTES):
                end = start + MOST_TOLD_BYTES
                await self._tell_heads(added=added[start:end], removed=removed[start:end])
        await self._bus.publish(
            subjects.cell_load(self._cell, self._gateway_id),
            encode(
                CellLoad(
                    cell=self._cell,
                    gateway=self._gateway_id,
                    incarnation=self._incarnation,
                    models=(*self._models, *(adapter.name for adapter in self._view.adapters())),
                    workers=len(status.workers) if status else 0,
                    running=status.running if status else 0,
                    queued=status.queued if status else 0,
                    max_queued=status.max_queued if status else 0,
                    heads_number=self._number,
                    asked_tokens=self._asked_tokens,
                    found_tokens=sum(status.counters.get(name, 0) for name in FOUND) if status else 0,
                    token_bytes=self._token_bytes,
                    fingerprint=self._fingerprint,
                )
            ),
        )

    async def _tell_whole(self) -> None:
        packed = self.held.take_whole()
        starts = range(0, max(1, len(packed)), MOST_TOLD_BYTES)
        for start in starts:
            more = len(starts) - 1 - start // MOST_TOLD_BYTES
            await self._tell_heads(added=packed[start : start + MOST_TOLD_BYTES], is_first=start == 0, more=more)

    async def _tell_heads(self, *, added: bytes, removed: bytes = b"", is_first: bool = False, more: int = 0) -> None:
        self._number += 1
        heads = CellHeads(
            cell=self._cell,
            gateway=self._gateway_id,
            incarnation=self._incarnation,
            number=self._number,
            added=added,
            removed=removed,
            is_first=is_first,
            more=more,
        )
        await self._bus.publish(subjects.cell_heads(self._cell, self._gateway_id), encode(heads))

    async def _on_wanted(self, delivery: Delivery) -> None:
        # However many routers ask, it is told once a second at the most.
        self._is_whole_wanted = True

    def _bound(self, status: CellStatus) -> None:
        """Hold no more than the cell's pools and disks do, and nothing when they are empty."""
        tokens = capacity_tokens(status)
        if tokens is not None:
            self.held.bound(tokens)
        is_empty = not status.nodes and not status.chunks_in_all and not status.running and not status.queued
        # A status is up to half a second old, and what was answered since is in no tree of its.
        self._empty_for = self._empty_for + 1 if is_empty else 0
        if self._empty_for >= EMPTY_FOR:
            self.held.clear()


def capacity_tokens(status: CellStatus) -> int | None:
    """Tokens of KV that the cell holds on all its tiers; None where an object store has no bound, or none is known."""
    if not status.page_bytes or any(budget.has_remote for budget in status.budgets):
        return None
    pages = sum(pool.total for pool in status.pools if pool.tier in ("device", "host"))
    pages += sum(budget.disk for budget in status.budgets) // status.page_bytes
    return pages * status.page_size

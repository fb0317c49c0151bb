"""A gateway's reports to routers: which heads of prompts its cell holds, and its load (ADR 0035).

Off unless the gateway is given the cell's name. Reports cost the gateway a second pass over each body, and the
scheduler nothing: load is part of its status.
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
"""The scheduler's counters of prompt tokens found in the cache when a request was admitted, by source."""

FIRST_TOKEN_BYTES = 4.0
TOKEN_BYTES_OF = 1 / 64
"""Weight of the newest prompt in the moving average of a token's length in bytes."""

MOST_TOLD_BYTES = 32_768 * HEAD_BYTES
"""Limit on the digests in one message; a whole summary is split into as many messages as it needs."""

EMPTY_FOR = 3
"""Consecutive statuses with an empty tree after which the cell is taken to hold nothing."""

SOURCES = ("device", "host", "disk", "remote", "neighbour", "hidden", "sparse", "lent")


class CellReports:
    """Notes answered prompts, and publishes heads and load once a second."""

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
        """Begin with no heads held and no tokens asked for.

        ``cell`` is the cell's name, under which routers get the reports, and ``incarnation`` differs for each start of
        the gateway. ``models`` are the names that it serves besides adapters, and ``fingerprint`` is the digest of
        everything that answers depend on. ``clock``, in seconds, is the one by which ``view`` notes when a status came.
        """
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
        """Return the head of the prompt in a request's body."""
        return asked_of(body, self._models[0]).head

    def sent(self, generation: Generation) -> None:
        """Note a generation whose requests were sent to the scheduler."""
        self._asked_tokens += sum(choice.request.prompt_tokens for choice in generation.choices)

    def ended(self, generation: Generation) -> None:
        """Note the end of a generation that was sent.

        A choice without a token was refused or cancelled: it counts nothing.
        """
        refused = [choice for choice in generation.choices if not choice.assembly.tokens]
        self._asked_tokens -= sum(choice.request.prompt_tokens for choice in refused)

    def note(self, head: Head, generation: Generation) -> None:
        """Add a generation's prompt to the held heads, unless it failed or did not both read and write the cache."""
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
        """Publish for ever. Nothing is published while the broker is away, and the whole summary afterwards."""
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
        """Publish the load and the changed heads, or all heads where a router asked for them. Raises Unavailable."""
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
        # The whole summary is published at most once a second, however many routers ask.
        self._is_whole_wanted = True

    def _bound(self, status: CellStatus) -> None:
        """Hold heads for no more tokens than the cell's pools and disks, and none when they are empty."""
        tokens = capacity_tokens(status)
        if tokens is not None:
            self.held.bound(tokens)
        is_empty = not status.nodes and not status.chunks_in_all and not status.running and not status.queued
        # A status is up to half a second old, and lacks what was answered since.
        self._empty_for = self._empty_for + 1 if is_empty else 0
        if self._empty_for >= EMPTY_FOR:
            self.held.clear()


def capacity_tokens(status: CellStatus) -> int | None:
    """Return how many tokens of KV all tiers of the cell hold; None with an unbounded object store, or if not known."""
    if not status.page_bytes or any(budget.has_remote for budget in status.budgets):
        return None
    pages = sum(pool.total for pool in status.pools if pool.tier in ("device", "host"))
    pages += sum(budget.disk for budget in status.budgets) // status.page_bytes
    return pages * status.page_size

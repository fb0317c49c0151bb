"""Promotions: host pages copied to the device ahead of demand, beside decoding (HotPrefix 3.4.3).

They use the transfer thread that batches load on, and must not delay a load: a promotion is cut into pieces of one
layer of a few pages, and each piece queues behind all loads submitted to that thread meanwhile. So a load waits for one
piece at most, which is why pieces are small. One promotion runs at a time, the others wait in order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.worker.kv.movers.protocol import PageMover
from services.worker.kv.verified_copy import VerifiedCopy
from shared import logs
from shared.messages.worker_plans import PromotePages

_log = logs.get_logger("worker")

PIECE_PAGES = 16
"""Pages of one piece, in one layer: 0.5 MiB for a page of 32 KiB a layer, far below a millisecond."""


@dataclass(frozen=True, slots=True)
class Promoted:
    """Outcome of one ``PromotePages``. ``bad_host_pages`` (packed int32) failed verification."""

    promotion_id: int
    reason: str  # "" when all pages are on the device.
    bad_host_pages: bytes
    pages: int
    started_ns: int
    ended_ns: int

    @property
    def is_ok(self) -> bool:
        """Whether all pages are on the device."""
        return not self.reason


@dataclass(slots=True)
class _Promotion:
    order: PromotePages
    copy: VerifiedCopy
    ended: Callable[[Promoted], None]
    pieces: Iterator[tuple[int, int]]  # (layer, first page)
    started_ns: int = 0
    refusal: str = ""  # Why it must not go on, apart from wrong pages.


class Promotions:
    """Queued promotions. Orders come from the compute thread; pieces run on the transfer thread."""

    def __init__(
        self,
        layers: int,
        mover: PageMover,
        submit: Callable[[Callable[[], None]], object],
        *,
        clock_ns: Callable[[], int],
    ) -> None:
        """Begin with no promotions; ``submit`` runs pieces on the transfer thread, in order, or at once.

        ``mover`` is used on that thread alone. A page has ``layers`` layers, and ``clock_ns`` gives the times in
        outcomes.
        """
        self._layers = layers
        self._mover = mover
        self._piece_pages = min(PIECE_PAGES, mover.piece_pages)
        self._submit = submit
        self._clock_ns = clock_ns
        self._queue: deque[_Promotion] = deque()
        self._is_submitted = False  # Whether a piece waits or runs; never two of them.
        self._is_closed = False
        # Reentrant, because a ``submit`` may run what it is given at once.
        self._lock = threading.RLock()

    def add(self, order: PromotePages, copy: VerifiedCopy, ended: Callable[[Promoted], None]) -> None:
        """Queue an order whose ``copy`` was opened; if opening failed, its first piece reports that."""
        starts = range(0, len(copy.pages), self._piece_pages)
        pieces = iter([(layer, start) for start in starts for layer in range(self._layers)])
        refusal = "" if copy.is_open else copy.pages.reason
        with self._lock:
            self._queue.append(_Promotion(order, copy, ended, pieces, refusal=refusal))
            if not self._is_submitted:
                self._submit_piece()

    def cancel(self, storage_id: str, reason: str) -> None:
        """Fail promotions from this storage; the piece under way is the last that is written."""
        with self._lock:
            for promotion in self._queue:
                if promotion.order.storage_id == storage_id:
                    promotion.refusal = promotion.refusal or reason

    def close(self) -> None:
        """Begin no piece after the one that runs now."""
        with self._lock:
            self._is_closed = True

    def _submit_piece(self) -> None:
        """Submit the next piece, if there is any and the thread still takes work. Called with the lock held."""
        self._is_submitted = bool(self._queue) and not self._is_closed
        if self._is_submitted:
            self._submit(self._run_piece)

    def _run_piece(self) -> None:
        """Run one piece, on the transfer thread; never raises."""
        with self._lock:
            if self._is_closed:
                return
            promotion = self._queue[0]
            refusal = promotion.refusal
        promotion.started_ns = promotion.started_ns or self._clock_ns()
        if refusal or not self._advance(promotion):
            self._settle(promotion)
            with self._lock:
                self._queue.popleft()
            promotion.ended(self._outcome(promotion, refusal))
        with self._lock:
            self._submit_piece()

    def _advance(self, promotion: _Promotion) -> bool:
        """Copy one piece; return False if there was none left.

        All pages are read even when one was wrong, so that every wrong one is known. In that case the promotion fails
        as a whole, and its device pages are reused.
        """
        piece = None if promotion.copy.pages.wrong.all() else next(promotion.pieces, None)
        if piece is None:
            return False
        layer, start = piece
        try:
            promotion.copy.copy(self._mover, layer, start, self._piece_pages)
            # A piece still in flight would delay the next load.
            self._mover.drain()
            promotion.copy.judge(layer)
        except Exception as error:
            promotion.refusal = promotion.refusal or f"{type(error).__name__}: {error}"
        return True

    def _settle(self, promotion: _Promotion) -> None:
        """Wait for a promotion's copies, then find pages that changed under them."""
        try:
            self._mover.drain()
            if not promotion.refusal:
                promotion.copy.confirm()
        except Exception as error:
            promotion.refusal = promotion.refusal or f"{type(error).__name__}: {error}"

    def _outcome(self, promotion: _Promotion, refusal: str) -> Promoted:
        copy = promotion.copy
        reason = refusal or promotion.refusal or copy.pages.reason
        if reason:
            _log.warning("promotion_failed", promotion=promotion.order.promotion_id, reason=reason)
        return Promoted(
            promotion_id=promotion.order.promotion_id,
            reason=reason,
            # A refused order is at fault itself; its pages may be good.
            bad_host_pages=copy.pages.wrong_pages if copy.is_open else b"",
            pages=0 if reason else len(copy.pages),
            started_ns=promotion.started_ns,
            ended_ns=self._clock_ns(),
        )

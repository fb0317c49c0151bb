"""Pieces that wait for whoever stores them: bounded by bytes, so that a slow store costs saving and never memory."""

from __future__ import annotations

import threading
from collections import deque

from services.worker.restore.pieces import HiddenPiece


class PieceQueue:
    """A :class:`~services.worker.restore.pieces.HiddenPieceTaker`, emptied by another thread."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._lock = threading.Lock()
        self._pieces: deque[HiddenPiece] = deque()
        self._nbytes = 0

    def take(self, piece: HiddenPiece) -> bool:
        """False when its bytes do not fit."""
        with self._lock:
            if self._nbytes + piece.nbytes > self._capacity:
                return False
            self._pieces.append(piece)
            self._nbytes += piece.nbytes
            return True

    def drain(self) -> list[HiddenPiece]:
        """All pieces so far, oldest first; they leave the queue."""
        with self._lock:
            pieces, self._pieces, self._nbytes = list(self._pieces), deque(), 0
            return pieces

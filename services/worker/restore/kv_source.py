"""The source of the layers of a prefix that are restored as KV."""

from __future__ import annotations

from typing import Protocol

from services.worker.kv.movers.protocol import Fence


class KvSource(Protocol):
    """KV of the same tokens, loaded into their pages."""

    def load(self, layer: int) -> None:
        """Copy one layer into its device pages, or launch the copy.

        Raises PiecesRefused for data that cannot be trusted.
        """

    def fence(self) -> Fence | None:
        """Return a point after all loads so far; None when they are done already."""

    def drain(self) -> None:
        """Return when nothing is being written any more."""

"""Whether KV that was used only once is worth a copy in a full host pool, by what became of such copies so far.

HotPrefix (3.3.2) refuses whatever was used less often than a threshold. Where requests share what is popular, hardly
any of that comes back, and its copies push out others; where agents go on, what one step computed is just what the
next one reads, and the same rule loses it. So it is measured: of *first* copies, made of nodes that were used less
often than ``admission_frequency`` until then, how many pages are loaded before they leave. One such node in
:data:`SAMPLED` is copied in any case, and those alone are counted, so that a cell that refuses the others goes on
learning and measures the same as one that does not. Old counts fade.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from services.scheduler.core.cache.hotness.columns import mix

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_tree import Node
    from services.scheduler.core.state import CellState

SAMPLED = 8
"""One node in so many, by its digest, is copied whatever was measured."""

WORTH_ONE_IN = 8
"""First copies pay while one page of theirs in so many is loaded: what leaves for them would be loaded, too."""

LEARNED_TURNOVERS = 1
"""First copies of so many times the pool are offered before any is refused."""

REMEMBERED_TURNOVERS = 8
"""First copies of so many times the pool halve what was counted before."""


class CopyReturns(msgspec.Struct):
    """Pages of sampled first copies in a host pool: made, and loaded by a request for the first time."""

    made: int = 0
    loaded: int = 0
    is_learned: bool = False

    def note_copy(self, node: Node, pages: int, pool_pages: int) -> None:
        """A first copy of so many pages is being made; ``pool_pages`` is the pool's size."""
        if not is_sampled(node):
            return
        self.made += pages
        self.is_learned |= SAMPLED * self.made >= LEARNED_TURNOVERS * pool_pages
        if SAMPLED * self.made >= REMEMBERED_TURNOVERS * pool_pages:
            self.made //= 2
            self.loaded //= 2

    def note_load(self, node: Node, pages: int) -> None:
        """A request loads so many pages of a first copy, which none has loaded before."""
        if is_sampled(node):
            self.loaded += pages

    def first_copies_pay(self) -> bool:
        """Whether first copies come back often enough; they do until something else is known."""
        return not self.is_learned or WORTH_ONE_IN * self.loaded >= self.made


def is_sampled(node: Node) -> bool:
    """Whether a node is copied in any case. A polynomial's low bits are weak, so it is mixed."""
    return mix(node.digest) % SAMPLED == 0


def is_first_use(state: CellState, node: Node, uses_now: int = 0) -> bool:
    """Whether a node was used less often than the threshold; ``uses_now`` of its uses are just being made."""
    frequency, _ = state.hotness.lookup(node.digest)
    return frequency - uses_now < state.config.admission_frequency

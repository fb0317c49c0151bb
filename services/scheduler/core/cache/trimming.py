"""Cutting a victim that is much larger than the pages that are missing, so that only its end is evicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import Node, page_count
from services.scheduler.core.cache.residency import split_node

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState

# Cutting a long node for every few pages would leave a chain of tiny nodes and a backup for each.
LEAST_EVICTED_TOKENS = 256
# Bounds the size of one BackupPages or PromotePages message: 24 bytes a page.
TRANSFER_PAGES = 8192


def trim(state: CellState, node: Node, pages: int) -> None:
    """Cut off the front of a victim that is much larger than the pages that are missing; what is left is to go."""
    least = -(-LEAST_EVICTED_TOKENS // state.tree.page_size)
    excess = page_count(state.tree, node) - min(max(pages, least), TRANSFER_PAGES)
    if excess > 0 and not node.transfer:
        split_node(state, node, excess)  # The lower part keeps the id.
        state.count("victims_cut")

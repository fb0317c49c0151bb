"""Where the tokens of a hit come from, for usage and counters: neighbours, the disk, the object store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import TOKEN_BYTES

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_match import PrefixMatch
    from services.scheduler.core.request import Request


def neighbour_tokens_of(found: PrefixMatch, prompt_tokens: int) -> int:
    """How many tokens of the prompt are copied from neighbours."""
    spans = [
        (node.depth, node.depth + len(node.tokens) // TOKEN_BYTES)
        for node, source in zip([*found.joined, *found.loaded], found.sources, strict=True)
        if source
    ]
    return sum(max(0, min(end, prompt_tokens) - start) for start, end in spans)


def fetched_tokens(request: Request, start: int, end: int, elsewhere: int) -> tuple[int, int]:
    """How many of the loaded tokens [start, end) were fetched for this request, from disk and from the object store.

    ``elsewhere`` of them are copied from neighbours.
    """
    fetched = max(0, min(end, request.fetched_to) - max(start, request.fetched_from))
    fetched = min(fetched, end - start - elsewhere)
    remote = min(fetched, request.fetched_remote)
    return fetched - remote, remote

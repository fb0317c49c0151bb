"""How much of a request's prefix a worker can reuse: its own device first, then its node's host pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.scheduler.core.prefix_tree import Node, Path, match_again, page_count
from services.scheduler.core.residency import split_node
from services.scheduler.core.state import CellState, Request, Worker, worker_storage_id

NOTHING_JOINABLE: Mapping[int, None] = {}


@dataclass(slots=True)
class Reach:
    """The usable part of a match, top first: what is on the device, then what loads bring.

    ``joined`` nodes are loaded by the batch that is being formed, for another request of it (a bundle hit, Strata
    4.3.2); ``host`` nodes would be loaded for this one. ``awaited`` is a node that an earlier batch or a promotion
    is loading, right below what is usable.
    """

    device: list[Node]
    joined: list[Node]
    host: list[Node]
    device_pages: int
    joined_pages: int
    host_pages: int
    awaited: Node | None

    @property
    def pages(self) -> int:
        return self.device_pages + self.joined_pages + self.host_pages

    @property
    def nodes(self) -> list[Node]:
        """All usable nodes, top first."""
        return [*self.device, *self.joined, *self.host]

    @property
    def deepest_held(self) -> Node | None:
        """The deepest node that has device pages already, valid or about to be."""
        if self.joined:
            return self.joined[-1]
        return self.device[-1] if self.device else None


def may_reuse(request: Request) -> bool:
    """Whether a request reads the cache at all; prompt logprobs need every token computed."""
    return request.submit.cache.read and request.submit.sampling.prompt_logprobs is None


def matched_path(state: CellState, request: Request) -> Path:
    """What the tree knows of this request's tokens, on whatever tier. Notes in the request where the match ended.

    At least the last token must be computed, for its logits; so the match ends a token before the end.
    """
    submit = request.submit
    if not state.tree.page_size or not may_reuse(request):
        return []
    page_size = state.tree.page_size
    max_pages = (request.token_count - 1) // page_size
    path = match_again(
        state.tree, submit.namespace, request.tokens, max_pages, request.matched_node, request.matched_tokens
    )
    request.matched_node = request.matched_tokens = 0
    if path:
        node, pages = path[-1]
        # Another attempt may go on with other tokens behind the prompt; the prompt itself never changes.
        request.matched_node = node.id
        request.matched_tokens = min(node.depth + pages * page_size, submit.prompt_tokens // page_size * page_size)
    return path


def reach(state: CellState, path: Path, worker: Worker, joinable: Mapping[int, None] = NOTHING_JOINABLE) -> Reach:
    """The part of ``path`` that this worker can reuse. Does not mutate.

    ``joinable`` nodes are loaded by the batch that is being formed: its chunks may stand on them.
    """
    storage_id = worker_storage_id(state, worker)
    found = Reach([], [], [], 0, 0, 0, None)
    for node, pages in path:
        if worker.worker_id in node.device:
            found.device.append(node)
            found.device_pages += pages
        elif worker.worker_id in node.loading:
            if node.id not in joinable:
                found.awaited = node
                break
            found.joined.append(node)
            found.joined_pages += pages
        elif storage_id in node.host and storage_id not in node.quarantined:
            found.host.append(node)
            found.host_pages += pages
        else:
            break
    if found.host_pages * state.tree.page_size < state.config.min_host_load_tokens:
        found.host, found.host_pages = [], 0
    return found


def cut_to_fit(state: CellState, path: Path, found: Reach) -> Node | None:
    """Split the last node of the match where only a part of it is used, so that whole nodes are used. Mutates.

    Returns the new upper part, if there is one.
    """
    used = len(found.device) + len(found.joined) + len(found.host)
    if not used:
        return None
    node, pages = path[used - 1]
    if pages == page_count(state.tree, node):
        return None
    upper = split_node(state, node, pages)
    (found.host or found.joined or found.device)[-1] = upper
    return upper

"""How much of a request's prefix a worker can reuse: its own device first, then its node's host pool."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.core.prefix_tree import Node, Path, match_prefix, page_count
from services.scheduler.core.residency import split_node
from services.scheduler.core.state import CellState, Request, Worker, worker_storage_id


@dataclass(slots=True)
class Reach:
    """The usable part of a match. ``is_loading`` says that another request's load is about to extend it."""

    device: list[Node]
    host: list[Node]
    device_pages: int
    host_pages: int
    is_loading: bool


def matched_path(state: CellState, request: Request) -> Path:
    """What the tree knows of this request's tokens, on whatever tier. Does not mutate.

    At least the last token must be computed, for its logits; so the match ends a token before the end.
    """
    submit = request.submit
    if not state.tree.page_size or not submit.cache.read or submit.sampling.prompt_logprobs is not None:
        return []
    max_pages = (request.token_count - 1) // state.tree.page_size
    return match_prefix(state.tree, submit.namespace, request.tokens, max_pages)


def reach(state: CellState, path: Path, worker: Worker) -> Reach:
    """The part of ``path`` that this worker can reuse. Does not mutate."""
    storage_id = worker_storage_id(state, worker)
    found = Reach([], [], 0, 0, False)
    for node, pages in path:
        if worker.worker_id in node.device:
            found.device.append(node)
            found.device_pages += pages
        elif worker.worker_id in node.loading:
            found.is_loading = True
            break
        elif storage_id in node.host and storage_id not in node.quarantined:
            found.host.append(node)
            found.host_pages += pages
        else:
            break
    if found.host_pages * state.tree.page_size < state.config.min_host_load_tokens:
        found.host, found.host_pages = [], 0
    return found


def cut_to_fit(state: CellState, path: Path, found: Reach) -> None:
    """Split the last node of the match where only a part of it is used, so that whole nodes are used. Mutates."""
    used = len(found.device) + len(found.host)
    if not used:
        return
    node, pages = path[used - 1]
    if pages < page_count(state.tree, node):
        upper = split_node(state, node, pages)
        (found.host or found.device)[-1] = upper

"""What the eviction policies of all pools are told of requests, and the work that they do ahead.

What happens to nodes they are told where it happens, see :mod:`residency`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import Node, descendants_first
from services.scheduler.core.cache.residency import DEVICE, HOST, copies_of, devices_of, moment, offer, order_of

if TYPE_CHECKING:
    from services.scheduler.core.cache.eviction import Policy
    from services.scheduler.core.state import CellState, Worker


def renew_orders(state: CellState) -> None:
    """Start every pool's policy anew with what is resident, after a change of policy."""
    state.orders.clear()
    now = moment(state)
    for root_id in state.tree.roots.values():
        for node in reversed(descendants_first(state.tree, state.tree.nodes[root_id])):
            for worker_id in devices_of(state, node):
                order_of(state, DEVICE, worker_id).add(node, now)
            for storage_id in copies_of(state, node):
                order_of(state, HOST, storage_id).add(node, now)
            offer(state, node)


def visit(state: CellState, worker_id: str, storage_id: str, path: list[Node], prompt_tokens: int) -> None:
    """A request was admitted that reuses ``path``: tell the policies of its device and of its host pool."""
    now = moment(state, state.admissions)
    now.cost_depth_tokens, now.host_cost = state.speed.restoration_costs()
    order_of(state, DEVICE, worker_id).visit([node for node in path if worker_id in node.device], prompt_tokens, now)
    if storage_id:
        held = [node for node in path if storage_id in node.host]
        order_of(state, HOST, storage_id).visit(held, prompt_tokens, now)


def ended(state: CellState, worker: Worker, admission: int, answer_tokens: int) -> None:
    """A request leaves its worker: tell the same policies, before its pages may go."""
    for order in _orders_of(state, worker.worker_id, state.storage_id_of(worker)):
        order.ended(admission, answer_tokens)


def prepare(state: CellState, worker_id: str, storage_id: str) -> None:
    """Let the policy of a device, or else that of its host pool, do a little of what admissions would wait for."""
    for order in _orders_of(state, worker_id, storage_id):
        if order.prepare():
            return


def _orders_of(state: CellState, worker_id: str, storage_id: str) -> list[Policy]:
    """Of a device and of a host pool, as far as they have been spoken of."""
    keys = (f"{DEVICE}/{worker_id}", f"{HOST}/{storage_id}")
    return [state.orders[key] for key in keys if key in state.orders]

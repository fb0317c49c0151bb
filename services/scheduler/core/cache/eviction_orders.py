"""Events of requests for the eviction policies of all pools, the policies' work ahead, and their replacement.

Events of nodes are announced where they happen, see :mod:`residency`.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from services.scheduler.core.cache.eviction.policy import Renewal
from services.scheduler.core.cache.residency import DEVICE, HOST, coming_order_of, moment, order_of, tell
from services.scheduler.core.rates import lent_cost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.scheduler.core.cache.eviction import Policy
    from services.scheduler.core.cache.prefix_tree import Node
    from services.scheduler.core.state import CellState, Worker
    from services.scheduler.core.step import Step


_HOSTS = attrgetter("host")

RENEWAL_UNITS = 1 << 12
"""Nodes that new policies are told of in one step (20 to 50 ms); sixteen children put on the list count as one."""

RENEWAL_PAUSE_MS = 20
_CHILDREN_A_UNIT = 16
RENEWAL_TIMER = "renew"


def begin_renewal(state: CellState) -> None:
    """Begin to replace every pool's policy by a fresh one that learns the resident nodes, after a change of policy."""
    state.renewal = Renewal(left=list(reversed(state.tree.roots.values())))


def go_on_renewing(step: Step) -> None:
    """Tell the new policies of some more nodes; a timer continues with the rest. After the last they take effect."""
    state = step.state
    if state.renewal is not None:
        _renew_some(state, state.renewal, RENEWAL_UNITS)
    if state.renewal is not None:
        step.set_timer(RENEWAL_TIMER, "renew", "", RENEWAL_PAUSE_MS)
    else:
        step.cancel_timer(RENEWAL_TIMER)


def renew_orders(state: CellState) -> None:
    """Replace every pool's policy by a fresh one at once."""
    begin_renewal(state)
    while state.renewal is not None:
        _renew_some(state, state.renewal, RENEWAL_UNITS)


def _renew_some(state: CellState, renewal: Renewal, units: int) -> None:
    nodes, left = state.tree.nodes, renewal.left
    while left and units > 0:
        node = nodes.get(left.pop())
        if node is not None:
            tell(state, renewal, node)
            children = node.child_ids
            left.extend(children)
            units -= 1 + len(children) // _CHILDREN_A_UNIT
    if not left:
        state.retired += state.orders.values()
        state.orders, state.renewal = renewal.orders, None


def visit(state: CellState, worker_id: str, storage_id: str, path: list[Node], prompt_tokens: int) -> None:
    """Tell the policies of a device and of its host pool of an admitted request that reuses ``path`` (top first)."""
    now = moment(state, state.admissions)
    now.cost_depth_tokens, now.host_cost = state.speed.restoration_costs()
    held = path
    if path and worker_id not in path[-1].device:  # Else it has all above, too.
        held = [node for node in path if worker_id in node.device]
    has_copies = storage_id and any(map(_HOSTS, path))
    copied = [node for node in path if storage_id in node.host] if has_copies else []
    order_of(state, DEVICE, worker_id).visit(held, prompt_tokens, now)
    renewal = state.renewal
    if renewal is not None:
        held = [node for node in held if node.id in renewal.told]
        coming_order_of(state, renewal, DEVICE, worker_id).visit(held, prompt_tokens, now)
    if not storage_id:
        return
    storage = state.storages[storage_id]
    now.lent_cost = lent_cost(state, storage) if storage.shares else 1.0
    order_of(state, HOST, storage_id).visit(copied, prompt_tokens, now)
    if renewal is not None:
        copied = [node for node in copied if node.id in renewal.told]
        coming_order_of(state, renewal, HOST, storage_id).visit(copied, prompt_tokens, now)


def ended(state: CellState, worker: Worker, admission: int, answer_tokens: int) -> None:
    """Tell the same policies that a request leaves its worker, before its pages may be freed."""
    storage_id = state.storage_id_of(worker)
    for order in _orders_of(state.orders, worker.worker_id, storage_id):
        order.ended(admission, answer_tokens)
    for order in _orders_of(state.renewal.orders, worker.worker_id, storage_id) if state.renewal is not None else ():
        order.ended(admission, answer_tokens)


def prepare(state: CellState, worker_id: str, storage_id: str) -> None:
    """Let the policy of a device, or else that of its host pool, do a little work that admissions would wait for."""
    for order in _orders_of(state.orders, worker_id, storage_id):
        if order.prepare():
            return


def _orders_of(orders: Mapping[str, Policy], worker_id: str, storage_id: str) -> list[Policy]:
    """Return the policies of a device and of a host pool, where they exist yet."""
    keys = (f"{DEVICE}/{worker_id}", f"{HOST}/{storage_id}")
    return [orders[key] for key in keys if key in orders]

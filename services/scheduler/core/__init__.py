"""The scheduler's core: a pure fold over the cell's inputs.

::

    step(state, stamped_input) -> outputs

It owns the prefix tree and the page tables of every pool, and decides everything: order, placement, batches, leases,
loads, backups, evictions. It does no I/O, reads no clock, draws no chance, and iterates over no set, so that a
recording replays to the byte. Its packages and the order in which they import are in ARCHITECTURE ("The core in
layers"). Read it in this order: ``fold.main_loop`` (what a step does), ``state`` and ``request``, ``lifecycle``
(tables), ``cache.prefix_tree`` and ``cache.residency`` (nodes, pages), ``queue.queueing``, ``queue.placement`` and
``waiting.waits`` (requests that wait), ``queue.batching`` and ``queue.admission`` (what runs next),
``queue.completion`` and ``cache.insertion`` (results), then ``tiers``, ``restoring`` and, where they interest, the
features.
"""

from services.scheduler.core.explain.explanations import find_admissions, find_divergences
from services.scheduler.core.fold.invariants import check_invariants
from services.scheduler.core.fold.main_loop import pending_timers, step
from services.scheduler.core.fold.snapshot import decode_state, encode_state
from services.scheduler.core.fold.status import list_cache, status
from services.scheduler.core.hidden.hidden_form import form_obstacle
from services.scheduler.core.state import CellState, new_state
from services.scheduler.core.step import CancelTimer, Output, SetTimer, Stamped

__all__ = [
    "CancelTimer",
    "CellState",
    "Output",
    "SetTimer",
    "Stamped",
    "check_invariants",
    "decode_state",
    "encode_state",
    "find_admissions",
    "find_divergences",
    "form_obstacle",
    "list_cache",
    "new_state",
    "pending_timers",
    "status",
    "step",
]

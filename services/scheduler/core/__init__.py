"""The scheduler's core: a pure fold over the cell's inputs.

::

    step(state, stamped_input) -> outputs

It owns the prefix tree and the page tables of every pool, and decides everything: order, placement, batches,
leases, loads, backups, evictions. It does no I/O, reads no clock, draws no chance, and iterates over no set, so
that a recording replays to the byte. Read it in this order: ``machine`` (which input goes where), ``state``,
``lifecycle``, ``prefix_tree`` and ``residency`` (who holds what), ``queueing``, ``placement`` and ``deferral`` (who
waits where, and for what), ``batching``, ``schedules`` and ``admission`` (who runs next), ``completion`` and
``insertion`` (what comes back), ``tiers``, ``backups``, ``loads`` and ``neighbours`` (what moves between memories),
``writes`` and ``saves`` (what goes below them), ``state_form``, ``state_leases`` and ``state_saves`` (what of it in
another form than KV), ``prefetch``, ``restoration_choice``, ``state_runs`` and ``restorations`` (what comes back up
from there, and how), ``misses``, ``explanations`` and ``recollection`` (what is said of it afterwards).
"""

from services.scheduler.core.explain.explanations import find_admissions
from services.scheduler.core.fold.invariants import check_invariants
from services.scheduler.core.fold.main_loop import pending_timers, step
from services.scheduler.core.fold.snapshot import decode_state, encode_state
from services.scheduler.core.fold.status import list_cache, status
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
    "list_cache",
    "new_state",
    "pending_timers",
    "status",
    "step",
]

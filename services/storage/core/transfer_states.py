"""The life of one transfer, as a table.

========  =================  =========  ==================================================================
from      event              to         what happened
========  =================  =========  ==================================================================
queued    started            copying    an I/O thread took it
queued    revoked            failed     its device pool was detached, or the storage stops
copying   copied             done       every page is in the host pool, sealed
copying   raised             failed     the copy failed; none of its host pages may be used
copying   revoked            revoked    its device pool was detached under the copy, which ends first
revoked   copied             failed     what was copied may be of no use
revoked   raised             failed
========  =================  =========  ==================================================================

``done`` and ``failed`` are ends; each is answered by one ``BackupDone``.
"""

from __future__ import annotations

from typing import Final, Literal

from shared.errors import IllegalTransition

TransferState = Literal["queued", "copying", "revoked", "done", "failed"]
TransferEvent = Literal["started", "copied", "raised", "revoked"]

TRANSITIONS: Final[dict[tuple[TransferState, TransferEvent], TransferState]] = {
    ("queued", "started"): "copying",
    ("queued", "revoked"): "failed",
    ("copying", "copied"): "done",
    ("copying", "raised"): "failed",
    ("copying", "revoked"): "revoked",
    ("revoked", "copied"): "failed",
    ("revoked", "raised"): "failed",
}


def next_state(state: TransferState, event: TransferEvent) -> TransferState:
    """Return the state to which ``event`` leads from ``state``. Raises IllegalTransition for a missing entry."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"a transfer that is {state} cannot be {event}") from None

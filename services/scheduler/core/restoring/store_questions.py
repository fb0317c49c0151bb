"""In which form an object store is asked for chunks of which no disk of the node is known to have any.

Of the store nothing is known beforehand: a fetch is the question, and what comes of it the answer. Chunks are asked
for first in the form in which the cell saves prefixes now, and in the other where that brought nothing. What a request
was told that the store does not have it does not ask for again.

Most prompts have been seen by nobody, and each such question costs the store's time, pages and a wait. So the second
form is given up for a while where it brought nothing to several requests in a row: then one in so many asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.hidden.hidden_form import is_worth_keeping
from services.scheduler.core.restoring.restoration_ways import may_restore

if TYPE_CHECKING:
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Storage, Worker
    from shared.messages.pools import ChunkForm

_PATIENCE = 8
"""Requests in a row to which a second form may bring nothing, until only one in so many asks for it."""


def form_to_ask(state: CellState, request: Request, worker: Worker, storage: Storage, start: int) -> ChunkForm | None:
    """The form in which to ask for what begins with token ``start``; None where there is nothing to ask for any more.

    A question that is put off for good is written down as one that brought nothing.
    """
    if not storage.has_remote:
        return None
    for place, form in enumerate(_forms(state, request, worker, storage)):
        if request.prefetch.lacks.is_known(form, start):
            continue
        blanks = storage.blanks.of(form)
        if place == 0 or blanks < _PATIENCE or blanks % _PATIENCE == 0:
            return form
        state.count("store_questions_spared")
        storage.blanks.note_nothing(form)
        request.prefetch.lacks.note(form, start)
    return None


def _forms(state: CellState, request: Request, worker: Worker, storage: Storage) -> tuple[ChunkForm, ...]:
    """What may be asked for, and in which order."""
    if not may_restore(state, request, worker, storage):
        return ("kv",)
    if state.config.restoring == "state":
        return ("state",)
    return ("state", "kv") if is_worth_keeping(state, storage) else ("kv", "state")

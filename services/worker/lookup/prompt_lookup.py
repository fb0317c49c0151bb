"""Decode steps that verify proposals: several tokens of a request in one step, where its text repeats itself.

A proposal is what followed the last tokens of a request when they last occurred in its prompt or answer (prompt lookup
decoding). Its rows are computed beside the next one, each as a segment of its own, so that every row goes through the
kernels of a decode step and has the bits that it has in any batch. The sampler then chooses a token from each row in
turn, as it would have without proposals, up to the first that is not the one proposed. So tokens do not depend on
proposals.

The KV of rejected rows lies behind the computed tokens, in pages that are this request's alone, and is overwritten by
the tokens that follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from services.worker.compute import Computed
from services.worker.hidden_saving import HiddenSaving
from services.worker.lookup.ngram_index import NgramIndex
from services.worker.lookup.proposal_length import ProposalLength, row_cost
from services.worker.lookup.request_lookup import RequestLookup
from services.worker.requests import RunningRequest
from services.worker.steps import Work

STEP_ROWS = 16
"""Rows of a step that proposals may fill. On CPUs a step of few rows is bound by reading weights."""


class PromptLookup:
    """Proposals for the steps of one worker. Used by the compute thread only."""

    def __init__(self, most: int, saving: HiddenSaving, *, weight_bytes: int, token_bytes: int) -> None:
        """Propose up to ``most`` tokens at a time.

        Requests whose hidden states ``saving`` records get none, because those of rejected rows would be among them,
        nor do those behind a sparse prefix. A step reads ``weight_bytes``, and ``token_bytes`` for each token of KV.
        """
        self._most, self._saving = most, saving
        self._weight_bytes, self._token_bytes = weight_bytes, token_bytes

    def propose(self, work: Sequence[Work]) -> list[Work]:
        """Return ``work``, decode rows alone, with proposals as far as rows and the requests' pages are left."""
        spare = STEP_ROWS - len(work)
        if spare <= 0:
            return list(work)
        step_bytes = self._weight_bytes + self._token_bytes * sum(item.end for item in work)
        proposing: list[Work] = []
        for others, item in zip(range(len(work) - 1, -1, -1), work, strict=True):
            cost = row_cost(self._token_bytes * item.end, step_bytes, len(work))
            proposed = self._proposal(item.request, spare // (others + 1), cost)
            spare -= len(proposed)
            proposing.append(replace(item, end=item.end + len(proposed), proposed=proposed) if proposed else item)
        return proposing

    def note(self, done: Iterable[Computed]) -> None:
        """Adapt the length of later proposals to how many tokens of a step's proposals were accepted."""
        for one in done:
            lookup = one.work.request.lookup
            if lookup is not None and not one.work.is_chunk:
                lookup.length.note(len(one.work.proposed), one.accepted, lookup.cost)

    def _proposal(self, request: RunningRequest, spare: int, cost: int) -> tuple[int, ...]:
        if not spare or request.sparse is not None or self._saving.is_saving(request.request_id):
            return ()
        lookup = request.lookup
        if lookup is None:
            lookup = request.lookup = RequestLookup(ProposalLength(self._most))
        lookup.cost = cost
        # The last token of an answer is followed by none, and none is computed where there is no page for it.
        remaining = request.answer.max_tokens - len(request.answer.tokens) - 1
        most = min(lookup.length.tokens(cost), spare, remaining, request.capacity - request.computed - 1)
        if most <= 0:
            return ()
        if lookup.index is None:
            lookup.index = NgramIndex(request.tokens, expected=len(request.tokens) + remaining)
        return lookup.index.continuation(most)

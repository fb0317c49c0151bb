"""The state of prompt lookup for one running request. It ends with the request."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.lookup.ngram_index import NgramIndex
from services.worker.lookup.proposal_length import ProposalLength


@dataclass(slots=True)
class RequestLookup:
    """The proposals of one request.

    The index is made when a proposal is first wanted. ``cost``: a row's in the step under way (``row_cost``).
    """

    length: ProposalLength
    cost: int = 0
    index: NgramIndex | None = None

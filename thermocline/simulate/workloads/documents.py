"""Questions about long documents, close together or far apart (Strata 5.1, Table 1, and 5.3.3).

Numbers of contexts and queries and average lengths are the paper's. ``distance`` orders the queries: ``min`` puts
those of one context in a row, ``shuffled`` is the paper's own order, ``max`` spreads those of one context evenly.
The length of a question and the spread of lengths are assumptions, and settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from thermocline.simulate.tokens import Span
from thermocline.simulate.workloads.asked import OUTPUT, QUESTION, SHARED, Asked, Workload, name
from thermocline.simulate.workloads.lengths import around, scaled_to_mean, shares

Count = Annotated[int, Meta(ge=0)]


class DocumentOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of document questions; 0 is the dataset's own value, but for ``spread``."""

    dataset: Literal["loogle", "narrativeqa", "reviewmt"] = "loogle"
    distance: Literal["min", "shuffled", "max"] = "shuffled"
    contexts: Count = 0
    queries: Count = 0  # Total of all contexts.
    prompt_tokens: Count = 0  # On average.
    answer_tokens: Count = 0  # On average.
    question_tokens: Annotated[int, Meta(ge=1)] = 32  # On average.
    spread: Annotated[float, Meta(ge=0)] = 0.25  # Standard deviation of the logarithm of lengths.


@dataclass(frozen=True, slots=True)
class _Dataset:
    contexts: int
    queries: int
    prompt_tokens: int
    answer_tokens: float


_DATASETS = {
    "loogle": _Dataset(105, 2_410, 21_613, 15.6),
    "narrativeqa": _Dataset(50, 1_461, 54_797, 13.0),
    "reviewmt": _Dataset(100, 1_092, 17_708, 208.3),
}


class DocumentWorkload(Workload):
    """Questions of one dataset, each with its document in front."""

    def __init__(self, options: DocumentOptions, seed: int) -> None:
        """Draw the documents' lengths by ``seed``, scaled so that prompts have the wanted length on average."""
        known = _DATASETS[options.dataset]
        self._options = options
        self._rng = Random(seed)
        self._answer_tokens = options.answer_tokens or known.answer_tokens
        contexts = options.contexts or known.contexts
        self._counts = shares(options.queries or known.queries, [1.0] * contexts)
        prompt_tokens = options.prompt_tokens or known.prompt_tokens
        drawn = [around(self._rng, prompt_tokens, options.spread) for _ in range(contexts)]
        document_tokens = max(1, prompt_tokens - options.question_tokens)
        self._lengths = scaled_to_mean(drawn, [1.0] * contexts, document_tokens)

    def requests(self) -> Iterator[Asked]:
        """Yield all queries in the order of ``distance``, without times."""
        for number, context in enumerate(self._order()):
            document = Span(name(SHARED, context), self._lengths[context])
            spread = self._options.spread
            question = Span(name(QUESTION, number), around(self._rng, self._options.question_tokens, spread))
            answer = Span(name(OUTPUT, number), around(self._rng, self._answer_tokens, spread))
            yield Asked((document, question), answer)

    def _order(self) -> list[int]:
        if self._options.distance == "max":
            # Query k of n of a context belongs at (k + 1/2) / n of the whole; ties go by context.
            places = [((k + 0.5) / n, context) for context, n in enumerate(self._counts) for k in range(n)]
            return [context for _, context in sorted(places)]
        order = [context for context, count in enumerate(self._counts) for _ in range(count)]
        if self._options.distance == "shuffled":
            self._rng.shuffle(order)
        return order

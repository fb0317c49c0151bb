"""Tenants, each with its own system prompt and documents, that send bursts: few are large, most are quiet."""

from __future__ import annotations

from thermocline.simulate.tokens import Span
from thermocline.simulate.workloads.asked import SHARED, name
from thermocline.simulate.workloads.open_loop import (
    Count,
    OpenLoopOptions,
    OpenLoopWorkload,
    Real,
    Zipf,
    between,
    length_of,
    whole_between,
)

_MOST_DOCUMENTS = 1 << 16  # Per tenant; number 0 of each is its system prompt.


class TenantOptions(OpenLoopOptions, frozen=True, kw_only=True):
    """Options of tenants; 0 is drawn by the seed."""

    tenants: Count = 0
    tenant_exponent: Real = 0.0  # Zipf exponent of the tenants' bursts.
    burst: Real = 0.0  # Requests of one tenant in a row, on average.
    system_tokens: Count = 0  # On average.
    documents: Count = 0  # Per tenant.
    document_exponent: Real = 0.0  # Zipf exponent of their popularity.
    document_tokens: Count = 0  # On average.


class TenantWorkload(OpenLoopWorkload):
    """Requests of one tenant at a time, in bursts of geometric length."""

    def __init__(self, options: TenantOptions, seed: int) -> None:
        """Draw by ``seed`` what ``options`` leaves at 0, such as the number of tenants and the length of bursts."""
        super().__init__(options, seed)
        rng = self._rng
        self._tenants = Zipf(
            whole_between(rng, options.tenants, 10, 150), between(rng, options.tenant_exponent, 0.4, 1.2)
        )
        self._burst = max(1.0, between(rng, options.burst, 1, 30))
        self._system_tokens = whole_between(rng, options.system_tokens, 200, 3000)
        documents = min(whole_between(rng, options.documents, 3, 40), _MOST_DOCUMENTS - 1)
        self._documents = Zipf(documents, between(rng, options.document_exponent, 0.2, 1.2))
        self._document_tokens = whole_between(rng, options.document_tokens, 300, 5000)
        self._tenant = self._tenants.draw(rng)

    def _prefix(self, number: int, time_s: float) -> tuple[Span, ...]:
        if self._rng.random() < 1 / self._burst:
            self._tenant = self._tenants.draw(self._rng)
        system = self._tenant * _MOST_DOCUMENTS
        document = system + 1 + self._documents.draw(self._rng)
        return (
            Span(name(SHARED, system), length_of(self._seed, system, self._system_tokens)),
            Span(name(SHARED, document), length_of(self._seed, document, self._document_tokens)),
        )
